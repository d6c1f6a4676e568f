"""What one trainer has promised: the steps for which its `save` has returned True, until its user is told what became of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raystate.core.names import SnapshotId

NAMED_BROKEN = 16  # in a word: more don't break between two looks at it
WHY_CHARS = 120


@dataclass(slots=True)
class OwnPromises:
    """No method changes a value that it was given or has given out: a shallow copy is a memento.

    Attributes:
        made: oldest first; of earlier lineages, too.
        broken: which of them can't be kept, by what happened to their copy on this rank, and why.
    """

    made: tuple[SnapshotId, ...] = ()
    broken: dict[SnapshotId, str] = field(default_factory=dict[SnapshotId, str])

    def make(self, snapshot: SnapshotId) -> None:
        """save() returns True for it, the first time."""
        self.made = (*self.made, snapshot)

    def make_again(self, snapshot: SnapshotId) -> None:
        """It may have been promised before, and its user told that it is late: it is waited for once more."""
        if snapshot not in self.made:
            self.make(snapshot)

    def broke(self, snapshot: SnapshotId, why: str) -> None:
        """Its copy on this rank has come to nothing."""
        self.broken = {**self.broken, snapshot: why}

    def told(self, which: Iterable[SnapshotId]) -> None:
        """The user has been told that these are durable, or that they are not."""
        gone = set(which)
        self.made = tuple(one for one in self.made if one not in gone)
        self.broken = {one: why for one, why in self.broken.items() if one not in gone}

    @property
    def kept(self) -> tuple[SnapshotId, ...]:
        """Those whose fate others know."""
        return tuple(one for one in self.made if one not in self.broken)

    def for_word(self, lineage: str) -> tuple[tuple[int, int, str], ...]:
        """The newest broken ones of the lineage for the trainer's word, as (step, again, why): it may die before it is asked."""
        mine = [(one.step, one.again, why[:WHY_CHARS]) for one, why in self.broken.items() if one.lineage == lineage]
        return tuple(mine[-NAMED_BROKEN:])
