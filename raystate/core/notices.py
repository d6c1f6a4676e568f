"""Hosts that were announced to go away: whoever trains there is asked to stop in time."""

from __future__ import annotations

from raystate.core.agreement import Agreement
from raystate.core.desk import Desk, brief, ranks_text
from raystate.core.group import Group, Joins
from raystate.core.messages import HostDown, HostId, HostLeaving, StopAsked


class Notices:
    """Asks each worker group with ranks on such a host to stop, once for each of these hosts.

    A host is told of many times, perhaps by several (Ray, the cloud, its own process): its earliest end counts.
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
        if known_s is None or until_s < known_s:
            self._until_s[event.host] = until_s
            self._why.setdefault(event.host, event.reason)
            self.desk.stir = True

    def down(self, event: HostDown) -> None:
        """A host that is gone for good is not to go away any more."""
        if event.gone:
            for known in (self._until_s, self._why, self._asked):
                known.pop(event.host, None)

    def turn(self) -> None:
        """Ask the present group, if it has ranks on such a host and has not been asked because of that one."""
        group = self.joins.group
        if not self._until_s or group is None or not group.alive:
            return
        for host in sorted(self._until_s.keys() & group.hosts.values()):
            if self._asked.get(host) != group.nonce:
                self._asked[host] = group.nonce
                self._ask(host, group)

    def _ask(self, host: HostId, group: Group) -> None:
        ranks = [rank for rank, one in sorted(group.hosts.items()) if one == host]
        reason = brief(f"the node of {ranks_text(ranks, dict(group.hosts))} goes away: {self._why[host]}")
        within_s = max(0.0, self._until_s[host] - self.desk.now_s)
        self.agreement.stop_asked(StopAsked(reason=reason, within_s=within_s, group=group.nonce))
