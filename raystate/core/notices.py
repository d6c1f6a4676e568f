"""Hosts that were announced to go away: whoever trains there is asked to stop in time."""

from __future__ import annotations

from raystate.core.agreement import Agreement
from raystate.core.desk import Desk, brief, ranks_text
from raystate.core.group import Group, Joins
from raystate.core.messages import HostDown, HostId, HostLeaving, StopAsked

EARLIER_S = 1.0  # an end that is earlier by less is the same, told again
OVERDUE_S = 60.0  # after its end a host is not to go away any more: it is gone, or somebody was wrong


class Notices:
    """Asks each worker group with ranks on such a host to stop, once for each of these hosts.

    A host is told of many times, perhaps by several (Ray, the cloud, its own process): its earliest end counts. One that outlives it
    is as good as any other again.
    """

    def __init__(self, desk: Desk, joins: Joins, agreement: Agreement):
        self.desk = desk
        self.joins = joins
        self.agreement = agreement
        self._until_s: dict[HostId, float] = {}
        self._why: dict[HostId, str] = {}
        self._asked: dict[HostId, str] = {}  # the worker group that was asked last because of that host

    @property
    def hosts(self) -> frozenset[HostId]:
        """Those that are to go away."""
        return frozenset(self._until_s)

    def leaving(self, event: HostLeaving) -> None:
        """A host is to go away."""
        within_s = self.desk.settings.barrier_timeout_s if event.within_s is None else max(0.0, event.within_s)
        until_s = self.desk.now_s + within_s
        known_s = self._until_s.get(event.host)
        if known_s is None:
            self.desk.log("debug", f"host {event.host} goes away within {within_s:.1f} s: {event.reason}")
        if known_s is None or until_s < known_s - EARLIER_S:
            self._until_s[event.host], self._why[event.host] = until_s, event.reason
            self._asked.pop(event.host, None)
            self.desk.stir = True

    def down(self, event: HostDown) -> None:
        """A host that is gone for good is not to go away any more."""
        if event.gone:
            self._forget(event.host)

    def tick(self) -> None:
        """Forget those who should have gone long ago."""
        for host in [host for host, until_s in self._until_s.items() if self.desk.now_s - until_s >= OVERDUE_S]:
            view = self.joins.memory.hosts.get(host)
            if view is not None and view.up:
                self.desk.log("warning", f"host {host} was to go away {OVERDUE_S:.0f} s ago, and is still there: {self._why[host]}")
            self._forget(host)

    def _forget(self, host: HostId) -> None:
        for known in (self._until_s, self._why, self._asked):
            known.pop(host, None)

    def turn(self) -> None:
        """Ask the present group, if it has ranks on such a host and has not been asked because of that one.

        After a host's end only a group is asked that runs there since before: the next one may have been started because it stays.
        """
        group = self.joins.group
        if not self._until_s or group is None or not group.alive:
            return
        for host in sorted(self._until_s.keys() & group.hosts.values()):
            asked = self._asked.get(host)
            if asked is None or (asked != group.nonce and self.desk.now_s < self._until_s[host]):
                self._asked[host] = group.nonce
                self._ask(host, group)

    def _ask(self, host: HostId, group: Group) -> None:
        ranks = [rank for rank, one in sorted(group.hosts.items()) if one == host]
        reason = brief(f"the node of {ranks_text(ranks, dict(group.hosts))} goes away: {self._why[host]}")
        within_s = max(0.0, self._until_s[host] - self.desk.now_s)
        self.agreement.stop_asked(StopAsked(reason=reason, within_s=within_s, group=group.nonce))
