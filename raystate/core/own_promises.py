"""What one trainer has promised: the steps for which its `save` has returned True, until its user is told what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raystate.core.names import SnapshotId

REMEMBERED = 256  # of older ones the log has said at the time what became of them
NAMED_BROKEN = 16  # in a word: those before them were in earlier words
WHY_CHARS = 120


@dataclass(slots=True)
class OwnPromises:
    """Its values are replaced and never changed, so that a shallow copy of it is a memento.

    Attributes:
        made: the newest, oldest first; of earlier lineages, too.
        broken: those of which this rank has no copy and will have none, and why; oldest first.
    """

    made: tuple[SnapshotId, ...] = ()
    broken: tuple[tuple[SnapshotId, str], ...] = ()

    def make(self, snapshot: SnapshotId) -> None:
        """save() returns True for it. It stands for earlier tries of the same step: each of them
        that becomes durable keeps the promise."""
        before = {one for one in self.made if (one.lineage, one.step) == (snapshot.lineage, snapshot.step)}
        self.told(before)
        self.made = (*self.made, snapshot)[-REMEMBERED:]

    def broke(self, snapshot: SnapshotId, why: str) -> None:
        """Its copy on this rank has come to nothing."""
        self.broken = (*self.broken, (snapshot, why))

    def told(self, which: Iterable[SnapshotId]) -> None:
        """The user has been told that these are durable, or that they are not."""
        gone = set(which)
        self.made = tuple(one for one in self.made if one not in gone)
        self.broken = tuple((one, why) for one, why in self.broken if one not in gone)

    @property
    def unbroken(self) -> tuple[SnapshotId, ...]:
        """Those that may be durable, which others know."""
        broken = dict(self.broken)
        return tuple(one for one in self.made if one not in broken)

    def newest_in_word(self, lineage: str) -> tuple[int, int] | None:
        """The newest of the lineage, as (step, again): a trainer that dies can't ask about it."""
        return self.made[-1].place if self.made and self.made[-1].lineage == lineage else None

    @property
    def broken_in_word(self) -> tuple[tuple[str, int, int, str], ...]:
        """The newest broken ones, of earlier lineages, too: (lineage, step, again, why)."""
        return tuple((one.lineage, one.step, one.again, why[:WHY_CHARS]) for one, why in self.broken[-NAMED_BROKEN:])
