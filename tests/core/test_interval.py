"""How often snapshots are taken where `snapshot_every_steps` is None: by what they cost the steps, measured."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.interval import Interval
from raystate.core.formats.commands import Log
from raystate.core.formats.reports import HostWord
from raystate.core.formats.settings import Settings
from raystate.core.trainer.machine import Trainer
from raystate.waits import SAID_AGAIN_S

SHARE = 0.03


class Loop:
    """Ranks that train in step, with a clock of their own. A snapshot costs `blocked_s` in save() and slows the steps beside its copy."""

    def __init__(self, ranks: int = 1, *, run_ahead: int = 0, seed: int = 0, stride: int = 1, first: int = 1):
        settings = Settings(run="r", storage="s", snapshot_every_steps=None, save_overhead=SHARE)
        self.context = Context(settings)
        self.interval = Interval(self.context)
        self.ranks = [Trainer(rank, ranks, "1.1.x", snapshot_every=None, slots=3) for rank in range(ranks)]
        for rank in self.ranks:
            rank.begin("1.1.x", None)
        self.now_s = 0.0
        self.step = first - stride  # save() is called at every so many steps
        self._stride = stride
        self.snapshots = self.measured = 0
        self._grants = [1, 1, 1]
        self._queued: list[float] = []
        self._run_ahead = run_ahead
        self._random = Random(seed)

    def train(self, calls: int, step_s: float, cost_s: float, *, noise: float = 0.0) -> float:
        """The seconds that they took."""
        began_s = self.now_s
        for _ in range(calls):
            self.step += self._stride
            word = HostWord(grants=tuple(self._grants), interval=self.interval.advised)
            taken = set[bool]()
            waits = [rank.times.waits(rank.due_in(word)) for rank in self.ranks]
            self.measured += sum(waits)
            if any(waits):
                self._wait()
            for rank, waited in zip(self.ranks, waits, strict=True):
                rank.times.called(self.step, self.now_s, waited=waited, copying=False)
                decision = rank.on_save(self.step, host_word=word)
                taken.add(decision.action == "stage")
                if decision.action == "stage":
                    assert decision.slot is not None
                    rank.times.snapshotted()
                    rank.staged(decision.slot, self.step)
            (snapshot,) = taken  # all ranks agree
            if snapshot:
                self.snapshots += 1
                self._grants = [grant + 1 for grant in self._grants]
            seconds = self._stride * step_s * (1 + noise * self._random.uniform(-1, 1)) + (cost_s if snapshot else 0.0)
            self._pass(seconds)
            self.context.now_s = self.now_s
            words = [rank.word() for rank in self.ranks]
            self.interval.measured(words, words, self.step)
        return self.now_s - began_s

    def said(self) -> list[str]:
        return [one.text for one in self.context.out if isinstance(one, Log) and one.level == "info"]

    def _pass(self, seconds: float) -> None:
        """Where the loop runs ahead of its devices it waits for all of its queue at once."""
        self._queued.append(seconds)
        self.now_s += 1e-5
        if len(self._queued) > self._run_ahead:
            self._wait()

    def _wait(self) -> None:
        self.now_s += sum(self._queued)
        self._queued.clear()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("step_s", "cost_s"), [*itertools.product((0.01, 0.1, 1.0), (0.001, 0.01, 0.1))])
def test_snapshots_cost_no_more_than_their_share(step_s: float, cost_s: float, ranks: int) -> None:
    loop = Loop(ranks)
    loop.train(60, step_s, cost_s)  # in which it is measured
    took_s = loop.train(2000, step_s, cost_s)
    lost = took_s / (2000 * step_s) - 1
    assert lost <= 1.2 * SHARE
    # And they are as frequent as that allows.
    assert loop.interval.every == 1 or lost >= 0.6 * SHARE
    assert loop.snapshots >= 4


@pytest.mark.parametrize(("share", "spread_s"), [(0.02, 0.0), (0.03, 0.0), (0.06, 0.8 * 0.5 * 2), (0.5, 4.0)])
def test_copies_that_slow_the_steps_are_spread_over_the_time_to_the_next(share: float, spread_s: float) -> None:
    """And stay so, although they slow them less then."""
    loop = Loop()
    loop.train(120, 0.5, share * 0.5)
    rank, word = loop.ranks[0], HostWord(grants=(1, 1, 1), interval=loop.interval.advised)
    assert rank.copy_spread_s(word) == pytest.approx(spread_s, rel=1e-3)
    loop.train(2000, 0.5, 0.001)
    assert bool(rank.copy_spread_s(word)) == bool(spread_s)


def test_a_copy_is_not_spread_before_it_is_known_to_slow_the_steps() -> None:
    loop = Loop()
    assert loop.ranks[0].copy_spread_s(None) == 0.0
    loop.train(3, 0.5, 0.4)
    assert loop.ranks[0].copy_spread_s(None) == 0.0


@pytest.mark.parametrize(("stride", "first"), [(2, 2), (10, 10), (10, 9), (100, 99), (1000, 999), (1000, 1000)])
@pytest.mark.parametrize("cost_s", [0.001, 0.1, 10.0])
def test_a_loop_that_calls_at_its_own_cadence_is_measured(stride: int, first: int, cost_s: float) -> None:
    """None of its steps may be a multiple of anything, nor all of them be left out."""
    loop = Loop(stride=stride, first=first)
    loop.train(100, 0.01, cost_s)
    assert loop.ranks[0].times.snapshot_s == pytest.approx(cost_s, rel=0.01)
    loop.train(100, 0.01, cost_s)
    before, loop.measured = loop.snapshots, 0
    loop.train(1000, 0.01, cost_s)
    expected = 1000 * stride / max(loop.interval.every, stride)
    assert 0.6 * expected - 1 <= loop.snapshots - before <= expected + 1
    assert loop.measured < 200  # most calls wait for nothing


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_loop_that_saves_a_step_twice_is_measured(every: int) -> None:
    """As one that evaluates and saves the step again with its metrics. A save that was refused does no harm."""
    loop = Loop()
    loop.ranks[0].times.called(10**6, loop.now_s, waited=True, copying=False)
    for _ in range(600):
        loop.train(1, 0.05, 0.02)
        if loop.step % every == 0:
            loop.ranks[0].times.called(loop.step, loop.now_s, waited=True, copying=False)
    assert loop.ranks[0].times.snapshot_s == pytest.approx(0.02, rel=0.01)
    loop.measured = 0
    loop.train(100, 0.05, 0.02)
    assert loop.measured < 50, "most calls wait for nothing"


def test_the_time_of_a_restore_is_no_step() -> None:
    trainer = Trainer(0, 1, "1.1.x", snapshot_every=None)
    for step, now_s in ((1, 0.0), (2, 0.05)):
        trainer.times.called(step, now_s, waited=True, copying=False)
    trainer.begin("1.2.y", None)
    trainer.times.called(3, 1000.0, waited=True, copying=False)
    assert trainer.word().step_s == 0.05


@pytest.mark.parametrize("stride", [1, 7, 100, 1000])
def test_ranks_that_skip_other_steps_come_to_have_one_in_common(stride: int) -> None:
    """A copy takes as long as three calls: a rank that has begun one skips those of the next two."""
    settings = Settings(run="r", storage="s", snapshot_every_steps=None)
    interval = Interval(Context(settings))
    ranks = [Trainer(rank, 2, "1.1.x", snapshot_every=None) for rank in range(2)]
    busy, common, word = [0, 1], 0, HostWord()
    for rank in ranks:
        rank.begin("1.1.x", None)
    for call in range(1, 100):
        step, taken = call * stride, list[bool]()
        word = HostWord(grants=(call + 1,) * 3, interval=interval.advised)
        for index, rank in enumerate(ranks):
            rank.times.called(step, call * 1.0, waited=False, copying=False)
            decision = rank.on_save(step, host_word=word, stager_busy=busy[index] > 0)
            if decision.action == "stage":
                assert decision.slot is not None
                rank.staged(decision.slot, step)
            busy[index] = 3 if decision.action == "stage" else busy[index] - 1
            if decision.action != "none":
                taken.append(decision.action == "stage")
        if taken and all(taken):
            common += 1
            interval.stable(step)
        elif taken:
            interval.skipped(step, step, ranks[0].word().stride, "a rank skipped it")
    assert common >= 8


@pytest.mark.parametrize("seed", range(20))
def test_measures_that_waver(seed: int) -> None:
    loop = Loop(seed=seed)
    loop.train(200, 0.05, 0.02, noise=0.1)
    took_s = loop.train(4000, 0.05, 0.02, noise=0.1)
    assert 0.3 * SHARE <= took_s / (4000 * 0.05) - 1 <= 2 * SHARE


@pytest.mark.parametrize("run_ahead", [3, 10, 100])
def test_a_loop_that_runs_ahead_of_its_devices(run_ahead: int) -> None:
    loop = Loop(run_ahead=run_ahead)
    loop.train(400, 0.05, 0.02)
    took_s = loop.train(4000, 0.05, 0.02)
    assert took_s / (4000 * 0.05) - 1 <= 2 * SHARE


def test_another_step_time_is_followed_within_fifty_steps() -> None:
    loop = Loop()
    loop.train(400, 0.01, 0.1)
    assert loop.interval.every == 324
    loop.train(50, 1.0, 0.1)
    assert loop.interval.every == 4
    loop.train(50, 0.1, 0.1)
    assert loop.interval.every == 33


def test_a_first_measure_that_was_wrong_is_made_good() -> None:
    loop = Loop()
    loop.train(40, 0.05, 0.5)
    assert loop.interval.every == 324
    loop.train(13 * 324, 0.05, 0.001)
    assert loop.interval.every == 1


@pytest.mark.parametrize("cost_s", [0.001, 0.05])
def test_long_and_short_steps_that_alternate(cost_s: float) -> None:
    """At worst a snapshot counts as a long step, and never as one beside short steps alone."""
    loop = Loop()
    for number in range(1000):
        loop.train(1, (0.01, 1.0)[number % 2], cost_s)
        assert loop.interval.every <= 1.05 / SHARE / 0.5


def test_one_compilation_or_evaluation_changes_little() -> None:
    loop = Loop()
    loop.train(1, 20.0, 0.01)
    loop.train(100, 0.1, 0.01)
    before = loop.interval.every
    loop.train(1, 60.0, 0.01)
    for _ in range(100):
        loop.train(1, 0.1, 0.01)
        assert before / 1.5 <= loop.interval.every <= before * 1.5


def test_each_length_is_said_with_its_numbers_and_once_a_minute_at_most() -> None:
    loop = Loop()
    loop.train(400, 0.1, 0.02)
    first = "a snapshot every 7 steps from now: it costs 20 ms, 2.8% of the training, whose steps take 100 ms"
    assert loop.said() == [first]
    loop.train(5000, 0.1, 0.02, noise=0.2)
    calm = loop.said()
    loop.train(2000, 0.1, 0.06)
    lines = loop.said()
    assert lines[-1].startswith(f"a snapshot every {loop.interval.every} steps from now: it costs 60 ms")
    assert len(calm) <= 4 and len(lines) - len(calm) <= 4, "measures waver, and the interval stays"


def test_a_length_that_came_within_the_minute_is_said_when_that_is_over() -> None:
    loop = Loop()
    loop.train(100, 0.1, 0.02)
    assert loop.said() and loop.now_s < SAID_AGAIN_S
    loop.train(60, 0.5, 0.02)
    assert loop.interval.every == 2 and len(loop.said()) == 1 and loop.now_s < SAID_AGAIN_S
    loop.train(100, 0.5, 0.02)
    (line,) = loop.said()[1:]
    assert line.startswith("a snapshot every 2 steps from now: it costs 20 ms, ")


def test_how_long_a_step_takes_is_of_late() -> None:
    """While a rank was slow each step took 360 ms. Ten seconds later no line says that they still do."""
    loop = Loop()
    for step_s in (0.16, 0.36, 0.16, 0.2, 0.16):
        loop.train(300, step_s, 0.005)
        measure = loop.interval.measure([rank.word() for rank in loop.ranks])
        assert measure is not None and measure.step_s == pytest.approx(step_s, rel=0.01)
    loop.train(165, 0.36, 0.005)
    loop.train(60, 0.16, 0.005)
    measure = loop.interval.measure([rank.word() for rank in loop.ranks])
    assert measure is not None and measure.step_s == pytest.approx(0.16, rel=0.01)


def test_a_number_fixes_it() -> None:
    settings = Settings(run="r", storage="s", snapshot_every_steps=5)
    interval = Interval(Context(settings))
    trainer = Trainer(0, 1, "1.1.x", snapshot_every=5)
    for step in range(100):
        trainer.times.called(step, step * 1.0, waited=True, copying=False)
        if step % 2:
            trainer.times.snapshotted()
    assert trainer.word().snapshot_s is not None
    interval.measured([trainer.word()], [trainer.word()], 100)
    assert (interval.steps, interval.advised) == (5, 1)


def test_a_loop_that_saves_at_its_own_cadence() -> None:
    """The first save() at or after each multiple of the interval."""
    trainer = Trainer(0, 1, "1.1.x", snapshot_every=None)
    trainer.begin("1.1.x", None)
    taken = [
        step
        for number, step in enumerate(range(100, 2000, 100))
        if trainer.on_save(step, host_word=HostWord(grants=(number + 1,) * 3, interval=250)).action == "stage"
    ]
    assert taken == [100, 300, 500]
