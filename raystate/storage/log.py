"""The log of a run in storage: contiguous, create-once, never deleted. What an entry means is core's business.

An entry may be written as changes to a base (core.formats.entries). A base is created before the
first entry that names it, and goes when two newer ones have taken its place: entries of the past
can't be read in full any more then, and no reader needs them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import tenacity

from raystate.core.formats.entries import NO_BASE, LogEntry, PlannedEntry, plan
from raystate.core.formats.errors import RaystateError, StorageError
from raystate.core.formats.messages import Appended
from raystate.storage.base import ObjectMissingError, Storage
from raystate.storage.log_reader import FIRST, BaseMissingError, LogGoneError, LogReader, Tail
from raystate.storage.names import GUARD, GUARD_TEXT, base_name, log_name

logger = logging.getLogger("raystate")


class _LostError(StorageError):
    """Somebody else's entry was appended in the place of ours."""


_wait_after_failure = tenacity.wait_random_exponential(multiplier=0.02, max=2.0)


def _wait_unless_lost(state: tenacity.RetryCallState) -> float:
    # Losing means that somebody made progress: no reason to wait, the next number is free.
    lost = state.outcome is not None and isinstance(state.outcome.exception(), _LostError)
    return 0.0 if lost else _wait_after_failure(state)


class RunLog(LogReader):
    """Reads and extends the log. Any number of them, in any processes, may work on one storage; safe to share between threads.

    Args:
        storage: of the run.
    """

    def __init__(self, storage: Storage):
        super().__init__(storage)
        self._plan: PlannedEntry | None = None  # of the last entry that was appended, or tried to be
        self._sent: PlannedEntry | None = None  # the last one that storage was given
        self._guarded = False

    def append(self, entry: LogEntry, *, needs: Sequence[str] = ()) -> Appended:
        """Create the entry: the one act that commits anything. Storage failures are an outcome, not an exception.

        The fence is checked here once more. A claim must follow an entry of the attempt before it,
        any other entry one of its own attempt. No number may be left out.

        Args:
            needs: objects without which it could not be carried out: they may have been written while the folder was away.

        Returns:
            "ok": this entry is in the log (perhaps by an earlier call whose answer was lost). "taken": the log went on without it;
            `tail` is its newest entry. "failed": storage failed, and the entry may still appear.
            Repeat this very append, or give up. "refused": one that it needs is missing, and it was never sent.
        """
        try:
            return self._append(entry, needs)
        except RaystateError as error:
            return Appended(seq=entry.seq, outcome="failed", error=error.message)

    def claim(self, make_entry: Callable[[LogEntry | None], LogEntry], *, timeout_s: float = 60.0) -> LogEntry:
        """Append a claim, however many others do the same: read the tail, make an entry for it, until one is won.

        Args:
            make_entry: the claim that follows this tail (None: an empty log). Called again for each try.
            timeout_s: no try begins later than this.

        Raises:
            StorageError: storage kept failing, or others kept winning, up to the deadline.
            LogGoneError: `make_entry` says so.
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
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, StorageError) and not isinstance(error, LogGoneError)
            ),
            wait=_wait_unless_lost,
            stop=tenacity.stop_before_delay(timeout_s),
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

    def _append(self, entry: LogEntry, needs: Sequence[str]) -> Appended:
        planned = self._plan
        # A second try writes what the first one wrote, even if the log has changed meanwhile.
        if planned is None or planned.entry != entry:
            planned = self._planned(entry)
        if planned is None:
            return self._taken(entry)
        self._plan = planned
        if entry.seq > FIRST:
            self._check(entry.seq - 1)
        lost = () if self._sent is planned else [one for one in needs if not self._storage.exists(one)]
        if lost:
            return Appended(seq=entry.seq, outcome="refused", error=f"{self._storage.url}/{lost[0]} is gone")
        if not self._guarded:
            if not self._storage.exists(GUARD):
                self._storage.create_or_same(GUARD, GUARD_TEXT)
            self._guarded = True
        self._create_base(planned)
        name = log_name(entry.seq)
        self._sent = planned
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
        if entry.seq <= FIRST:
            return plan(entry, None, NO_BASE)
        previous = self._newest
        if previous is None or previous.entry.seq != entry.seq - 1:
            try:
                previous = self._remember(self._read(entry.seq - 1))
            except BaseMissingError:
                return None
            except ObjectMissingError:
                raise self._missing(entry.seq - 1) from None
        return plan(entry, previous.entry, previous.base) if _may_follow(entry, previous.entry) else None

    def _create_base(self, planned: PlannedEntry) -> None:
        if planned.base_data is not None:  # durable before anything names it
            self._storage.create_or_same(base_name(planned.base.name), planned.base_data)

    def _remove_base(self, base: str) -> None:
        try:
            if base:
                self._storage.delete(base_name(base))
        except StorageError as error:
            logger.debug("a base of the log that isn't needed any more stays for the next start: %s", error)

    def _taken(self, entry: LogEntry) -> Appended:
        tail = self.tail()
        error = f"entry {entry.seq} of attempt {entry.attempt} cannot be appended"
        if tail is not None:
            error += f": the log's newest is {tail.seq}, attempt {tail.attempt}, writer {tail.writer}"
        return Appended(seq=entry.seq, outcome="taken", tail=tail, error=error)


def _may_follow(entry: LogEntry, previous: LogEntry) -> bool:
    if entry.kind == "claim":
        return previous.attempt == entry.attempt - 1
    return previous.attempt == entry.attempt
