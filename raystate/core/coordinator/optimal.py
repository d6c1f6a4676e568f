"""How often a step becomes durable where no rule says so: the interval that costs the training least, by Young (1974) and Daly (2006).

A save costs `cost_s` of training each time, and a loss of memory half an interval of steps that are done again. What a restart takes
lengthens a run by as much whatever the interval: it is left out, and counts as no time of training.

How often memory is lost is learned. Nothing public tells it of runs whose newest steps lie in memory. Llama 3 (2024) was interrupted every
3 h, on 16,384 GPUs, which one copy of a host's memory survives nearly always; OPT-175B (2022) every half a day. So the assumption at the
start is one loss a day. It weighs as little as a quarter of a loss: a Gamma prior, of shape `PRIOR_LOSSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

from raystate.core.coordinator.context import Context
from raystate.core.formats.reports import TrainerWord
from raystate.core.formats.texts import counted, duration
from raystate.waits import LEAST_SAVE_EVERY_S, MOST_SAVE_EVERY_S, SAID_AGAIN_S

PRIOR_LOSSES = 0.25
PRIOR_SECONDS = PRIOR_LOSSES * 24 * 3600.0
STAYS = 1.25  # the interval stays while the best one is at most so many times as long, or as short: measures waver


def between_losses_s(losses: int, trained_s: float) -> float:
    """Expected seconds of training from one loss of memory to the next, after so many in so long."""
    return (PRIOR_SECONDS + trained_s) / (PRIOR_LOSSES + losses)


def optimum_s(cost_s: float, between_s: float) -> float:
    """Seconds of training between saves that cost so much each, if what they are for comes every `between_s` (Daly 2006, equation 37)."""
    ratio = cost_s / (2 * between_s)
    if ratio >= 1:
        return between_s
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def at_least_s(cost_s: float, share: float) -> float:
    """The shortest interval whose saves cost no more than this share of the training."""
    return cost_s * (1 - share) / share


def save_every_s(cost_s: float, between_s: float, share: float) -> float:
    """The optimum, if it costs no more than this share, and within what suits any storage and anybody who waits for a durable step."""
    usual = min(MOST_SAVE_EVERY_S, max(LEAST_SAVE_EVERY_S, optimum_s(cost_s, between_s)))
    return max(usual, at_least_s(cost_s, share))


class News:
    """People hear of each value that takes effect, and once a minute at most: then of the one that there is by now."""

    def __init__(self, context: Context, known: float):
        self._context = context
        self._known = known
        self._silent_until_s = float("-inf")

    def tell(self, value: float, text: Callable[[], str]) -> None:
        """It is so now; as often as anybody looks. `text`: of the log line that tells it."""
        if value != self._known and self._context.now_s >= self._silent_until_s:
            self._known, self._silent_until_s = value, self._context.now_s + SAID_AGAIN_S
            self._context.log("info", text())


class DurableInterval:
    """Of durable saves by time, over all lineages of this attempt; measured where no rule says which steps become durable.

    Attributes:
        every_s: seconds between two of them, on all hosts; inf: there are none.
        cost_s: seconds of training that one takes; None: not measured yet.
        losses: how often the training had to go back to storage.
        trained_s: for so long it trained, restarts left out.
    """

    def __init__(self, context: Context):
        self.context = context
        self.every_s = math.inf if context.settings.save_every_s is None else context.settings.save_every_s
        self.cost_s: float | None = None
        self.losses = 0
        self.trained_s = 0.0
        self._heard_s: float | None = None
        self._costs: dict[int, float] = {}  # by rank
        self._news = News(context, self.every_s)

    @property
    def share(self) -> float:
        """Of the training's time that these saves take; the snapshots have the rest of `save_overhead`."""
        return self.cost_s / (self.every_s + self.cost_s) if self.context.settings.save_measured and self.cost_s else 0.0

    def begin(self) -> None:
        """Another lineage: until its ranks are heard of, no rank trains."""
        self._heard_s = None
        self._costs.clear()

    def lost_memory(self) -> None:
        """A restore went back to storage. The first one of an attempt may follow a planned end, and says nothing."""
        if self.trained_s:
            self.losses += 1

    def heard(self, new: Collection[TrainerWord], ranks: int) -> None:
        """All ranks of the group train, and these words of theirs have come."""
        settings, now_s = self.context.settings, self.context.now_s
        self.trained_s += now_s - self._heard_s if self._heard_s is not None else 0.0
        self._heard_s = now_s
        changed = {word.rank: word.save_s for word in new if word.save_s is not None and word.save_s != self._costs.get(word.rank)}
        self._costs |= changed
        if changed and len(self._costs) == ranks:
            self.cost_s = max(self._costs.values())
        if not settings.save_measured or self.cost_s is None:
            return
        share = settings.save_overhead / (2 if settings.snapshot_every_steps is None else 1)  # snapshots want as much
        between_s = between_losses_s(self.losses, self.trained_s)
        wanted_s = save_every_s(self.cost_s, between_s, share)
        if not self.every_s / STAYS < wanted_s < self.every_s * STAYS:
            self.every_s = wanted_s
        cost = duration(self.cost_s) if self.cost_s else "nothing that is measured"
        self._news.tell(
            self.every_s,
            lambda: (
                f"a durable save every {self.every_s:.0f} s from now: it costs {cost}, {self.share:.1%} of the training, and "
                f"memory is expected to be lost every {between_s / 3600:.1f} h "
                f"({counted(self.losses, 'time')} in {self.trained_s / 3600:.1f} h)"
            ),
        )
