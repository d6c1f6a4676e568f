"""The log of a run in storage: contiguous, create-once, never deleted. What an entry means is core's business.

An entry may be written as changes to a base (core.entries). A base is created before the first entry that names it, and goes when two
newer ones have taken its place: entries of the past can't be read in full any more then, and nobody needs them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import tenacity

from raystate.core.entries import (
    FORMAT,
    NO_BASE,
    Base,
    LogEntry,
    NewerFormatError,
    PlannedEntry,
    WrittenEntry,
    committed_by,
    plan,
    rebuilt_base,
)
from raystate.core.errors import ConfigError, CorruptCheckpointError, RaystateError, StorageError
from raystate.core.messages import Appended, SnapshotId, lineage_order
from raystate.in_threads import map_in_threads
from raystate.storage.base import ObjectMissingError, Storage
from raystate.storage.names import GUARD, GUARD_TEXT, base_name, base_number, log_name

logger = logging.getLogger("raystate")

Given = TypeVar("Given")
Parsed = TypeVar("Parsed")

_FIRST = 1  # as core.log.claim_entry numbers them
_TAIL_TRIES = 100  # each means that two newer bases were written since the entry was found
_READ_AT_ONCE = 256
_READERS = 16  # at once: a request to a store takes tens of milliseconds
_LONGEST_LOG = 10**12  # the names have 12 digits


class _LostError(StorageError):
    """Somebody else's entry was appended in the place of ours."""


class _BaseMissingError(StorageError):
    """The base of an entry is gone: a newer one has taken its place since the entry was found, or it is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """An entry with the base that it is written with."""

    entry: LogEntry
    base: Base


class ReadBack(NamedTuple):
    """What could be read of the log.

    Attributes:
        entries: newest first; without those that are damaged or lost.
        unread: the newest entry that was not asked for, or that storage did not hand out; 0: there is none.
        error: why it did not; None: it handed out all that it was asked for.
    """

    entries: list[WrittenEntry]
    unread: int
    error: StorageError | None


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
        self._newest: Tail | None = None  # entries are immutable and never deleted, so it stays true, only not the newest
        self._plan: PlannedEntry | None = None  # of the last entry that was appended, or tried to be
        self._guarded = False

    def tail(self) -> LogEntry | None:
        """The newest entry, None if there is none: about 2·log2(n) existence checks and one or two reads, from the last tail on one check.

        Raises:
            StorageError: storage failed.
            CorruptCheckpointError: an entry or its base is not what raystate writes, or is missing.
            ConfigError: a newer raystate wrote it.
        """
        newest = self.newest()
        return None if newest is None else newest.entry

    def newest(self) -> Tail | None:
        """The newest entry with its base. Raises as `tail`."""
        seq = 0
        for _ in range(_TAIL_TRIES):
            known, last = self._newest, seq
            seq = self._find_tail(known)
            if not seq or (known is not None and known.entry.seq == seq):
                return known
            try:
                return self._remember(self._read(seq))
            except _BaseMissingError as error:
                if seq == last:  # nobody has appended since: it can't have been replaced
                    raise CorruptCheckpointError(error.message, path=error.path) from error
        raise StorageError(f"{self._storage.url}: the log goes on faster than it can be read", operation="read", path=log_name(seq))

    def read(self, seq: int) -> LogEntry:
        """One entry. Raises ObjectMissingError (also when the base of an old entry is gone), StorageError, CorruptCheckpointError."""
        try:
            return self._read(seq).entry
        except _BaseMissingError as error:
            raise ObjectMissingError(error.message, **error.details) from error

    def read_header(self, seq: int) -> WrittenEntry:
        """One entry as it is written, whatever has become of its base. Raises ObjectMissingError, StorageError, CorruptCheckpointError."""
        name = log_name(seq)
        written = self._parsed(name, self._storage.read(name), WrittenEntry.parse, "a log entry")
        if written.seq != seq:
            path = f"{self._storage.url}/{name}"
            raise CorruptCheckpointError(f"{path} holds entry {written.seq}", path=path, expected=seq, got=written.seq)
        return written

    def read_back(self, seq: int, *, most: int) -> ReadBack:
        """This entry and those before it, at most `most`, as far as storage hands them out now."""
        last = max(_FIRST - 1, seq - most)
        asked = range(seq, last, -1)
        found = map_in_threads(self._header_or_error, asked, threads=_READERS, name="raystate-log")
        failed = [(at, one) for at, one in zip(asked, found, strict=True) if isinstance(one, StorageError)]
        entries = [one for one in found if isinstance(one, WrittenEntry)]
        return ReadBack(entries, *(failed[0] if failed else (last, None)))

    def find_commits(self, seq: int, snapshots: Iterable[SnapshotId]) -> set[SnapshotId]:
        """Which of these snapshots this entry or one before it has committed, as far as they can be read. Raises StorageError."""
        wanted, found = set(snapshots), set[SnapshotId]()
        oldest = min((lineage_order(one.lineage)[0] for one in wanted), default=0)  # no attempt before it can have committed them
        for last in range(seq, _FIRST - 1, -_READ_AT_ONCE):
            entries, _, error = self.read_back(last, most=_READ_AT_ONCE)
            if error is not None:
                raise error
            found |= wanted.intersection(map(committed_by, entries))
            if found == wanted or any(entry.attempt < oldest for entry in entries):
                break
        return found

    def _header_or_error(self, seq: int) -> WrittenEntry | StorageError | None:
        try:
            return self.read_header(seq)
        except (ObjectMissingError, CorruptCheckpointError, ConfigError) as error:
            logger.debug("log entry %d can't be read back: %s", seq, error)
            return None
        except StorageError as error:
            return error

    def read_base(self, name: str) -> Base:
        """The base of this name (`WrittenEntry.base`). Raises ObjectMissingError, StorageError, CorruptCheckpointError."""
        return self._parsed(
            base_name(name), self._storage.read(base_name(name)), lambda data: Base.parse(name, data), "a base of the log"
        )

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
        planned = self._plan
        if planned is None or planned.entry != entry:  # a second try writes what the first one wrote, whatever the log is by now
            planned = self._planned(entry)
        if planned is None:
            return self._taken(entry)
        self._plan = planned
        if not self._guarded:
            if not self._storage.exists(GUARD):
                self._storage.create_or_same(GUARD, GUARD_TEXT)
            self._guarded = True
        self._create_base(planned)
        name = log_name(entry.seq)
        try:
            self._storage.create(name, planned.data)
        except StorageError as error:
            # Both "exists" and a broken connection can mean that our own create worked: the bytes carry our writer id.
            try:
                found = self._storage.read(name)
            except ObjectMissingError:
                raise error from None
            if found != planned.data:
                return self._taken(entry)
            self._storage.fsync_tree(name)  # it is there; that it stays is what may have failed
        previous = self._newest
        self._remember(Tail(entry=entry, base=planned.base))
        if previous is not None and previous.base.name == planned.base.before:
            self._remove_base(previous.base.before)
        return Appended(seq=entry.seq, outcome="ok")

    def _planned(self, entry: LogEntry) -> PlannedEntry | None:
        """How to write an entry; None: it may not follow the one before it, or the log has gone on long ago.

        Raises:
            StorageError: the entry before it is missing.
        """
        if entry.seq <= _FIRST:
            return plan(entry, None, NO_BASE)
        previous = self._newest
        if previous is None or previous.entry.seq != entry.seq - 1:
            try:
                previous = self._remember(self._read(entry.seq - 1))
            except _BaseMissingError:
                return None
            except ObjectMissingError:
                raise StorageError(
                    f"append {log_name(entry.seq)} refused: entry {entry.seq - 1} is missing",
                    operation="append",
                    path=log_name(entry.seq),
                ) from None
        return plan(entry, previous.entry, previous.base) if _may_follow(entry, previous.entry) else None

    def _create_base(self, planned: PlannedEntry) -> None:
        if planned.base_data is not None:  # durable before anything names it
            self._storage.create_or_same(base_name(planned.base.name), planned.base_data)

    def _remove_base(self, base: str) -> None:
        try:
            if base:
                self._storage.delete(base_name(base))
        except StorageError as error:
            logger.debug("a base of the log that nobody needs any more stays for the next start: %s", error)

    def _taken(self, entry: LogEntry) -> Appended:
        tail = self.tail()
        error = f"entry {entry.seq} of attempt {entry.attempt} cannot be appended"
        if tail is not None:
            error += f": the log's newest is {tail.seq}, attempt {tail.attempt}, writer {tail.writer}"
        return Appended(seq=entry.seq, outcome="taken", tail=tail, error=error)

    def _find_tail(self, known: Tail | None) -> int:
        """The number of the newest entry, 0 if there is none."""
        if known is not None:
            return self._gallop(known.entry.seq)
        newest = self._gallop(_FIRST) if self._exists(_FIRST) else 0
        while self._exists(newest + 2):
            if not self._exists(newest + 1):  # nobody appends after a gap, and nobody deletes
                name = log_name(newest + 1)
                raise CorruptCheckpointError(f"{self._storage.url}/{name} is missing, and later entries are there", path=name)
            newest = self._gallop(newest + 1)  # others have appended meanwhile
        return newest

    def _read(self, seq: int) -> Tail:
        written = self.read_header(seq)
        base, known = NO_BASE, self._newest
        if known is not None and known.base.name == written.base:
            base = known.base
        elif written.base:
            try:
                base = self.read_base(written.base)
            except (ObjectMissingError, CorruptCheckpointError) as error:
                base = self._rebuilt(written.base)
                if base is None and isinstance(error, ObjectMissingError):
                    path = f"{self._storage.url}/{base_name(written.base)}"
                    raise _BaseMissingError(
                        f"{path}, the base of log entry {seq}, is missing", operation="read", path=path
                    ) from error
                if base is None:
                    raise
        return Tail(entry=self._parsed(log_name(seq), base, written.entry, "a log entry"), base=base)

    def _rebuilt(self, name: str) -> Base | None:
        """A base that can't be read, from the entry before the first that names it; None if that can't be read either."""
        first = base_number(base_name(name))
        try:
            previous = self.read_header(first - 1)
            before = self.read_base(previous.base) if previous.base else NO_BASE
            base = rebuilt_base(name, previous.entry(before), self.read_header(first), before.name)
        except (ObjectMissingError, CorruptCheckpointError, ValueError, KeyError):
            return None
        if base is not None:
            logger.warning(
                "%s/%s is damaged or lost; it was rebuilt from log entry %d", self._storage.url, base_name(name), first - 1
            )
        return base

    def _parsed(self, name: str, data: Given, parse: Callable[[Given], Parsed], what: str) -> Parsed:
        path = f"{self._storage.url}/{name}"
        try:
            return parse(data)
        except NewerFormatError as error:
            message = f"{path} was written by a newer raystate (log format {error.format}, this one knows {FORMAT})"
            raise ConfigError(message, field="storage", path=path, expected=FORMAT, got=error.format) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(f"{path} is not {what}: {error}", path=path) from error

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

    def _remember(self, tail: Tail) -> Tail:
        with self._lock:
            if self._newest is None or self._newest.entry.seq < tail.entry.seq:
                self._newest = tail
        return tail


def _may_follow(entry: LogEntry, previous: LogEntry) -> bool:
    if entry.kind == "claim":
        return previous.attempt == entry.attempt - 1
    return previous.attempt == entry.attempt
