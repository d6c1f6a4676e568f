"""How often all hosts snapshot. Those that skip different steps would never have one in common: so all skip the same ones."""

from __future__ import annotations

from raystate.core.coordinator.context import Context

MAX_INTERVAL = 64
CALM_SNAPSHOTS = 8  # stable snapshots in a row without a skip before the interval is halved
TOLERATED_EVERY = 4  # a skip after so many stable snapshots is a hiccup: the interval stays
_AHEAD = "A loop that runs ahead of its devices skips steps; float(loss) in each step holds it back"


class Interval:
    """Of one lineage.

    Attributes:
        steps: only multiples of it are snapshotted, times `snapshot_every_steps`.
    """

    def __init__(self, context: Context):
        self._context = context
        self.steps = self._longest = 1
        self._mark = -1  # skips up to this step were caused by the interval before
        self._calm = CALM_SNAPSHOTS

    def stable(self, newest: int) -> None:
        """A snapshot has become stable. `newest`: step of any rank."""
        self._calm += 1
        if self._calm >= CALM_SNAPSHOTS and self.steps > 1:
            self._set(self.steps // 2, newest, f"{self._calm} snapshots without a skip")

    def skipped(self, step: int, newest: int, why: str) -> None:
        """A rank has skipped this step."""
        if step <= self._mark or step % self._every(self.steps):
            return
        if self._calm >= TOLERATED_EVERY:  # one hiccup must not halve the rate of snapshots
            self._calm = 0
        elif self.steps < MAX_INTERVAL:
            self._set(self.steps * 2, newest, f"{why}. {_AHEAD}")

    def _every(self, steps: int) -> int:
        return steps * max(1, self._context.settings.snapshot_every_steps)

    def _set(self, steps: int, newest: int, why: str) -> None:
        # It may go to and fro for hours: people read each length once.
        level, every = "info" if steps > self._longest else "debug", self._every(steps)
        self.steps, self._longest, self._mark, self._calm = steps, max(self._longest, steps), newest, 0
        self._context.log(level, f"a snapshot every {f'{every} steps' if every > 1 else 'step'} from now: {why}")
