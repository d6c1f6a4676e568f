"""Promises that are lost, and whose trainers may be gone before anybody has told them.

A trainer asks itself what became of its promises, when it waits for them and when it closes. One that dies can't. Of what it was
promised, the steps beyond the one that its run goes on from are made again. An earlier one that storage never got stays lost: whoever
ends the run is told. This attempt knows it of what it has seen itself; what earlier attempts have lost is in their logs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from raystate.core.names import SnapshotId, group_of, lineage_order

REMEMBERED = 1024


class Untold:
    """Lost promises that nobody has been told of, oldest first."""

    def __init__(self) -> None:
        self._lost: dict[SnapshotId, str] = {}
        self._forgotten = 0  # older ones, of which only the number is known
        self._forced: set[SnapshotId] = set()  # the newest saves of dead trainers, of a step that had been saved before
        self._lineage = ""  # the newest that a restore has begun
        self._base = SnapshotId("", -1)  # what it goes on from

    def lost(self, key: SnapshotId, why: str) -> None:
        """It was promised, and can't become durable any more."""
        if key.step > self._base.step and lineage_order(key.lineage) < lineage_order(self._lineage):
            return  # the news is late: its step is made again
        if key not in self._lost and len(self._lost) >= REMEMBERED:
            del self._lost[next(iter(self._lost))]
            self._forgotten += 1
        self._lost[key] = why

    def forced(self, key: SnapshotId) -> None:
        """The newest save of a trainer that died: by force, of a step that it had saved before."""
        self._forced.add(key)
        self._look_at_forced()

    def told(self, keys: Iterable[SnapshotId]) -> None:
        """A user knows of these."""
        for key in keys:
            self._lost.pop(key, None)

    def saved(self, step: int) -> None:
        """A step of that number is durable after all, perhaps made again."""
        if self._lost:
            self._lost = {key: why for key, why in self._lost.items() if key.step != step}

    def restored(self, lineage: str, base: SnapshotId) -> None:
        """The lineage goes on from this snapshot (step -1: from nothing): later steps are made again."""
        self._lineage, self._base = lineage, base
        self._lost = {key: why for key, why in self._lost.items() if key.step <= base.step}
        self._look_at_forced()
        self._forced.clear()

    def _look_at_forced(self) -> None:
        """The step that a run goes on from is not made again: bytes that were promised for it after those that it has are lost."""
        base = self._base
        for key in self._forced:
            if base.lineage == key.lineage and base.step == key.step and key.again > base.again:
                self.lost(key, "the trainer died before all ranks had copied it")

    def texts(self, *, asking: str = "", asked: Collection[SnapshotId] = ()) -> list[str]:
        """What is to be said at the end of the run.

        Args:
            asking: the worker group whose ranks ask about their own promises; "": none does.
            asked: those promises.
        """
        when = ", saved before a restart" if asking else ""
        lost = [
            f"step {key.step}{when}: {why}"
            for key, why in self._lost.items()
            if not asking or (key not in asked and group_of(key.lineage) != asking)
        ]
        return [f"{self._forgotten} earlier steps", *lost] if lost and self._forgotten else lost
