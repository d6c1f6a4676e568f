"""Hosts that were announced to go away: for which worker group that is a reason to stop in time."""

from __future__ import annotations

from dataclasses import dataclass

from raystate.core.coordinator.context import Context, ranks_text
from raystate.core.coordinator.joins import Joins
from raystate.core.formats.events import HostDown, StopAsked
from raystate.core.formats.names import HostId
from raystate.core.formats.texts import brief
from raystate.waits import MOMENT_S, OVERDUE_S


@dataclass(slots=True)
class _End:
    """When a host is to be gone, and why."""

    until_s: float
    why: str
    asked: str | None = None  # the worker group that was asked last because of it


class Notices:
    """Names such a host once to each worker group that has ranks there.

    A host is told of many times, perhaps by several (Ray, the cloud, its own process): its earliest end counts. One that outlives it
    is as good as any other again.

    Attributes:
        left: those that went away as announced: nothing is wrong with them.
    """

    def __init__(self, context: Context, joins: Joins):
        self.context = context
        self.joins = joins
        self.left: set[HostId] = set()
        self._ends: dict[HostId, _End] = {}

    @property
    def hosts(self) -> frozenset[HostId]:
        """Those that are to go away."""
        return frozenset(self._ends)

    def end_of(self, host: HostId) -> tuple[float, str] | None:
        """(until when it is to be gone, why) of a host that is to go away."""
        end = self._ends.get(host)
        return None if end is None else (end.until_s, end.why)

    def went(self, host: HostId) -> str:
        """The host is not there any more. Gives why it was to go away; "": it was not."""
        end = self._ends.get(host)
        if end is None:
            return ""
        self.left.add(host)
        return end.why

    def came(self, host: HostId) -> None:
        """It is there again."""
        self.left.discard(host)

    def leaving(self, host: HostId, event: StopAsked) -> None:
        """The host is to go away."""
        within_s = self.context.settings.barrier_timeout_s if event.within_s is None else max(0.0, event.within_s)
        until_s = self.context.now_s + within_s
        known = self._ends.get(host)
        if known is None:
            self.context.log("debug", f"host {host} goes away within {within_s:.1f} s: {event.reason}")
        if known is None or until_s < known.until_s - MOMENT_S:
            self._ends[host] = _End(until_s, event.reason)

    def down(self, event: HostDown) -> None:
        """A host that is gone is not to go away any more."""
        self._ends.pop(event.host, None)

    def _forget_overdue(self) -> None:
        for host, end in [(host, end) for host, end in self._ends.items() if self.context.now_s - end.until_s >= OVERDUE_S]:
            view = self.joins.memory.hosts.get(host)
            if view is not None and view.up:
                self.context.log("warning", f"host {host} was to go away {OVERDUE_S:.0f} s ago, and is still there: {end.why}")
            del self._ends[host]

    def news(self) -> list[tuple[str, float]]:
        """(why, within which seconds) the present group is to stop, which it was not told before.

        After a host's end only a group hears of it that runs there since before: the next one may have been started because it stays.
        A host that should have gone long ago is forgotten.
        """
        self._forget_overdue()
        group = self.joins.group
        if not self._ends or group is None or not group.alive:
            return []
        found: list[tuple[str, float]] = []
        for host in sorted(self._ends.keys() & group.hosts.values()):
            end = self._ends[host]
            if end.asked is None or (end.asked != group.name and self.context.now_s < end.until_s):
                end.asked = group.name
                ranks = [rank for rank, one in sorted(group.hosts.items()) if one == host]
                why = brief(f"the node of {ranks_text(ranks, group.hosts)} goes away: {end.why}")
                found.append((why, max(0.0, end.until_s - self.context.now_s)))
        return found
