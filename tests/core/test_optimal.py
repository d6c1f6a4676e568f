"""How often a step becomes durable where no rule says so: what saves cost, how often memory is lost, and what follows from both."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.interval import Interval
from raystate.core.coordinator.optimal import (
    PRIOR_LOSSES,
    PRIOR_SECONDS,
    STAYS,
    DurableInterval,
    at_least_s,
    between_losses_s,
    optimum_s,
    save_every_s,
)
from raystate.core.formats.commands import Log
from raystate.core.formats.events import Appended
from raystate.core.formats.reports import TrainerWord
from raystate.core.formats.settings import Settings
from raystate.core.trainer.save_times import SaveTimes
from raystate.waits import LEAST_SAVE_EVERY_S, MOST_SAVE_EVERY_S
from tests.core.driver import AB, training

HOUR_S, DAY_S = 3600.0, 86400.0
SETTINGS = Settings(run="r", storage="s", save_every_s=300.0, save_measured=True, save_overhead=0.03)
WORD = TrainerWord(lineage="1.1.x", rank=0, world=1)

# ---------------------------------------------------------------- the optimum


@pytest.mark.parametrize("cost_s", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("between_s", [HOUR_S, DAY_S, 30 * DAY_S])
def test_no_other_interval_costs_less(cost_s: float, between_s: float) -> None:
    """Held against the exact time that a second of training takes, of failures that come by chance alone (Daly 2006, equation 20)."""

    def takes_s(every_s: float) -> float:
        return between_s * math.expm1((every_s + cost_s) / between_s) / every_s

    best_s = optimum_s(cost_s, between_s)
    least = min(takes_s(best_s * 1.02**n) for n in range(-200, 200))
    assert takes_s(best_s) <= least * (1 + 1e-4)


def test_the_bounds() -> None:
    assert save_every_s(0.0, DAY_S, 0.03) == LEAST_SAVE_EVERY_S
    assert save_every_s(5.0, 1000 * DAY_S, 0.03) == MOST_SAVE_EVERY_S
    assert save_every_s(1.0, DAY_S, 0.03) == optimum_s(1.0, DAY_S)
    every_s = save_every_s(100.0, HOUR_S, 0.03)  # what it may cost goes before all else
    assert every_s == at_least_s(100.0, 0.03) > MOST_SAVE_EVERY_S
    assert 100.0 / (every_s + 100.0) == pytest.approx(0.03)
    assert optimum_s(10.0, 4.0) == 4.0


def test_what_is_seen_outweighs_what_was_assumed() -> None:
    assert PRIOR_SECONDS / PRIOR_LOSSES == between_losses_s(0, 0.0) == DAY_S
    assert between_losses_s(10, 10 * HOUR_S) == pytest.approx(HOUR_S, rel=0.6)
    assert between_losses_s(100, 100 * HOUR_S) == pytest.approx(HOUR_S, rel=0.06)
    assert between_losses_s(0, 7 * DAY_S) > 20 * DAY_S


# ---------------------------------------------------------------- beside the best in hindsight

WEEK_S = 7 * DAY_S
TRACES = 200
SHARE = SETTINGS.save_overhead / 2
BETWEEN_S = [900.0 * 10 ** (i / 2) for i in range(7)]  # a quarter of an hour to ten days


def trace(random: Random, between_s: float) -> list[float]:
    """Seconds of training between losses of memory, a week in all."""
    gaps, at_s = list[float](), 0.0
    while at_s < WEEK_S:
        gaps.append(min(random.expovariate(1 / between_s), WEEK_S - at_s))
        at_s += gaps[-1]
    return gaps


def kept_s(gaps: Sequence[float], every_s: float, cost_s: float) -> float:
    """Seconds of training that were not lost, with one interval all the time."""
    return every_s * sum(int(gap / (every_s + cost_s)) for gap in gaps)


def kept_as_decided_s(gaps: Sequence[float], cost_s: float) -> float:
    """The same, as the Coordinator decides: by what it has seen so far."""
    context = Context(SETTINGS)
    interval = DurableInterval(context)
    word = replace(WORD, save_s=cost_s)
    kept, now_s = 0.0, 0.0
    for gap in gaps:
        end_s = now_s + gap
        interval.begin()
        context.now_s = now_s
        interval.heard([word], 1)
        while now_s + interval.every_s + cost_s <= end_s:
            # Nothing changes in a twentieth of the time that was seen so far; a save at a time takes too long here.
            saves = int(min(end_s - now_s, max(1.0, 0.05 * now_s)) / (interval.every_s + cost_s)) or 1
            kept += saves * interval.every_s
            now_s = context.now_s = now_s + saves * (interval.every_s + cost_s)
            interval.heard([word], 1)
            context.out.clear()
        now_s = context.now_s = end_s
        interval.heard([word], 1)
        interval.lost_memory()
    return kept


@pytest.mark.parametrize("cost_s", [0.3, 3.0, 30.0])
@pytest.mark.parametrize("between_s", BETWEEN_S)
def test_within_two_percent_of_the_best_interval_in_hindsight(between_s: float, cost_s: float) -> None:
    """Of each trace the best of 24 intervals that `save_overhead` allows, chosen with the whole trace known."""
    random = Random(round(between_s))
    allowed = {max(at_least_s(cost_s, SHARE), 20 * 1.45**i) for i in range(24)}
    ratios: list[float] = []
    for _ in range(TRACES):
        gaps = trace(random, between_s)
        best_s = max(kept_s(gaps, every_s, cost_s) for every_s in allowed)
        ratios.append(kept_as_decided_s(gaps, cost_s) / best_s)
    assert statistics.mean(ratios) >= 0.98


# ---------------------------------------------------------------- what a save costs


class Loop:
    """Calls of save(). A save blocks for `blocked_s`, and slows the steps for `stored_s` to `slower` times as long."""

    def __init__(self, step_s: float, *, blocked_s: float, stored_s: float, slower: float, noise: float = 0.0, run_ahead: int = 1):
        self.times = SaveTimes()
        self._step_s, self._blocked_s, self._stored_s, self._slower, self._noise = step_s, blocked_s, stored_s, slower, noise
        self._random = Random(1)
        self._run_ahead = run_ahead
        self._owed_s = 0.0
        self._calls = 0
        self._left_s = 0.0  # of the save under way
        self._step, self._durable, self._saving = 0, -1, -1

    @property
    def cost_s(self) -> float:
        return self._blocked_s + self._stored_s * (1 - 1 / self._slower)

    def train(self, seconds: float, *, more_s: float = 0.0) -> None:
        """`more_s`: the first call comes so much later, as after an evaluation."""
        while seconds > 0:
            slower = self._slower if self._left_s > 0 else 1.0
            took_s = self._step_s * slower * (1 + self._noise * self._random.uniform(-1, 1)) + more_s
            more_s = 0.0
            self._pass(took_s)
            seconds -= took_s

    def save(self) -> None:
        self.times.began(self._step)
        self._saving, self._left_s = self._step, self._stored_s
        self._owed_s += self._blocked_s

    def _pass(self, took_s: float) -> None:
        self._step += 1
        self._left_s -= took_s
        if self._left_s <= 0:
            self._durable = self._saving
        self._owed_s += took_s
        self._calls += 1
        waited_s, self._owed_s = (self._owed_s, 0.0) if self._calls % self._run_ahead == 0 else (1e-5, self._owed_s)
        self.times.passed(1, waited_s, self._durable)


@pytest.mark.parametrize("run_ahead", [1, 10])
@pytest.mark.parametrize("step_s", [0.02, 0.5])
@pytest.mark.parametrize(("blocked_s", "stored_s", "slower"), [(0.5, 20.0, 1.0), (0.0, 30.0, 1.25), (2.0, 60.0, 1.1)])
def test_a_save_is_measured(step_s: float, blocked_s: float, stored_s: float, slower: float, run_ahead: int) -> None:
    loop = Loop(step_s, blocked_s=blocked_s, stored_s=stored_s, slower=slower, noise=0.05, run_ahead=run_ahead)
    for _ in range(5):
        loop.train(120.0)
        loop.save()
    loop.train(120.0)
    assert loop.times.cost_s == pytest.approx(loop.cost_s, abs=0.15 * loop.cost_s + 0.1 + run_ahead * step_s)


def test_evaluations_and_compilation_are_no_cost_of_a_save() -> None:
    loop = Loop(0.1, blocked_s=0.5, stored_s=20.0, slower=1.1)
    loop.train(60.0, more_s=40.0)  # it compiles
    for number in range(9):
        loop.train(110.0)
        loop.train(10.0, more_s=30.0)
        loop.save()
        loop.train(60.0, more_s=30.0 if number % 3 == 1 else 0.0)
    assert loop.times.cost_s == pytest.approx(loop.cost_s, rel=0.15)


def test_nothing_is_said_of_what_can_not_be_told() -> None:
    times = SaveTimes()
    times.began(0)  # at the first call, with nothing to compare it to
    times.passed(1, 5.0, 0)
    assert times.cost_s is None
    loop = Loop(0.1, blocked_s=0.0, stored_s=1e9, slower=3.0)
    loop.train(60.0)
    loop.save()
    loop.train(7200.0)
    assert loop.times.cost_s is None, "storage is out of reach"
    loop.times.began(10**6)
    loop.times.forget()  # a restore
    loop.times.passed(1, 500.0, 10**6)
    assert loop.times.cost_s is None


# ---------------------------------------------------------------- what is decided


def decided(settings: Settings, words: Sequence[TrainerWord], *, hours: float) -> tuple[Context, Interval]:
    context = Context(settings)
    interval = Interval(context)
    for minute in range(round(60 * hours)):
        context.now_s = 60.0 * minute
        interval.measured(words, words, minute)
    return context, interval


def said(context: Context) -> list[str]:
    return [one.text for one in context.out if isinstance(one, Log) and one.level == "info"]


def test_before_a_save_was_measured_the_interval_is_a_number() -> None:
    context, interval = decided(SETTINGS, [WORD], hours=2)
    assert (interval.durable.every_s, said(context)) == (300.0, [])
    _, interval = decided(SETTINGS, [WORD, replace(WORD, rank=1, save_s=2.0)], hours=2)
    assert interval.durable.every_s == 300.0, "one rank has not measured it"


def test_the_rank_that_pays_most_counts_and_the_line_has_the_numbers() -> None:
    words = [replace(WORD, save_s=0.1), replace(WORD, rank=1, save_s=5.0)]
    context, interval = decided(SETTINGS, words, hours=1 / 60)
    assert interval.durable.every_s == pytest.approx(optimum_s(5.0, DAY_S), rel=0.01)
    (line,) = said(context)
    assert line == (
        "a durable save every 926 s from now: it costs 5.0 s, 0.5% of the training, "
        "and memory is expected to be lost every 24.0 h (0 times in 0.0 h)"
    )


def test_little_changes_change_nothing_and_large_ones_are_said_once() -> None:
    context, interval = decided(SETTINGS, [replace(WORD, save_s=5.0)], hours=1 / 60)
    before_s = interval.durable.every_s
    for number in range(100):
        context.now_s += 1.0
        words = [replace(WORD, save_s=5.0 * (1.2 if number % 2 else 0.8))]
        interval.measured(words, words, number)
    assert interval.durable.every_s == before_s
    words = [replace(WORD, save_s=0.5)]
    for _ in range(3):
        context.now_s += 100.0
        interval.measured(words, words, 0)
    assert before_s / STAYS > interval.durable.every_s > before_s / 4
    assert len(said(context)) == 2


def test_save_overhead_holds_both_tiers_together() -> None:
    words = [replace(WORD, step_s=0.1, snapshot_s=0.05, save_s=60.0)]
    _, interval = decided(SETTINGS, words, hours=1)
    saves = 60.0 / (interval.durable.every_s + 60.0)
    snapshots = 0.05 / (interval.steps * 0.1 + 0.05)
    assert saves == pytest.approx(SHARE) and interval.durable.share == pytest.approx(saves)
    assert 0.9 * SHARE < snapshots <= SHARE
    # A number that the user gives is the user's: the other tier has all of it.
    _, interval = decided(replace(SETTINGS, snapshot_every_steps=1), words, hours=1)
    assert 60.0 / (interval.durable.every_s + 60.0) == pytest.approx(2 * SHARE)
    _, interval = decided(replace(SETTINGS, save_measured=False, save_every_s=60.0), words, hours=1)
    assert SHARE < 0.05 / (interval.steps * 0.1 + 0.05) <= 2 * SHARE


def test_losses_shorten_it_and_quiet_lengthens_it() -> None:
    context, interval = decided(SETTINGS, words := [replace(WORD, save_s=1.0)], hours=1)
    calm_s = interval.durable.every_s
    for _ in range(10):
        interval.durable.lost_memory()
    context.now_s += 10
    interval.measured(words, words, 0)
    assert interval.durable.every_s == pytest.approx(optimum_s(1.0, between_losses_s(10, HOUR_S)), rel=0.05)
    assert interval.durable.every_s < calm_s / 2
    _, interval = decided(SETTINGS, words, hours=100)
    assert interval.durable.every_s > 2 * calm_s


def test_the_time_of_a_restart_is_none_of_training() -> None:
    context, interval = decided(SETTINGS, words := [WORD], hours=1)
    trained_s = interval.durable.trained_s
    assert trained_s == 59 * 60.0
    interval.begin()
    context.now_s += 1000.0
    interval.measured(words, words, 0)
    assert interval.durable.trained_s == trained_s


# ---------------------------------------------------------------- in the Coordinator


def test_saves_come_as_often_as_was_decided() -> None:
    driver = training(save_measured=True, save_every_s=300.0)
    driver.stage(10)
    driver.tick(290.0)
    assert driver.advice().proposal is None
    driver.tick(20.0)
    first = driver.proposal
    assert (first.kind, first.state) == ("save", "proposed")
    driver.say(first.step - 1, ack_id=first.id, ack_ok=True, ack_step=first.step - 1)
    driver.auto = False
    driver.stage(first.step, promised=True)
    driver.say(first.step, save_s=0.0)
    assert driver.core.snapshots.interval.durable.every_s == LEAST_SAVE_EVERY_S
    driver.stage(20)
    driver.tick(2 * LEAST_SAVE_EVERY_S)
    assert driver.advice().proposal is None, "the one before is under way"
    driver.auto = True
    driver.send(Appended(seq=driver.commit().seq, outcome="ok"))
    driver.stage(30)
    driver.tick()
    assert driver.proposal.step > 30


def test_a_restore_from_storage_is_a_loss_of_memory() -> None:
    driver = training(save_measured=True, save_every_s=300.0)
    durable = driver.core.snapshots.interval.durable
    driver.stage(11, promised=True)
    driver.stage(12)
    driver.tick(5.0)
    driver.stage(13)
    driver.all_die()
    driver.join(AB, group="h")
    assert driver.restore().step == 13
    assert durable.losses == 0, "from memory"
    driver.stage(14)
    driver.staged = {host: [one for one in staged if one.step > 11] for host, staged in driver.staged.items()}
    driver.report_both()
    assert driver.restore(step=11, rollback=True).tier == "storage"
    assert durable.losses == 0, "as it was asked for"
    driver.stage(15)
    driver.all_die()
    driver.staged.clear()
    driver.join(AB, group="i")
    assert driver.restore().tier == "storage"
    assert durable.losses == 1
