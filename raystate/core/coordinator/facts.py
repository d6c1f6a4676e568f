"""What the log says became of each save, and what the next entry has to add."""

from __future__ import annotations

from typing import TypeVar

from raystate.core.formats.entries import MOST_FACTS, WHY_CHARS, Fact, LogEntry, deleted_steps
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.texts import brief

K = TypeVar("K")
T = TypeVar("T")


class Facts:
    """A part of the journal.

    Attributes:
        retired: what was durable once, by lineage and step.
        deleted: steps that the user has deleted lately, until they are saved again, each with the lineage that trained then.
        given_up: what never becomes durable, and why; the newest may not be logged yet.
    """

    def __init__(self) -> None:
        self.retired: dict[tuple[str, int], SnapshotId] = {}
        self.deleted: dict[int, str] = {}
        self.given_up: dict[SnapshotId, str] = {}
        self._own_deletes: dict[int, str] = {}
        self._unlogged: dict[SnapshotId, str] = {}
        self._in_flight: dict[SnapshotId, str] = {}

    @property
    def has_news(self) -> bool:
        """Whether the next entry has something to say."""
        return bool(self._unlogged)

    def give_up(self, key: SnapshotId, why: str) -> None:
        """It never becomes durable: the next entry says so."""
        for facts in (self._unlogged, self.given_up):
            remember(facts, key, brief(why)[:WHY_CHARS], most=MOST_FACTS)

    def delete(self, step: int, lineage: str) -> None:
        """Note a step that the user has deleted in this attempt. The log keeps 256 facts, and may lack that of an old step."""
        remember(self._own_deletes, step, lineage, most=MOST_FACTS)
        self.deleted[step] = lineage

    def take(self) -> list[Fact]:
        """What an entry that is made now has to say."""
        self._in_flight, self._unlogged = self._unlogged, {}
        return [Fact(key, why) for key, why in self._in_flight.items()]

    def refused(self) -> None:
        """That entry was not written."""
        self._in_flight, self._unlogged = {}, {**self._in_flight, **self._unlogged}

    def arrived(self, entry: LogEntry) -> None:
        """This entry is the newest."""
        self._in_flight = {}
        live = {one.step for one in entry.live}
        self._own_deletes = {step: one for step, one in self._own_deletes.items() if step not in live}
        self.deleted = deleted_steps(entry) | self._own_deletes
        self.retired = {(one.lineage, one.step): one for one, _ in entry.retired}
        self.given_up = {one: why for one, why in entry.given_up if why} | self._unlogged


def remember(memory: dict[K, T], key: K, value: T, *, most: int) -> None:
    """Keep it; where so many are kept already, the oldest is forgotten."""
    if key not in memory and len(memory) >= most:
        del memory[next(iter(memory))]
    memory[key] = value
