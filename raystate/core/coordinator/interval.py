"""How often all ranks snapshot: as often as `save_overhead` allows, or as the user says; and seldomer while ranks skip steps."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.optimal import DurableInterval, News, at_least_s
from raystate.core.formats.reports import TrainerWord
from raystate.core.formats.texts import duration

MAX_FACTOR = 64
CALM_SNAPSHOTS = 8  # stable snapshots in a row without a skip before the factor is halved
TOLERATED_EVERY = 4  # a skip after so many stable snapshots is a hiccup: the factor stays
_AHEAD = "A loop that runs ahead of its devices skips steps; float(loss) in each step holds it back"
# The interval stays while what the measures ask for is between these shares of it: they waver.
_SHORTER, _LONGER = 0.5, 1.1


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds, of a rank."""

    step_s: float
    snapshot_s: float

    def interval(self, share: float) -> int:
        """The smallest, in steps, whose snapshots cost at most this share of the training."""
        return max(1, math.ceil(at_least_s(self.snapshot_s, share) / self.step_s))

    def text(self, interval: int) -> str:
        """For the log."""
        share = self.snapshot_s / (interval * self.step_s + self.snapshot_s)
        return f"it costs {duration(self.snapshot_s)}, {share:.1%} of the training, whose steps take {duration(self.step_s)}"


def _of(word: TrainerWord) -> Measured | None:
    return Measured(word.step_s, word.snapshot_s) if word.step_s and word.snapshot_s is not None else None


def _worst(words: Collection[TrainerWord]) -> Measured | None:
    """Of the rank whose snapshots cost most of its training; None: not all have measured."""
    known = [found for word in words if (found := _of(word)) is not None]
    return max(known, key=lambda one: one.snapshot_s / one.step_s) if known and len(known) == len(words) else None


class Interval:
    """Of one lineage after the other. `every` steps, times `factor` while ranks skip.

    Hosts that skip different steps would never have one in common: so when a rank skips, all get a larger common interval.
    """

    def __init__(self, context: Context):
        self.context = context
        self.every = context.settings.snapshot_every_steps or 1
        self.found: Measured | None = None  # what `every` comes from
        self.durable = DurableInterval(context)
        self._news = News(context, self.every)
        self.begin()

    def begin(self) -> None:
        """In another lineage. What the measures say still holds."""
        self.durable.begin()
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
        self.context.log(level, self._text(why))

    def measured(self, new: Collection[TrainerWord], words: Collection[TrainerWord], newest: int) -> None:
        """What the ranks of a group have measured. `new`: those of `words` that have just come."""
        settings = self.context.settings
        self.durable.heard(new, len(words))
        news = [found for word in new if (found := _of(word)) is not None]
        if settings.snapshot_every_steps is not None or not news:
            return
        if (self.found is None or not all(map(self._fits, news))) and (worst := _worst(words)) is not None:
            self.found = worst
            if (every := worst.interval(self._share)) != self.every:
                self.every, self._mark = every, newest
        if (held := self.found) is not None:
            self._news.tell(self.every, lambda: self._text((_worst(words) or held).text(self.steps)))

    @property
    def _share(self) -> float:
        """Of the training's time that snapshots may cost. A death costs least with as many as that allows: their optimum is longer, by far,
        for all that is known of how often processes die, and people are promised a step or two."""
        return self.context.settings.save_overhead - self.durable.share

    def _fits(self, found: Measured) -> bool:
        """Whether the interval may stay as far as this rank is concerned."""
        wanted = found.interval(self._share)
        return _SHORTER * self.every <= wanted <= _LONGER * self.every

    def measure(self, words: Collection[TrainerWord]) -> Measured | None:
        """The newest measure of the ranks, else the one that `every` comes from; None: there is none."""
        return None if self.found is None else _worst(words) or self.found

    def _text(self, why: str) -> str:
        every = self.steps
        return f"a snapshot every {f'{every} steps' if every > 1 else 'step'} from now: {why}"
