"""How fast a run makes steps, and how long ago its newest ones became safe."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from raystate.core.coordinator.machine import Coordinator
from raystate.machine.own_time import wall_clock
from raystate.waits import LOOK_EVERY_S, PACE_S


class Pace:
    """Looks at the Coordinator's machine after each event; times are of its clock. `wall_clock`: as of the commits, in seconds.

    Attributes:
        trains_since: when the newest group's ranks had joined, by the wall clock; None: none has.
    """

    def __init__(self, wall_clock: Callable[[], float] = wall_clock) -> None:
        self._wall_clock = wall_clock
        self._stable = self._durable = -1
        self._stable_s = self._durable_s = 0.0
        self._lineage = ""
        self.trains_since: float | None = None
        self._points: deque[tuple[float, int]] = deque()  # (when, the newest step then)

    def begin(self, now_s: float) -> None:
        """The attempt begins: of what was before, it isn't known how long ago that was."""
        self._stable_s = self._durable_s = now_s

    def look(self, machine: Coordinator, now_s: float) -> None:
        """The machine has taken an event."""
        stable, durable, group = machine.snapshots.stable, machine.journal.durable_step, machine.joins.group
        if stable != self._stable:
            self._stable, self._stable_s = stable, now_s
        if durable != self._durable:
            live = machine.journal.live.get(durable)
            ago_s = self._wall_clock() - live.time_s if live is not None and live.time_s else 0.0
            self._durable, self._durable_s = durable, now_s - max(0.0, ago_s)  # it may be of an earlier attempt
        if group is None or not group.alive or group.lineage != self._lineage:
            self._lineage = "" if group is None or not group.alive else group.lineage
            self._points.clear()
            if self._lineage:
                self.trains_since = self._wall_clock()
        if group is not None and group.newest >= 0 and self._lineage:
            if not self._points or now_s - self._points[-1][0] >= LOOK_EVERY_S:
                self._points.append((now_s, group.newest))
            while now_s - self._points[0][0] > PACE_S:
                self._points.popleft()

    def snapshot_age_s(self, now_s: float) -> float:
        """Since the newest snapshot changed."""
        return now_s - max(self._stable_s, self._durable_s)  # what is durable needs no snapshot

    def durable_age_s(self, now_s: float) -> float:
        """Since the newest durable step was committed."""
        return now_s - self._durable_s

    def steps_per_s(self, machine: Coordinator, now_s: float) -> float | None:
        """Over the last minute; None: no trainers are there, or for too short a time."""
        group = machine.joins.group
        if group is None or not self._points or now_s - self._points[0][0] < LOOK_EVERY_S:
            return None
        began_s, newest = self._points[0]
        return max(0, group.newest - newest) / (now_s - began_s)
