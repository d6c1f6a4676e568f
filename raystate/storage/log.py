"""The log of a run in storage: contiguous, create-once, never deleted. What an entry means is core's business."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import tenacity

from raystate.core.errors import ConfigError, CorruptCheckpointError, RaystateError, StorageError
from raystate.core.messages import Appended, LogEntry
from raystate.core.sealed import unseal
from raystate.storage.base import ObjectMissingError, Storage
from raystate.storage.names import GUARD, GUARD_TEXT, log_name

_KNOWN_FORMAT = 1
_FIRST = 1  # as core.log.claim_entry numbers them
_LONGEST_LOG = 10**12  # the names have 12 digits


class _LostError(StorageError):
    """Somebody else's entry was appended in the place of ours."""


_wait_after_failure = tenacity.wait_random_exponential(multiplier=0.02, max=2.0)


def _wait_unless_lost(state: tenacity.RetryCallState) -> float:
    # Losing means that somebody made progress: no reason to wait, the next number is free.
    lost = state.outcome is not None and isinstance(state.outcome.exception(), _LostError)
    return 0.0 if lost else _wait_after_failure(state)


class RunLog:
    """Reads and extends the log. Any number of them, in any processes, may work on one storage; safe to share between threads.

    Args:
        storage: of the run.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._lock = threading.Lock()  # guards _newest only; never held during I/O
        self._newest: LogEntry | None = None  # entries are immutable and never deleted, so it stays true, only not the newest
        self._guarded = False

    def tail(self) -> LogEntry | None:
        """The newest entry, None if there is none: about 2·log2(n) existence checks and one read, from the last tail on one check.

        Raises:
            StorageError: storage failed.
            CorruptCheckpointError: an entry is not what raystate writes.
            ConfigError: a newer raystate wrote it.
        """
        known = self._newest
        if known is None:
            newest = self._gallop(_FIRST) if self._exists(_FIRST) else 0
            while self._exists(newest + 2):
                if not self._exists(newest + 1):  # nobody appends after a gap, and nobody deletes
                    name = log_name(newest + 1)
                    raise CorruptCheckpointError(f"{self._storage.url}/{name} is missing, and later entries are there", path=name)
                newest = self._gallop(newest + 1)  # others have appended meanwhile
            return self._remember(self.read(newest)) if newest else None
        newest = self._gallop(known.seq)
        return known if newest == known.seq else self._remember(self.read(newest))

    def read(self, seq: int) -> LogEntry:
        """One entry. Raises ObjectMissingError, StorageError, CorruptCheckpointError."""
        name = log_name(seq)
        return _parse(self._storage.read(name), seq, f"{self._storage.url}/{name}")

    def append(self, entry: LogEntry) -> Appended:
        """Create the entry: the one act that commits anything. Storage failures are an outcome, not an exception.

        The fence is checked here once more: a claim must follow an entry of the attempt before it, any other entry one of its own
        attempt, and no number may be left out.

        Returns:
            "ok": this entry is in the log (perhaps by an earlier call whose answer was lost). "taken": the log went on without it;
            `tail` is its newest entry. "failed": storage failed and **the outcome is unknown**: the entry may still appear, so the
            only things to do are this same append again, or to give up.
        """
        try:
            return self._append(entry)
        except RaystateError as error:
            return Appended(seq=entry.seq, outcome="failed", error=error.message)

    def claim(self, make_entry: Callable[[LogEntry | None], LogEntry], *, timeout_s: float = 60.0, tries: int = 1000) -> LogEntry:
        """Append a claim, however many others do the same: read the tail, make an entry for it, until one is won.

        Args:
            make_entry: the claim that follows this tail (None: an empty log). Called again for each try.
            timeout_s: no try begins later than this.
            tries: no more tries than this; each lost one means that somebody else's entry was appended.

        Raises:
            StorageError: storage kept failing, or others kept winning, up to the deadline.
        """
        made: LogEntry | None = None

        def try_once() -> LogEntry:
            nonlocal made
            tail = self.tail()
            if tail is not None:  # its writer may have died before its name was durable: no entry without the one before it
                self._storage.fsync_tree(log_name(tail.seq))
            # The create of an earlier try may have worked and only its answer been lost.
            if made is not None and tail is not None and tail.to_json() == made.to_json():
                return tail
            made = make_entry(tail)
            done = self.append(made)
            if done.outcome == "taken":
                raise _LostError(done.error, operation="claim", path=log_name(made.seq))
            if done.outcome == "failed":
                raise StorageError(done.error, operation="claim", path=log_name(made.seq))
            return made

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StorageError),
            wait=_wait_unless_lost,
            stop=tenacity.stop_before_delay(timeout_s) | tenacity.stop_after_attempt(tries),
        )
        began_s = time.monotonic()
        try:
            return retrying(try_once)
        except tenacity.RetryError as error:
            waited_s, cause = time.monotonic() - began_s, error.last_attempt.exception()
            raise StorageError(
                f"claim of {self._storage.url} failed for {waited_s:.1f} s: {cause}", operation="claim", path=self._storage.url,
                waited_s=waited_s,
            ) from cause  # fmt: skip

    # ------------------------------------------------------------ inside

    def _append(self, entry: LogEntry) -> Appended:
        data = entry.to_json()
        previous = self._previous(entry.seq)
        if entry.seq > _FIRST and previous is None:
            raise StorageError(
                f"append {log_name(entry.seq)} refused: entry {entry.seq - 1} is missing",
                operation="append",
                path=log_name(entry.seq),
            )
        if previous is not None and not _may_follow(entry, previous):
            return self._taken(entry)
        if not self._guarded:
            if not self._storage.exists(GUARD):
                self._storage.create_or_same(GUARD, GUARD_TEXT)
            self._guarded = True
        name = log_name(entry.seq)
        try:
            self._storage.create(name, data)
        except StorageError as error:
            # Both "exists" and a broken connection can mean that our own create worked: the bytes carry our writer id.
            try:
                found = self._storage.read(name)
            except ObjectMissingError:
                raise error from None
            if found != data:
                return self._taken(entry)
            self._storage.fsync_tree(name)  # it is there; that it stays is what may have failed
        self._remember(entry)
        return Appended(seq=entry.seq, outcome="ok")

    def _previous(self, seq: int) -> LogEntry | None:
        known = self._newest
        if known is not None and known.seq == seq - 1:
            return known
        if seq <= _FIRST:
            return None
        try:
            return self.read(seq - 1)
        except ObjectMissingError:
            return None

    def _taken(self, entry: LogEntry) -> Appended:
        tail = self.tail()
        error = f"entry {entry.seq} of attempt {entry.attempt} cannot be appended"
        if tail is not None:
            error += f": the log's newest is {tail.seq}, attempt {tail.attempt}, writer {tail.writer}"
        return Appended(seq=entry.seq, outcome="taken", tail=tail, error=error)

    def _gallop(self, known: int) -> int:
        """The last of the contiguous numbers, given one that exists."""
        step = 1
        while self._exists(known + step):
            known += step
            step *= 2
            if known > _LONGEST_LOG:
                raise StorageError(
                    f"{self._storage.url} says that every log entry exists", operation="exists", path=log_name(known)
                )
        missing = known + step
        while missing - known > 1:
            middle = (known + missing) // 2
            if self._exists(middle):
                known = middle
            else:
                missing = middle
        return known

    def _exists(self, seq: int) -> bool:
        return self._storage.exists(log_name(seq))

    def _remember(self, entry: LogEntry) -> LogEntry:
        with self._lock:
            if self._newest is None or self._newest.seq < entry.seq:
                self._newest = entry
        return entry


def _may_follow(entry: LogEntry, previous: LogEntry) -> bool:
    if entry.kind == "claim":
        return previous.attempt == entry.attempt - 1
    return previous.attempt == entry.attempt


def _parse(data: bytes, seq: int, path: str) -> LogEntry:
    try:
        raw = unseal(data)
        if raw["format"] > _KNOWN_FORMAT:
            raise ConfigError(
                f"{path} was written by a newer raystate (log format {raw['format']}, this one knows {_KNOWN_FORMAT})",
                field="storage", path=path, expected=_KNOWN_FORMAT, got=raw["format"],
            )  # fmt: skip
        entry = LogEntry.from_json(data)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is not a log entry: {error}", path=path) from error
    if entry.seq != seq:
        raise CorruptCheckpointError(f"{path} holds entry {entry.seq}", path=path, expected=seq, got=entry.seq)
    return entry
