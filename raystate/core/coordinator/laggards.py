"""Ranks that are late: they don't call save() while others do, or make no step at all. They are named, and no rank waits for ever."""

from __future__ import annotations

from typing import Any

from raystate.core.coordinator.context import NAMED, Context
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.joins import Joins
from raystate.core.formats.declared import Failure
from raystate.core.formats.names import HostId
from raystate.core.formats.orders import EndTrainers
from raystate.core.formats.questions import FlushAsked
from raystate.core.formats.texts import brief
from raystate.waits import HANG_ENDS_S, RETRY_FIRST_S

UNUSUAL = 3.0  # times the longest pause so far


class Laggards:
    """Watches when the ranks of the present group made their last step, and how far they are apart.

    A rank that waits for the Coordinator hangs no more than the Coordinator does: meanwhile no time
    is counted. In a collective all ranks stand still, and the one behind the others has not come to
    it. If all are level, any may be the cause: all are meant.

    A rank in a section with a time-out of its own has that time, from its last word on. Until it has passed, the rank is not late, and
    those that are no further than it may be waiting for it. Once it has, the rank hangs, wherever the others are.
    """

    def __init__(self, context: Context, joins: Joins):
        self._context = context
        self._joins = joins
        # Since when some ranks are ahead of others; None: no rank lags.
        self._ahead_s: float | None = None
        self._group: Group | None = None
        self._since_s = 0.0  # standing still counts from here on
        self._told: tuple[int, ...] = ()  # ranks of whom the log has heard
        self._last, self._last_s = -1, 0.0  # the step that all ranks had made when somebody looked last, and since when
        self._longest_s = 0.0  # that it took them to make another one
        self._ending_s: float | None = None  # since when they are being ended
        self._sent_s = 0.0

    def forget(self) -> None:
        """Another lineage is the present one now."""
        self._ahead_s = None

    def not_saving(self) -> Failure | None:
        """What the trainers' next save() has to raise, if some ranks have not called it for too long while others did."""
        group = self._joins.group
        if group is None or not group.alive or not group.all_seen or group.restoring:
            return None
        newest = group.newest
        behind = [rank for rank, seen in group.seen.items() if seen.newest_step < newest]
        limit_s, now_s = self._context.settings.barrier_timeout_s, self._context.now_s
        has_time = {rank for rank in behind if now_s - group.lived_s[rank] < group.seen[rank].section_s}
        lagging = [rank for rank in behind if rank not in has_time and now_s - group.moved_s[rank] >= limit_s]
        if not lagging:
            self._ahead_s = None
            return None
        if self._ahead_s is None:
            # Until now everybody was level, or the others had stopped too.
            ahead = [rank for rank, seen in group.seen.items() if seen.newest_step == newest]
            self._ahead_s = min(group.moved_s[rank] for rank in ahead)
        waited_s = self._context.now_s - self._ahead_s
        if waited_s < limit_s:
            return None
        lagging.sort()
        message = (
            f"save() of step {newest} was not called in time by {self._joins.where(lagging)}, still at "
            f"{_places([group.seen[rank].newest_step for rank in lagging])} when others had been ahead for {waited_s:.1f} s; "
            "every process must call save() for the same steps; if one may take longer, raise barrier_timeout_s"
        )
        self._context.log("error", message)
        details: dict[str, Any] = {
            "missing_ranks": lagging[:NAMED],
            "hosts": [group.hosts.get(rank) for rank in lagging[:NAMED]],
            "missing_count": len(lagging),
            "step": newest,
            "phase": "save",
            "waited_s": waited_s,
        }
        return Failure(error="BarrierTimeoutError", message=message, details=details)

    def standing_still(self, *, saving: bool) -> None:
        """Look for ranks that make no step, now that time has passed: name them, and end them if the configuration says so.

        Args:
            saving: a save is under way, for which ranks may wait.
        """
        group, now_s = self._joins.group, self._context.now_s
        if group is None:
            return
        if group is not self._group:
            self._group, self._since_s, self._told, self._ending_s = group, group.first_s, (), None
        if not group.alive or group.left or saving or self._waits_for_us():
            self._since_s = now_s
            return
        if not group.all_seen:
            return
        last = min(seen.newest_step for seen in group.seen.values())
        end_s = self._context.settings.hang_timeout_s
        limit_s = self._unusual_s(last) if end_s is None else end_s
        # It may be restoring still; of an adopted group that isn't known.
        if group.restoring or not group.decided:
            limit_s = max(limit_s, self._context.settings.restore_timeout_s)
        stills_s = self._stills_s(group)
        hanging, still_s = self._hanging(group, stills_s, last, limit_s)
        if not hanging:
            self._told, self._ending_s = (), None
            return
        text = self._text(group, hanging, still_s)
        if hanging != self._told:
            self._told = hanging
            self._context.log("warning" if end_s is None else "error", text)
        if end_s is not None:
            self._end(group, hanging, text)

    def _hanging(self, group: Group, stills_s: dict[int, float], last: int, limit_s: float) -> tuple[tuple[int, ...], float]:
        """The ranks that hang, and for how long at least; none: all have time.

        Args:
            stills_s: how long each has made no step.
            last: the newest step that all ranks have made.
            limit_s: for those in no section with a time-out of its own.
        """
        own_s = {rank: seen.section_s for rank, seen in sorted(group.seen.items()) if seen.section_s}
        overdue = tuple(rank for rank, most_s in own_s.items() if stills_s[rank] >= most_s)
        if overdue:
            return overdue, min(stills_s[rank] for rank in overdue)
        level = tuple(rank for rank, seen in sorted(group.seen.items()) if seen.newest_step == last)
        still_s = min(stills_s[rank] for rank in level)
        return (() if still_s < limit_s or own_s.keys() & set(level) else level), still_s

    def _waits_for_us(self) -> bool:
        """Whether a rank waits for the Coordinator itself. A flush does not count: it also waits for the other ranks' pieces."""
        return any(kind is not FlushAsked for kind in self._context.open_asks.values())

    def _unusual_s(self, last: int) -> float:
        """A pause that is worth a line: some scripts evaluate for minutes, and some steps take as long.

        Args:
            last: the newest step that all ranks have made.
        """
        if last != self._last:
            if self._last >= 0:
                self._longest_s = max(self._longest_s, self._context.now_s - self._last_s)
            self._last, self._last_s = last, self._context.now_s
        return max(self._context.settings.barrier_timeout_s, UNUSUAL * self._longest_s)

    def _stills_s(self, group: Group) -> dict[int, float]:
        """Rank -> how long it has made no step and no other call, by its host's last report.

        While a host is down, its trainers' steps are not seen. They count as still for as long as
        all the others stand still, since those would wait for them.
        """
        seen: dict[int, float] = {}
        for rank in group.seen:
            view = self._joins.memory.hosts[group.hosts[rank]]
            if view.up:
                seen[rank] = view.heard_s - max(self._since_s, group.lived_s[rank])
        unseen = dict.fromkeys(group.seen, min(seen.values(), default=0.0))
        return unseen | seen

    def _text(self, group: Group, hanging: tuple[int, ...], still_s: float) -> str:
        last = group.seen[hanging[0]].newest_step
        after = f"after step {last}" if last >= 0 else "and none before"
        sections = dict.fromkeys(repr(one) for rank in hanging if (one := group.seen[rank].section))
        where = f", in section {' and '.join(sections)}" if sections else ""
        others = ", and the others wait" if len(hanging) < len(group.seen) else ""
        return brief(f"{self._joins.where(list(hanging))} made no step for {still_s:.0f} s {after}{where}{others}")

    def _end(self, group: Group, hanging: tuple[int, ...], text: str) -> None:
        now_s = self._context.now_s
        if self._ending_s is None:
            self._ending_s, self._sent_s = now_s, float("-inf")
        if now_s - self._ending_s >= HANG_ENDS_S:
            self._joins.end(f"{text}; it could not be ended alone")
            return
        if now_s - self._sent_s < RETRY_FIRST_S:
            return
        self._sent_s = now_s
        group.hanging |= frozenset(hanging)
        by_host: dict[HostId, list[int]] = {}
        for rank in hanging:
            by_host.setdefault(group.hosts[rank], []).append(rank)
        for host, ranks in sorted(by_host.items()):
            order = EndTrainers(host=host, lineage=group.lineage, reason=text, attempt=self._context.attempt, hanging=tuple(ranks))
            self._context.out.append(order)


def _places(steps: list[int]) -> str:
    """One that was late reads this in its own save(): it has to see that a call of before is meant."""
    first, last = min(steps), max(steps)
    if last < 0:
        return "no step"
    return f"step {last}" if first == last else f"steps {max(0, first)} to {last}"
