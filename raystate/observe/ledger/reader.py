"""Reading a run's ledger: every line once, whatever else lies there."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from raystate.core.coordinator.context import named
from raystate.core.formats.texts import counted
from raystate.machine.threads import map_in_threads
from raystate.observe.ledger.clocks import brought_together
from raystate.observe.ledger.lines import (
    EVENTS,
    KINDS,
    LoggedRecovery,
    LoggedSave,
    NewerError,
    Noted,
    batch_in,
    is_batch,
    noted_alone,
    noted_in,
)
from raystate.storage import Storage

logger = logging.getLogger("raystate.coordinator")

_READERS = 16  # objects at a time
_LOOKS = 5  # a living run merges its batches while they are read


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerContent:
    """A run's ledger, as it was found.

    Attributes:
        lines: each once, in the order of attempts and of their numbers there.
        damaged: names of objects of which something can't be read.
        damaged_lines, newer_lines: how many lines can't be read; how many a newer raystate wrote.
        newer: names of objects that a newer raystate wrote.
        damaged_objects: how many can't be read at all.
    """

    lines: tuple[Noted, ...] = ()
    damaged: tuple[str, ...] = ()
    damaged_lines: int = 0
    newer_lines: int = 0
    newer: tuple[str, ...] = ()
    damaged_objects: int = 0

    @property
    def left_out(self) -> tuple[str, ...]:
        """A sentence or two on all that is missing in the other fields; none: nothing is."""
        told: list[str] = []
        for objects, lines, names, is_newer in (
            (self.damaged_objects, self.damaged_lines, self.damaged, False),
            (len(self.newer), self.newer_lines, self.newer, True),
        ):
            if many := [counted(one, noun) for one, noun in ((objects, "object"), (lines, "line")) if one]:
                why = f"{'was' if objects + lines == 1 else 'were'} written by a newer raystate" if is_newer else "can't be read"
                where = f": {named([name.removeprefix(f'{EVENTS}/') for name in names])}" if names else ""
                told.append(f"{' and '.join(many)} of the ledger {why}, left out here{where}")
        return tuple(told)

    @property
    def recoveries(self) -> tuple[tuple[float, LoggedRecovery], ...]:
        """(when its first new step was there, or when it ended, wall clock; the recovery), oldest first."""
        found = [(one.t, one.what) for one in self.lines if isinstance(one.what, LoggedRecovery)]
        return tuple(sorted(found, key=lambda one: one[0]))

    @property
    def saves(self) -> dict[str, LoggedSave]:
        """By save id."""
        return {one.what.save: one.what for one in self.lines if isinstance(one.what, LoggedSave)}


def read_ledger(storage: Storage, *, kinds: Collection[str] = ()) -> LedgerContent:
    """All that the ledger of a run holds, or, faster, only the lines of these `kinds`. Raises StorageError."""
    reading = _LedgerReading(frozenset(kinds))
    for name, data in sorted(_objects(storage).items()):
        reading.take(name, data)
    return reading.content()


def _objects(storage: Storage) -> dict[str, bytes]:
    """By name; without those that have been merged into others meanwhile."""
    found: dict[str, bytes] = {}
    for look in range(_LOOKS):
        listed = {info.name for info in storage.list(EVENTS) if info.name.endswith((".json", ".jsonl"))}
        new = sorted(listed - found.keys())
        read = map_in_threads(storage.find, new, threads=_READERS, name="raystate-ledger")
        found = {name: data for name, data in found.items() if name in listed}
        found |= {name: data for name, data in zip(new, read, strict=True) if data is not None}
        if all(data is not None for data in read):
            return found
        logger.debug("the ledger changes while it is read (look %d of %d)", look + 1, _LOOKS)
    return found


class _LedgerReading:
    def __init__(self, kinds: frozenset[str]):
        self._marks = [f'"kind":"{kind}"'.encode() for kind in KINDS if kind in kinds]
        self._kinds = tuple(KINDS[kind] for kind in kinds)
        self._lines: dict[tuple[int, int, bool], Noted] = {}
        self._alone: list[Noted] = []
        self._batches: dict[str, list[bytes]] = {}
        self._replaced: set[str] = set()
        self._damaged: list[str] = []
        self._newer: list[str] = []
        self._damaged_lines = self._newer_lines = self._partly = 0  # the last: objects with damaged lines

    def take(self, name: str, data: bytes) -> None:
        try:
            if not is_batch(name):
                t, what = noted_alone(data)
                if not self._kinds or isinstance(what, self._kinds):
                    self._alone.append(Noted(getattr(what, "attempt", 0), -1, t, what))
                return
            batch = batch_in(data)
            self._batches[name] = batch.lines
            self._replaced.add(batch.replaces)
        except NewerError as error:
            self._newer.append(name)
            logger.warning("%s is left out: %s", name, error)
        except ValueError as error:
            self._damaged.append(name)
            logger.warning("%s can't be read and is left out: %s", name, error)

    def _read_lines(self, name: str, lines: list[bytes]) -> None:
        damaged = 0
        for line in lines:
            if self._marks and not any(mark in line for mark in self._marks):
                continue
            try:
                noted = noted_in(line)
            except NewerError:
                self._newer_lines += 1
                continue
            except ValueError as error:
                if not damaged:
                    logger.warning("%s: a line can't be read and is left out: %s", name, error)
                damaged += 1
                continue
            self._lines[noted.attempt, noted.n, type(noted.what) is KINDS["dropped"]] = noted
        if damaged:
            self._damaged.append(name)
            self._damaged_lines += damaged
            self._partly += 1

    def content(self) -> LedgerContent:
        for name, lines in self._batches.items():
            if name not in self._replaced:
                self._read_lines(name, lines)
        lines = brought_together(sorted([*self._alone, *self._lines.values()], key=lambda one: one[:3]))
        return LedgerContent(
            lines=tuple(lines),
            damaged=tuple(self._damaged),
            damaged_lines=self._damaged_lines,
            newer_lines=self._newer_lines,
            newer=tuple(self._newer),
            damaged_objects=len(self._damaged) - self._partly,
        )
