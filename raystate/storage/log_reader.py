"""Reading the log of a run."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from raystate.core.formats.entries import FORMAT, NO_BASE, Base, LogEntry, OtherFormatError, WrittenEntry, rebuilt_base
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StorageError
from raystate.storage.base import ObjectMissingError, Storage
from raystate.storage.names import LOG, base_name, base_number, log_name, number_of

logger = logging.getLogger("raystate")

Given = TypeVar("Given")
Parsed = TypeVar("Parsed")

FIRST = 1  # as core.formats.log.claim_entry numbers them
_TAIL_TRIES = 100  # each means that two newer bases were written since the entry was found
_LONGEST_LOG = 10**12  # the names have 12 digits


class LogGoneError(StorageError):
    """The log is not where this process or its predecessor has written it: the folder was moved, removed or replaced, or is not mounted."""


class BaseMissingError(StorageError):
    """The base of an entry is gone: a newer one has taken its place since the entry was found, or it is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """An entry with the base that it is written with."""

    entry: LogEntry
    base: Base


class LogReader:
    """Reads the log; safe to share between threads.

    Args:
        storage: of the run.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._lock = threading.Lock()  # guards _newest only; never held during I/O
        self._newest: Tail | None = None  # entries are immutable and never deleted, so it stays true, only not the newest

    def tail(self) -> LogEntry | None:
        """The newest entry, None if there is none: about 2·log2(n) existence checks and one or two reads, from the last tail on one check.

        Raises:
            StorageError: storage failed.
            CorruptCheckpointError: an entry or its base is not what raystate writes, or is missing.
            ConfigError: another version of raystate wrote it.
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
            except BaseMissingError as error:
                if seq == last:  # no entry was appended since: its base can't have been replaced
                    raise CorruptCheckpointError(error.message, path=error.path) from error
        raise StorageError(f"{self._storage.url}: the log goes on faster than it can be read", operation="read", path=log_name(seq))

    def read(self, seq: int) -> LogEntry:
        """One entry. Raises ObjectMissingError (also when the base of an old entry is gone), StorageError, CorruptCheckpointError."""
        try:
            return self._read(seq).entry
        except BaseMissingError as error:
            raise ObjectMissingError(error.message, **error.details) from error

    def read_header(self, seq: int) -> WrittenEntry:
        """One entry as it is written, also if its base is gone.

        Raises:
            ObjectMissingError, StorageError, CorruptCheckpointError.
        """
        return self.header_in(self._storage.read(log_name(seq)), seq)

    def header_in(self, data: bytes, seq: int, *, facts: bool = True) -> WrittenEntry:
        """The same of an entry that was read as these bytes.

        Args:
            facts: False: without its `retired` and `given_up`, in an eighth of the time.

        Raises:
            CorruptCheckpointError.
        """
        name = log_name(seq)
        parse = functools.partial(WrittenEntry.parse, facts=facts)
        written = self._parsed(name, data, parse, "a log entry")
        if written.seq != seq:
            path = f"{self._storage.url}/{name}"
            raise CorruptCheckpointError(f"{path} holds entry {written.seq}", path=path, expected=seq, got=written.seq)
        return written

    def read_base(self, name: str) -> Base:
        """The base of this name (`WrittenEntry.base`). Raises ObjectMissingError, StorageError, CorruptCheckpointError."""
        return self._parsed(
            base_name(name), self._storage.read(base_name(name)), lambda data: Base.parse(name, data), "a base of the log"
        )

    def check_newest(self) -> None:
        """Check that the newest entry that this process knows is where it was: then a name that is
        not found beside it is really free.

        Raises:
            LogGoneError: it is not. StorageError: storage failed.
        """
        if self._newest is not None:
            self._check(self._newest.entry.seq)

    # ------------------------------------------------------------ inside

    def _check(self, seq: int) -> None:
        """Check that this entry is there, and is the one that this process knows.

        Else the folder was moved or replaced: an entry that is written now would never be read.
        """
        try:
            found = self.read_header(seq)
        except ObjectMissingError:
            raise self._missing(seq) from None
        except CorruptCheckpointError:
            return  # it is there, though damaged, and the next one needs nothing of it
        known = self._newest
        if known is None or known.entry.seq != seq:
            return
        ours, theirs = (known.entry.attempt, known.entry.writer), (found.attempt, found.writer)
        if ours != theirs:
            raise LogGoneError(
                f"{self._storage.url}/{log_name(seq)} is of attempt {theirs[0]}, writer {theirs[1]}, and was of attempt {ours[0]}, writer "
                f"{ours[1]}: the folder has been replaced while the run went on",
                operation="read", path=log_name(seq), expected=ours, got=theirs,
            )  # fmt: skip

    def _missing(self, seq: int) -> LogGoneError:
        text = "the folder has been moved or removed, or is not mounted"
        return LogGoneError(f"{self._storage.url}/{log_name(seq)} is missing: {text}", operation="read", path=log_name(seq))

    def _find_tail(self, known: Tail | None) -> int:
        """The number of the newest entry, 0 if there is none."""
        if known is not None:
            return self._gallop(known.entry.seq)
        if not self._exists(FIRST):
            later = min((number for info in self._storage.list(LOG) if (number := number_of(info.name))), default=0)
            if later > FIRST:
                name = log_name(FIRST)
                raise CorruptCheckpointError(
                    f"{self._storage.url}/{name} is missing, and entry {later} is there: the log has lost its beginning. Bring it back "
                    "from a copy; or copy the step folders, without .raystate, to another storage and start there",
                    path=name,
                )
            if not later:
                return 0
        newest = self._gallop(FIRST)
        while self._exists(newest + 2):
            if not self._exists(newest + 1):  # no writer leaves a gap, and none deletes entries
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
                    raise BaseMissingError(
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
        except OtherFormatError as error:
            message = (
                f"{path} was written by another version of raystate (log format {error.number}, this one knows {FORMAT}): go on with "
                "that version, or copy the step folders, without .raystate, to another storage and start there"
            )
            raise ConfigError(message, field="storage", path=path, expected=FORMAT, got=error.number) from error
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
