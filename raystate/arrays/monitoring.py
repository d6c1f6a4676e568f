"""The events that Orbax records with `jax.monitoring`, under the same names, for what raystate does in its place.

So a listener (a dashboard, an alert, a benchmark) goes on to hear them. docs/howto/monitoring.md
has the table.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator

import jax

_GIB = 1 << 30


class SaveEvents:
    """One save's events. Made when it begins.

    Args:
        url: of the storage.
        background: the caller does not wait for it: Orbax names those otherwise.
        begin_s: when it began, in seconds since 1970; None: now.
    """

    def __init__(self, url: str, *, background: bool, begin_s: float | None = None):
        self._kind = storage_type(url)
        self._middle = "async/" if background else ""
        self._background = background
        self._begin_s = time.time() if begin_s is None else begin_s
        jax.monitoring.record_event(self._name("start"))
        jax.monitoring.record_scalar(self._name("start_time"), 1000 * self._begin_s, storage_type=self._kind)
        jax.monitoring.record_event("/jax/orbax/write/storage_type", storage_type=self._kind)

    def unblocked(self) -> None:
        """The caller may go on."""
        now_s = time.time()
        if self._background:
            _duration("/jax/checkpoint/write/async/blocking_duration_secs", now_s - self._begin_s)
        _duration(self._name("blocking_duration_secs"), now_s - self._begin_s, self._kind)
        jax.monitoring.record_scalar(self._name("blocking_end_time"), 1000 * now_s, storage_type=self._kind)

    def done(self, nbytes: int) -> None:
        """It is durable; `nbytes` is what this process had to write."""
        took_s = time.time() - self._begin_s
        jax.monitoring.record_scalar("/jax/orbax/write/gbytes", nbytes / _GIB)
        jax.monitoring.record_scalar("/jax/orbax/write/gbytes_per_sec", nbytes / _GIB / max(took_s, 1e-9))
        jax.monitoring.record_event("/jax/orbax/write/success")
        if self._background:
            _duration("/jax/checkpoint/write/async/total_duration_secs", took_s, self._kind)
        _duration(self._name("total_duration_secs"), took_s, self._kind)
        since_last_save(self._begin_s)

    def _name(self, last: str) -> str:
        return f"/jax/orbax/write/{self._middle}{last}"


class ReadEvents:
    """One restore's events; see `reading`. `nbytes`: array bytes that this process has read; the
    reader sets them."""

    def __init__(self) -> None:
        self.nbytes: int | None = None
        self.found = True


@contextlib.contextmanager
def reading(url: str) -> Generator[ReadEvents, None, None]:
    """Around one restore. If it raises, or `found` is set to False, no success is recorded, as Orbax has it."""
    kind, events, begin_s = storage_type(url), ReadEvents(), time.time()
    jax.monitoring.record_event("/jax/orbax/read/start")
    jax.monitoring.record_event("/jax/orbax/read/storage_type", storage_type=kind)
    yield events
    if not events.found:
        return
    took_s = time.time() - begin_s
    _duration("/jax/orbax/read/blocking_duration_secs", took_s, kind)
    if events.nbytes is not None:
        jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes", events.nbytes / _GIB)
        jax.monitoring.record_scalar("/jax/checkpoint/read/gbytes_per_sec", events.nbytes / _GIB / max(took_s, 1e-9))
    jax.monitoring.record_event("/jax/orbax/read/success")
    _duration("/jax/orbax/read/total_duration_secs", took_s, kind)


def storage_type(url: str) -> str:
    """Orbax's word for where a storage is."""
    return "gcs" if url.startswith("gs://") else "other"


def _duration(name: str, took_s: float, kind: str | None = None) -> None:
    jax.monitoring.record_event_duration_secs(name, took_s, **({} if kind is None else {"storage_type": kind}))


_last_save_s = time.time()  # Orbax, too, counts the first from the start of the process


def since_last_save(begin_s: float) -> None:
    """From the beginning of a save to that of the next, as Orbax counts it: what training would lose between them."""
    global _last_save_s
    since_s, _last_save_s = begin_s - _last_save_s, begin_s
    _duration("/jax/checkpoint/write/duration_since_last_checkpoint_secs", since_s)


# ---------------------------------------------------------------- what others record

_COMPILES = frozenset(f"/jax/core/compile/{what}_duration" for what in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile"))
_hearers: list[Callable[[float], None]] = []
_is_listening = False


def hear_compilation(hearer: Callable[[float], None]) -> Callable[[], None]:
    """Call it with the seconds of each tracing, lowering and compilation, on the thread on which they have just ended.

    Returns:
        A function that ends that.
    """
    global _is_listening
    if not _is_listening:  # one in a process, for good
        _is_listening = True
        jax.monitoring.register_event_duration_secs_listener(_heard)
    _hearers.append(hearer)

    def end() -> None:
        if hearer in _hearers:
            _hearers.remove(hearer)

    return end


def _heard(event: str, duration_secs: float, **_: str | int) -> None:
    if event in _COMPILES:
        for hearer in tuple(_hearers):
            hearer(duration_secs)
