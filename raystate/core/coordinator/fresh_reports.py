"""A question to all hosts, what they hold now: who has not answered yet. Restores and releases ask it."""

from __future__ import annotations

from collections.abc import Callable

from raystate.core.coordinator.context import Context, named
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.memory import HostView, Memory
from raystate.core.formats.names import HostId, group_of


class FreshReports:
    """Asked by giving every host new advice: a report that knows this advice was made after the question.

    Attributes:
        began_s: when it was asked last.
    """

    def __init__(self, context: Context, memory: Memory):
        self._context = context
        self._memory = memory
        self._seq = -1  # of the advice that asks; -1: it waits for the hosts that are being gathered
        self.began_s = 0.0

    def begin(self) -> None:
        """Ask now, or as soon as the hosts of an earlier attempt are gathered."""
        self.began_s = self._context.now_s
        self._seq = -1
        self.gathered()

    def gathered(self) -> str:
        """Ask, if that had to wait. Gives the hosts for which it has to wait still; "" if for none."""
        if self._memory.gathering:
            return named(sorted(self._memory.gathering))
        if self._seq < 0:
            self._seq = self._memory.ask_all()
        return ""

    def first_late(self, is_late: Callable[[HostView], bool]) -> HostView | None:
        """A host that is late, or None if none is."""
        return next(filter(is_late, self._memory.views), None)

    def is_answered(self, view: HostView) -> bool:
        """Whether the host has reported after the question reached it."""
        return view.heard_s >= self.began_s and not self._has_not_heard(view)

    def is_on_its_way(self, view: HostView) -> bool:
        """The host speaks, but what it says is from before the question reached it."""
        heard_lately = self._context.now_s - view.heard_s < self._context.settings.host_timeout_s
        return heard_lately and self._has_not_heard(view)

    def _has_not_heard(self, view: HostView) -> bool:
        """The question has not reached it, as its last report says."""
        return view.advised is not None and view.advised < (self._context.attempt, self._seq)


class RestoreReports(FreshReports):
    """Before a restore: no trainer of an older worker group may be left."""

    def is_late(self, view: HostView, group: Group) -> bool:
        """Its report has to be waited for: it has not said yet what it holds now."""
        return view.up and not self.is_fresh(view, group)

    def is_fresh(self, view: HostView, group: Group) -> bool:
        """The host's last report was made after all ranks had asked, and no trainer of an older worker group is left there."""
        return self.is_answered(view) and all(group_of(one.lineage) == group.name for one in view.trainers)

    def overdue(self, group: Group, waited_s: float) -> list[tuple[HostId, str]]:
        """Hosts that have had their time to answer, each with the reason why the restore goes on without what it holds."""
        found: list[tuple[HostId, str]] = []
        limit_s = self._context.settings.host_timeout_s
        for view in self._memory.views:
            # One that has just come back is given the time to answer; one that speaks and has not heard the question yet, too.
            patient = self.is_on_its_way(view) and waited_s < 2 * limit_s
            if view.up and not self.is_fresh(view, group) and self._memory.had_its_time(view) and not patient:
                why = "trainers of an older lineage are still there" if self.is_answered(view) else "no report"
                found.append((view.host, f"{why} after {waited_s:.1f} s of restoring"))
        return found
