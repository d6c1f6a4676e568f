"""How often all ranks snapshot: as often as `save_overhead` allows, or as the user says; and seldomer while ranks skip steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from raystate.core.coordinator.context import Context
from raystate.core.formats.reports import TrainerWord
from raystate.waits import SAID_AGAIN_S

MAX_FACTOR = 64
CALM_SNAPSHOTS = 8  # stable snapshots in a row without a skip before the factor is halved
TOLERATED_EVERY = 4  # a skip after so many stable snapshots is a hiccup: the factor stays
_AHEAD = "A loop that runs ahead of its devices skips steps; float(loss) in each step holds it back"
# The interval stays while what the measures ask for is between these shares of it: they waver.
_SHORTER, _LONGER = 0.5, 1.1
_NEWS = 2  # people hear of an interval that is so many times as long as the one they know, or as short


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, of a rank."""

    step_s: float
    snapshot_s: float

    def interval(self, share: float) -> int:
        """The smallest, in steps, whose snapshots cost at most this share of the training."""
        return max(1, math.ceil(self.snapshot_s * (1 - share) / (share * self.step_s)))

    def text(self, interval: int) -> str:
        """For the log."""
        share = self.snapshot_s / (interval * self.step_s + self.snapshot_s)
        return f"it costs {self.snapshot_s * 1e3:.3g} ms, {share:.1%} of the training, whose steps take {self.step_s * 1e3:.3g} ms"


def _of(word: TrainerWord) -> Measured | None:
    return Measured(word.step_s, word.snapshot_s) if word.step_s and word.snapshot_s is not None else None


class Interval:
    """Of one lineage after the other. `every` steps, times `factor` while ranks skip.

    Hosts that skip different steps would never have one in common: so when a rank skips, all get a larger common interval.
    """

    def __init__(self, context: Context):
        self.context = context
        self.every = context.settings.snapshot_every_steps or 1
        self.found: Measured | None = None  # what `every` comes from
        self._said = 1  # steps
        self._silent_until_s = 0.0
        self.begin()

    def begin(self) -> None:
        """In another lineage. What the measures say still holds."""
        self.factor = self._longest = 1
        self._mark = -1  # skips up to this step were caused by the interval before
        self._calm = CALM_SNAPSHOTS

    @property
    def steps(self) -> int:
        """From one snapshot to the next."""
        return self.every * self.factor

    @property
    def advised(self) -> int:
        """As trainers are told: they know `snapshot_every_steps` themselves."""
        return self.steps if self.context.settings.snapshot_every_steps is None else self.factor

    def stable(self, newest: int) -> None:
        """A snapshot has become so."""
        self._calm += 1
        if self._calm >= CALM_SNAPSHOTS and self.factor > 1:
            self._set_factor(self.factor // 2, newest, f"{self._calm} snapshots without a skip")

    def skipped(self, step: int, newest: int, stride: int, why: str) -> None:
        """A rank has skipped a step. `stride`: steps between its calls of save()."""
        if self.context.settings.snapshot_every_steps is not None:
            stride = 1  # of a number its multiples are snapshotted, and no others
        if step <= self._mark or step // self.steps == (step - stride) // self.steps:
            return
        least = -(-stride // self.every)  # a shorter interval than a stride is no shorter
        if self._calm >= TOLERATED_EVERY:  # one hiccup must not halve the rate of snapshots
            self._calm = 0
        elif self.factor < MAX_FACTOR * least:
            self._set_factor(max(self.factor, least) * 2, newest, f"{why}. {_AHEAD}")

    def _set_factor(self, factor: int, newest: int, why: str) -> None:
        self.factor = factor
        self._mark = newest
        self._calm = 0
        # It may go to and fro for hours: people read each length once.
        level = "info" if factor > self._longest else "debug"
        self._longest = max(self._longest, factor)
        self._say(level, why)

    def measured(self, new: Iterable[TrainerWord], words: Collection[TrainerWord], newest: int) -> None:
        """What the ranks of a group have measured. `new`: those of `words` that have just come."""
        settings = self.context.settings
        news = [found for word in new if (found := _of(word)) is not None]
        if settings.snapshot_every_steps is not None or not news or (self.found is not None and all(map(self._fits, news))):
            return
        known = [found for word in words if (found := _of(word)) is not None]
        if not known or len(known) < len(words):
            return
        worst = max(known, key=lambda one: one.snapshot_s / one.step_s)
        every = worst.interval(settings.save_overhead)
        self.found = worst
        if every == self.every:
            return
        self.every = every
        self._mark = newest
        now_s = self.context.now_s
        is_news = now_s >= self._silent_until_s and not self._said / _NEWS < every < self._said * _NEWS
        if is_news:
            self._said, self._silent_until_s = every, now_s + SAID_AGAIN_S
        self._say("info" if is_news else "debug", worst.text(self.steps))

    def _fits(self, found: Measured) -> bool:
        """Whether the interval may stay as far as this rank is concerned."""
        wanted = found.interval(self.context.settings.save_overhead)
        return _SHORTER * self.every <= wanted <= _LONGER * self.every

    def _say(self, level: str, why: str) -> None:
        every = self.steps
        self.context.log(level, f"a snapshot every {f'{every} steps' if every > 1 else 'step'} from now: {why}")
