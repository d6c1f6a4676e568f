"""Some ranks call save() and others don't: found out, so that no rank waits for ever."""

from __future__ import annotations

from typing import Any

from raystate.core.coordinator.context import NAMED, Context
from raystate.core.coordinator.group import Joins
from raystate.core.formats.messages import Failure


class Laggards:
    """Watches how far the ranks of the present group are apart."""

    def __init__(self, context: Context, joins: Joins):
        self._context = context
        self._joins = joins
        # Since when some ranks are ahead of others; None: no rank lags.
        self._since_s: float | None = None

    def forget(self) -> None:
        """Another lineage is the present one now."""
        self._since_s = None

    def look(self) -> Failure | None:
        """What the trainers' next save() has to raise, if some ranks have not called it for too long while others did."""
        group = self._joins.group
        if group is None or not group.alive or not group.all_seen or group.restoring:
            return None
        newest = group.newest
        behind = [rank for rank, seen in group.seen.items() if seen.newest_step < newest]
        limit_s = self._context.settings.barrier_timeout_s
        lagging = [rank for rank in behind if self._context.now_s - group.moved_s[rank] >= limit_s]
        if not lagging:
            self._since_s = None
            return None
        if self._since_s is None:
            # Until now everybody was level, or the others had stopped too.
            ahead = [rank for rank, seen in group.seen.items() if seen.newest_step == newest]
            self._since_s = min(group.moved_s[rank] for rank in ahead)
        waited_s = self._context.now_s - self._since_s
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


def _places(steps: list[int]) -> str:
    """One that was late reads this in its own save(): it has to see that a call of before is meant."""
    first, last = min(steps), max(steps)
    if last < 0:
        return "no step"
    return f"step {last}" if first == last else f"steps {max(0, first)} to {last}"
