"""How long a step takes, and what snapshots and durable saves cost the steps: from the times of the calls of save().

A snapshot costs the time in which save() blocks, and that by which its copy, which runs beside the next steps, makes these slower. So
the steps in its wake are compared with undisturbed ones, as CheckFreq (FAST '21) does. A loop may run ahead of its devices, and its
calls then say nothing of its steps: for the few calls that are measured, save() waits until its state is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from raystate.core.trainer.copy_pace import SLOWS
from raystate.core.trainer.save_times import SaveTimes

LEAST_SNAPSHOTS = 4  # fewer are no measure
FIRST_SNAPSHOTS = 8  # all of these are measured
RECENT_SNAPSHOTS = 16
RECENT_STEPS = 8
CALM_STEPS = 4  # undisturbed periods that are measured after a wake
LEAD_CALLS = 2  # measured before a snapshot: the first drains what the loop has queued
UNMEASURED_CALLS = 64  # then the next snapshot is measured again
WINDOW_CALLS = 16
OTHER_PACE = 1.5  # the calls' own pace has changed by so much: the steps are measured again


class StepTimes:
    """One rank's. A period is the time from one call of save() to the next; it is measured if both calls have waited for their state."""

    def __init__(self) -> None:
        self.step_s = 0.0  # seconds that an undisturbed step takes; 0.0: not known
        self.snapshot_s: float | None = None  # seconds that a snapshot costs the steps; None: not known
        self.is_slowing = False  # copies have slowed the steps by more than `SLOWS`, once: those that are spread out slow them less
        self.saves = SaveTimes()
        self._calls: deque[tuple[int, float]] = deque(maxlen=WINDOW_CALLS)  # (step, at)
        self._pace = 0.0  # seconds a step, of the calls' window when the steps were measured
        self._waited = False  # the newest call has, for its state
        self._calm: deque[float] = deque(maxlen=RECENT_STEPS)
        self._beside: list[float] = []  # undisturbed, next to the snapshot that is measured
        self._wake: tuple[int, float] | None = None  # (steps, seconds) since the newest snapshot
        self._ended: tuple[int, float] | None = None  # a wake without its undisturbed periods
        self._costs: deque[float] = deque(maxlen=RECENT_SNAPSHOTS)
        self._slower: deque[float] = deque(maxlen=RECENT_SNAPSHOTS)  # shares by which the steps beside a copy took longer
        self._unmeasured_calls = 0  # since a snapshot was measured
        self._looks = 0  # calls that are still measured because the pace has changed

    def waits(self, due_in: int) -> bool:
        """Whether the call that begins now is measured: it waits until its state is computed, before `called`.

        Args:
            due_in: the next snapshot is due at the call after so many.
        """
        if self._looks:
            return True
        is_under_way = self._waited and (self._wake is not None or self._ended is not None)
        return is_under_way or (self._is_wanted and due_in <= LEAD_CALLS)

    @property
    def _is_wanted(self) -> bool:
        """Whether the next snapshot is to be measured."""
        return len(self._costs) < FIRST_SNAPSHOTS or self._unmeasured_calls >= UNMEASURED_CALLS

    def called(self, step: int, now_s: float, *, waited: bool, copying: bool, durable: int = -1) -> None:
        """save(step) is called.

        Args:
            now_s: once its state is computed, if it has waited for it.
            copying: a copy is still under way.
            durable: the newest durable step.
        """
        before = self._calls[-1] if self._calls else None
        if before is not None and step == before[0]:  # it comes again: the period goes on
            return
        if before is not None and step < before[0]:  # one of the two is refused
            self.forget()
            before = None
        self._unmeasured_calls += 1
        was_measured, self._waited = self._waited and waited, waited
        if before is not None:
            self.saves.passed(step - before[0], now_s - before[1], durable)
        self._calls.append((step, now_s))
        if not was_measured or before is None:
            self._give_up()
        elif self._wake is None:
            self._undisturbed((now_s - before[1]) / (step - before[0]))
        else:
            steps, seconds = self._wake
            self._wake = steps + step - before[0], seconds + now_s - before[1]
            if not copying:
                self._wake, self._ended = None, self._wake
        self._looks = max(0, self._looks - 1)
        self._look_at_pace()

    def forget(self) -> None:
        """Other steps follow, as after a restore: the time until they do is no period."""
        self._calls.clear()
        self.saves.forget()
        self._give_up()

    def _give_up(self) -> None:
        self._wake = self._ended = None
        self._beside.clear()

    @property
    def stride(self) -> int:
        """Steps between the last two calls."""
        return max(1, self._calls[-1][0] - self._calls[-2][0]) if len(self._calls) > 1 else 1

    def snapshotted(self) -> None:
        """This call has taken a snapshot."""
        self._judge()
        self._wake = (0, 0.0) if self._waited and self._is_wanted else None

    def _undisturbed(self, seconds: float) -> None:
        self._calm.append(seconds)
        self._beside.append(seconds)
        self.step_s = _without_extremes(self._calm)
        self._pace = self._paced()
        if self._ended is not None and len(self._beside) >= CALM_STEPS:
            self._judge()

    def _judge(self) -> None:
        """What the last snapshot has cost, if enough of it was measured."""
        if self._ended is not None and self._beside:
            steps, seconds = self._ended
            undisturbed = steps * _without_extremes(self._beside)
            self._costs.append(seconds - undisturbed)
            self._slower.append((seconds - undisturbed) / undisturbed if undisturbed else 0.0)
            self._unmeasured_calls = 0
            if len(self._costs) >= LEAST_SNAPSHOTS:
                self.snapshot_s = max(0.0, _without_extremes(self._costs))
                self.is_slowing = self.is_slowing or _without_extremes(self._slower) > SLOWS
        self._ended = None
        self._beside.clear()

    def _paced(self) -> float:
        (first, began_s), (last, now_s) = self._calls[0], self._calls[-1]
        return (now_s - began_s) / (last - first) if last > first else 0.0

    def _look_at_pace(self) -> None:
        pace = self._paced()
        if self._looks or not self.step_s or not self._pace or not pace or len(self._calls) < WINDOW_CALLS // 2:
            return
        if not 1 / OTHER_PACE < pace / self._pace < OTHER_PACE:
            self._looks = CALM_STEPS + 1
            self._pace = pace
            self._calm.clear()


def _without_extremes(values: Sequence[float]) -> float:
    """The mean, without the largest fifth and the smallest: a compilation, an evaluation, a machine that does something else."""
    cut = max(1, len(values) // 5)
    kept = sorted(values)[cut:-cut] if len(values) > 2 else values
    return sum(kept) / len(kept)
