"""Promises that are lost, and whose trainers may be gone before anybody has told them.

A trainer asks itself what became of its promises, when it waits for them and when it closes. One that dies can't. Of what it was
promised, the steps beyond the one that its run goes on from are made again. An earlier one that storage never got stays lost: whoever
ends the run is told. This attempt knows it of what it has seen itself; what earlier attempts have lost is in their logs.
"""

from __future__ import annotations

from collections.abc import Iterable

from raystate.core.names import SnapshotId, group_of, lineage_order

REMEMBERED = 1024


class Untold:
    """Lost promises that nobody has been told of, oldest first."""

    def __init__(self) -> None:
        self._lost: dict[SnapshotId, str] = {}
        self._forgotten = 0  # older ones, of which only the number is known
        self._base: tuple[str, int] = ("", -1)  # the newest lineage that a restore has begun, and the step that it goes on from

    def lost(self, key: SnapshotId, why: str) -> None:
        """It was promised, and can't become durable any more."""
        lineage, step = self._base
        if key.step > step and lineage_order(key.lineage) < lineage_order(lineage):
            return  # the news is late: its step is made again
        if key not in self._lost and len(self._lost) >= REMEMBERED:
            del self._lost[next(iter(self._lost))]
            self._forgotten += 1
        self._lost[key] = why

    def told(self, keys: Iterable[SnapshotId]) -> None:
        """A user knows of these."""
        for key in keys:
            self._lost.pop(key, None)

    def saved(self, step: int) -> None:
        """A step of that number is durable after all, perhaps made again."""
        if self._lost:
            self._lost = {key: why for key, why in self._lost.items() if key.step != step}

    def restored(self, lineage: str, step: int) -> None:
        """The lineage goes on from this step (-1: from none): later ones are made again."""
        self._base = (lineage, step)
        self._lost = {key: why for key, why in self._lost.items() if key.step <= step}

    def texts(self, *, asking: str = "") -> list[str]:
        """What is to be said at the end of the run.

        Args:
            asking: the worker group whose ranks ask about their own promises; "": none does.
        """
        when = ", saved before a restart" if asking else ""
        lost = [f"step {key.step}{when}: {why}" for key, why in self._lost.items() if not asking or group_of(key.lineage) != asking]
        return [f"{self._forgotten} earlier steps", *lost] if lost and self._forgotten else lost
