"""Hosts that are away for a moment: nothing can be written meanwhile, and that is not storage's doing."""

from __future__ import annotations

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.group import Joins
from raystate.core.coordinator.memory import Memory
from raystate.core.formats.names import HostId
from raystate.waits import AGAIN_S, HOST_AWAY_S, HOST_SILENT_S


class Absence:
    """Which hosts of the worker group are away. Others hold up nothing.

    Attributes:
        changed_s: when one of them went away or came back last; all of them came when this attempt began.
    """

    def __init__(self, context: Context, memory: Memory, joins: Joins):
        self._context = context
        self._memory = memory
        self._joins = joins
        self._since_s: dict[HostId, float] = {}
        self._silent: list[HostId] = []
        self._look_s = 0.0
        self.changed_s = 0.0

    def begin(self) -> None:
        """This attempt owns the run."""
        self.changed_s = self._context.now_s

    def went(self, host: HostId) -> None:
        """Its HostActor has died, or is silent."""
        if self._counts(host):
            self.changed_s = self._since_s[host] = self._context.now_s

    def came(self, host: HostId) -> None:
        """It has spoken, for the first time since it went away or as a new HostActor."""
        self._since_s.pop(host, None)
        if self._counts(host):
            self.changed_s = self._context.now_s

    def heard(self, host: HostId) -> None:
        """It has reported."""
        if host in self._since_s:
            self.came(host)

    def lost(self, host: HostId) -> None:
        """It is gone with its node: no decision waits for it."""
        self._since_s.pop(host, None)

    def _counts(self, host: HostId) -> bool:
        group = self._joins.group
        return group is None or not group.all_seen or host in group.hosts.values()

    def is_away(self, host: HostId) -> bool:
        """Whether it is down, and may soon be back."""
        return host in self._since_s and self._context.now_s - self._since_s[host] < HOST_AWAY_S

    def hosts(self) -> list[HostId]:
        """Those that are away, or have missed a report or two, and may soon be back."""
        group, now_s = self._joins.group, self._context.now_s
        if now_s >= self._look_s:
            self._look_s = now_s + AGAIN_S
            views = (self._memory.hosts.get(host) for host in ({} if group is None else group.hosts).values())
            self._silent = [view.host for view in views if view is not None and view.up and now_s - view.heard_s >= HOST_SILENT_S]
        return sorted({*filter(self.is_away, self._since_s), *self._silent})

    def has_waited(self, since_s: float, patience_s: float) -> bool:
        """Whether so many seconds have passed with all hosts there: these are waited for, but not without end."""
        now_s = self._context.now_s
        if now_s - since_s >= HOST_AWAY_S + patience_s:
            return True
        return now_s - max(since_s, self.changed_s) >= patience_s and not self.hosts()
