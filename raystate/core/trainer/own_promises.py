"""What one trainer has promised: the steps for which its `save` has returned True, until its user is told what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raystate.core.formats.entries import MOST_FACTS
from raystate.core.formats.names import SnapshotId

REMEMBERED = MOST_FACTS  # promises: the log said at the time what became of older ones


@dataclass(slots=True)
class OwnPromises:
    """Its values are replaced and never changed, so that a shallow copy of it is a memento.

    Attributes:
        made: oldest first.
        broken: those of which this rank has no copy and will have none, and why; oldest first.
    """

    made: tuple[SnapshotId, ...] = ()
    broken: tuple[tuple[SnapshotId, str], ...] = ()

    def make(self, snapshot: SnapshotId) -> None:
        """save() returns True for it."""
        self.told(self.made[: 1 - REMEMBERED])
        self.made = (*self.made, snapshot)

    def broke(self, snapshot: SnapshotId, why: str) -> None:
        """Its copy on this rank has come to nothing."""
        if snapshot in self.made:  # else a restore has ended the promise
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
