"""One checkpoint at a path of its own: no run, no step, no Ray."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future

from raystate.arrays.monitoring import SaveEvents
from raystate.core.formats.errors import ConfigError, RaystateError, StorageError
from raystate.public_calls import public
from raystate.reader.assembling import take, write_checkpoint
from raystate.reader.background import in_background
from raystate.reader.turns import Handed, Turn
from raystate.storage import Storage, StorageUrl, canonical_url, open_storage
from raystate.storage.names import ORBAX_TEMPORARY
from raystate.waits import LONGEST_S

_ARRAYS = "arrays"  # no path is called so. Its turn is held from when the arrays of a background save are taken until it is written
_inside = threading.local()  # .path: of the save_async that this thread is in


@public
def save(
    path: StorageUrl,
    tree: object,
    *,
    items: Mapping[str, object] | None = None,
    metrics: Mapping[str, object] | None = None,
    custom: object = None,
    overwrite: bool = False,
) -> None:
    """Write one pytree and its items as a plain Orbax checkpoint at `path`: whole and durable, or not at all.

    No run, no step, no Ray. The bytes on disk and the rules are those of `StateManager.save`. Each
    chunk has a checksum. Stock Orbax, v0 and v1, reads it with no raystate installed.

    Saves of one path are written in the order of their calls, from any thread and in the
    background. Each waits for the one before, at most 600 s.

    Args:
        path: gs://bucket/…, s3://bucket/…, file://…, a directory or a PathLike: the checkpoint's own folder, which must not exist yet.
        tree: any pytree of arrays, Python numbers and strings; a single array or number, too.
        items: name -> iterator (`get_state`/`set_state`), checkpointable (`async` `save`/`load`), tree with arrays, or JSON value.
        metrics: name -> number or 0-d array.
        custom: anything JSON.
        overwrite: replace the checkpoint that is at `path`, if nothing else lies in its folder. In
            a directory whose file system can exchange names (all but NFS and its like), a reader
            always finds the old one or the new one. Elsewhere there is a moment with none.

    Raises:
        ConfigError: names a leaf or an argument that can't be saved. Or the program has several processes.
        StorageError: there is something at `path`, it lies in a run's storage or in a checkpoint, or storage failed: then nothing is
            left there.
    """
    storage, folder = _storage_above(path)
    events = SaveEvents(storage.url, background=False)
    place = f"{storage.url}/{folder}"
    turn = Turn(place)
    try:
        content = take(tree, items=items, metrics=metrics, custom=custom)
        # In code that save_async() runs: those that have not begun may wait for its arrays.
        if not turn.wait(LONGEST_S, begun_only=getattr(_inside, "path", None) is not None):
            raise _too_late(place, "nothing was written")
        turn.begin()
        write_checkpoint(storage, folder, content, overwrite=overwrite)
    finally:
        turn.leave()
    events.done(content.described.layout.data_bytes)
    events.unblocked()


@public
def save_async(
    path: StorageUrl,
    tree: object,
    *,
    items: Mapping[str, object] | None = None,
    metrics: Mapping[str, object] | None = None,
    custom: object = None,
    overwrite: bool = False,
) -> Future[None]:
    """Like `save`, but return as soon as the arrays are taken: the next step may donate them, and numpy arrays may be changed.

    Errors of the arguments are raised here; the future has those of storage, also that there is
    something at `path`. A call waits, at most 600 s, until the save before it is written or has
    failed, as in Orbax. So the program holds the arrays of one save at a time, and the order of the
    calls is kept.

    The interpreter's exit waits for what is under way, at most 600 s. It logs an error at once.

    Returns:
        A `concurrent.futures.Future`: `result(timeout)` returns None when the checkpoint is durable or raises as `save`; `done()`,
        `exception()`.

    Raises:
        ConfigError: as `save`.
        RaystateError: it was called inside another `save_async`, by an item's `get_state` or a signal's handler.
        StorageError: the save before was not written in 600 s; nothing was taken.
    """
    storage, folder = _storage_above(path)
    events = SaveEvents(storage.url, background=True)
    place = f"{storage.url}/{folder}"
    if (outer := getattr(_inside, "path", None)) is not None:
        raise RaystateError(
            f"saving {place}: save_async() was called inside save_async() of {outer}, by an item's get_state or a signal's handler; "
            "save() may be called there"
        )
    turns: list[Turn] = []

    def write() -> None:
        write_checkpoint(storage, folder, content, overwrite=overwrite)
        events.done(content.described.layout.data_bytes)

    handed = Handed(write, turns)
    try:
        _inside.path = place
        deadline_s = time.monotonic() + LONGEST_S
        turns.append(Turn(place))
        is_its_turn = turns[0].wait(LONGEST_S)
        # Only now: a save that has the turn of the arrays waits for no other save.
        turns.append(Turn(_ARRAYS))
        if not (is_its_turn and turns[1].wait(deadline_s - time.monotonic())):
            raise _too_late(place, "nothing was taken. Ask its future, save less often")
        turns[0].begin()
        content = take(tree, items=items, metrics=metrics, custom=custom, keep=True)
        # A signal's handler may wait for the future, and what it has interrupted can't go on until it ends.
        future = handed.give(lambda: in_background(f"saving {place}", handed, at_once=turns[0].is_nested))
    except BaseException:
        handed.take_back()
        raise
    finally:
        _inside.path = None
    future.add_done_callback(lambda _: handed.take_back())  # one that is cancelled never begins
    events.unblocked()
    return future


def _too_late(place: str, rest: str) -> StorageError:
    text = f"saving {place}: the save before it is still not written after {LONGEST_S:.0f} s; {rest}"
    return StorageError(text, operation="save", path=place, waited_s=LONGEST_S)


def _storage_above(path: StorageUrl) -> tuple[Storage, str]:
    """The storage above a path, and the name in it."""
    url = canonical_url(path)
    if ORBAX_TEMPORARY in url:
        text = f"path: {url!r} has {ORBAX_TEMPORARY!r} in it, as Orbax names what is unfinished: no reader would list it. Use another name"
        raise ConfigError(text, field="path", got=url)
    scheme, _, rest = url.partition("://")
    above, _, name = rest.rpartition("/")
    if scheme == "file" and not above:  # a folder of the root itself, which can't be a run's storage
        from raystate.storage.directory import DirectoryStorage

        return DirectoryStorage("file://"), name
    if not above:
        raise ConfigError(f"path: {url!r} is a whole bucket: save to a name in it, such as {url}/checkpoint", field="path", got=url)
    return open_storage(f"{scheme}://{above}"), name


def _in_a_forked_child() -> None:
    """The call that its parent was in is not the child's."""
    global _inside
    _inside = threading.local()


os.register_at_fork(after_in_child=_in_a_forked_child)
