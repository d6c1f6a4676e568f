"""Where a run's time went: made-up ledgers, and any ledger at all."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystate.observe.goodput import CAUSES, Goodput, goodput, over_time
from raystate.observe.ledger.lines import (
    AttemptBegan,
    GroupEnded,
    GroupJoined,
    GroupRestored,
    Line,
    LoggedRecovery,
    Noted,
    RunLeft,
    Sampled,
)
from raystate.observe.timeline import Timeline, sampled_every_s, timeline_of


class History:
    """A run, told as its Coordinators would: the time of each line is given, and what the ranks spend adds up."""

    def __init__(self) -> None:
        self.lines: list[Noted] = []
        self._attempt = self._n = 0
        self._group = ""
        self._spent: dict[str, float] = {}
        self._steps = 0
        self._joined_s = 0.0

    def note(self, t: float, what: Line) -> None:
        self._n += 1
        self.lines.append(Noted(self._attempt, self._n, t, what))

    def attempt(self, t: float) -> None:
        self._attempt, self._n = self._attempt + 1, 0
        self.note(t, AttemptBegan(reason="the run starts"))

    def join(self, t: float, group: str, **ages: float) -> None:
        self._group, self._spent, self._steps, self._joined_s = group, {}, 0, t
        self.note(t, GroupJoined(group=group, world=2, ages=ages))

    def restore(self, t: float, step: int) -> None:
        self.note(t, GroupRestored(group=self._group, step=step, tier="memory"))

    def sample(self, t: float, step: int, more_steps: int = 0, **more: float) -> None:
        self._steps += more_steps
        for cause, seconds in more.items():
            name = cause.replace("__", ":")
            self._spent[name] = self._spent.get(name, 0.0) + seconds
        sample = Sampled(group=self._group, step=step, steps=self._steps, lived=t - self._joined_s, spent=dict(self._spent))
        self.note(t, sample)

    def step_each_second(self, t: float, first: int, last: int) -> None:
        """Steps of a second each, the first of which begins at `t`, with a sample of each."""
        for number, step in enumerate(range(first, last + 1), 1):
            self.sample(t + number, step, 1)

    def end(self, t: float, how: str = "died") -> None:
        self.note(t, GroupEnded(group=self._group, how=how, cause="the process of rank 1 died"))

    def leave(self, t: float) -> None:
        self.note(t, RunLeft(reason="all ranks have closed"))

    @property
    def goodput(self) -> Goodput:
        found = goodput(timeline_of(self.lines))
        check(found)
        return found


def check(found: Goodput) -> None:
    """Properties that always hold."""
    assert set(found.seconds_by_cause) == set(CAUSES)
    assert math.isclose(sum(found.seconds_by_cause.values()), found.wall_s, rel_tol=1e-9, abs_tol=1e-6)
    assert all(seconds >= -1e-6 for seconds in found.seconds_by_cause.values()), found.seconds_by_cause
    assert math.isclose(sum(found.waiting.values()), found.seconds_by_cause["waiting"], rel_tol=1e-9, abs_tol=1e-6)
    assert 0.0 <= found.ratio <= 1.0 and found.steps >= found.repeated >= 0.0
    if found.step_s is not None:
        assert math.isclose(found.needed * found.step_s, found.seconds_by_cause["steps"], rel_tol=1e-9)


def check_windows(whole: Timeline, windows: int) -> None:
    """Over time there is for each cause what there is in all."""
    parts, found = over_time(whole, windows), goodput(whole)
    for cause, seconds in found.seconds_by_cause.items():
        assert sum(one.seconds_by_cause[cause] for one in parts) == pytest.approx(seconds, rel=1e-6, abs=1e-3), cause
    assert sum(one.steps for one in parts) == pytest.approx(found.steps, rel=1e-6, abs=1e-3)


def told(found: Goodput) -> Mapping[str, object]:
    """The causes of which there are any seconds."""
    return {cause: pytest.approx(seconds, abs=1e-6) for cause, seconds in found.seconds_by_cause.items() if seconds > 1e-6}


def trained() -> History:
    """Steps of 0.5 s, without any trouble, up to step 40 at 30 s: the first one ends at 10.5 s, and compiled for 3 s."""
    run = History()
    run.attempt(1.0)
    run.join(6.0, "g1", asked=5.5, placed=4.0, process=3.0, function=1.0, manager=0.5)
    run.restore(6.5, 0)
    run.sample(10.5, 1, 1, restore=0.5, compilation=3.0)
    for number in range(1, 40):
        run.sample(10.5 + number / 2, number + 1, 1)
    return run


def test_each_second_of_a_calm_run_has_its_cause() -> None:
    run = trained()
    run.sample(30.5, 40, saves=0.5)
    run.leave(30.5)
    found = run.goodput
    # Asked for at 0.5 s, before the Coordinator was there; placed at 2 s; joined at 6 s.
    assert (found.begin_s, found.end_s) == (0.5, 30.5)
    assert told(found) == {"hosts": 1.5, "start": 4.5, "restore": 0.5, "compilation": 3.0, "steps": 20.0, "saves": 0.5}
    assert (found.steps, found.repeated, found.step_s) == (40, 0, 0.5)
    assert found.ratio == pytest.approx(20 / 30)


def test_a_launcher_that_asks_for_its_group_some_seconds_after_its_coordinator_began_has_not_stopped() -> None:
    run = History()
    run.attempt(0.0)
    run.join(10.0, "g1", asked=5.0, placed=4.0)
    run.restore(10.0, -1)
    run.sample(11.0, 1, 1)
    run.end(11.0)
    run.join(18.0, "g2", asked=3.0, placed=3.0)  # it had gone on: no Coordinator has claimed the run since
    run.restore(18.0, 1)
    run.sample(19.0, 2, 1)
    run.leave(19.0)
    assert told(run.goodput)["start"] == 5.0 + 5.0 + 3.0 + 1.0  # with the first steps: nothing says how long one takes
    assert told(run.goodput)["stopped"] == 4.0


def test_a_run_begins_as_its_launcher_is_called_whatever_age_a_process_of_its_ray_has() -> None:
    run = History()
    run.attempt(7.0)
    run.join(10.0, "g1", called=10.0, asked=5.0, placed=4.0, process=60.0)
    run.restore(10.0, -1)
    run.step_each_second(10.0, 1, 10)
    run.leave(20.0)
    assert run.goodput.begin_s == 0.0
    assert told(run.goodput) == {"start": 9.0, "hosts": 1.0, "steps": 10.0}


@pytest.mark.parametrize(("called_s", "stopped_s"), [(36.5, 0.0), (5.0, 2.0)])
def test_the_time_until_a_launcher_asks_again_is_part_of_the_next_start_if_it_lived_on(called_s: float, stopped_s: float) -> None:
    """`fit` had been called before the group ended; or the group was its last, and another `fit` came 2 s later."""
    run = trained()
    run.end(30.0)
    run.join(37.0, "g2", called=called_s, asked=3.0, placed=2.0)
    run.leave(37.0)
    assert told(run.goodput) == {
        "hosts": 1.5 + 1.0, "start": 4.5 + 6.0 - stopped_s, "restore": 0.5, "compilation": 3.0, "steps": 20.0,
    } | ({"stopped": stopped_s} if stopped_s else {})  # fmt: skip


def test_a_fit_that_goes_on_knows_no_more_of_a_group_that_vanished() -> None:
    run = trained()
    run.join(50.0, "g2", called=49.0, asked=3.0, placed=3.0)
    run.leave(50.0)
    found = run.goodput.seconds_by_cause
    assert (found["unknown"], found["stopped"]) == (pytest.approx(sampled_every_s(24.0)), 0.0)


def test_a_coordinator_that_began_while_the_group_trained_says_nothing_of_the_fit_after_it() -> None:
    run = trained()
    run.attempt(20.0)
    run.sample(30.0, 50, 30)
    run.join(50.0, "g2", called=10.0, asked=3.0, placed=3.0)
    run.leave(50.0)
    unknown_s = sampled_every_s(24.0)
    assert run.goodput.seconds_by_cause["stopped"] == pytest.approx(10.0 - unknown_s)


def test_a_driver_that_dies_before_the_first_durable_step_and_a_cluster_that_is_down() -> None:
    """It was 100.0 % of 7.0 s: what was before the first durable step, and between two attempts, had not been counted."""
    run = History()
    run.attempt(0.0)
    run.join(3.0, "g1", process=3.0)
    run.restore(3.0, -1)
    run.step_each_second(3.0, 1, 8)
    run.end(11.0)
    run.attempt(31.0)  # 20 s of nothing
    run.join(33.0, "g2", process=2.0)
    run.restore(33.0, 0)
    run.step_each_second(33.0, 1, 7)
    run.leave(40.0)
    found = run.goodput
    assert told(found) == {"start": 5.0, "stopped": 20.0, "steps": 8.0, "repeated": 7.0}
    assert found.ratio == pytest.approx(8 / 40) and found.repeated == 7


def test_a_cluster_that_vanishes_without_a_word_leaves_no_more_unknown_than_its_next_sample() -> None:
    run = History()
    run.attempt(0.0)
    run.join(0.0, "g1")
    run.restore(0.0, -1)
    run.step_each_second(0.0, 1, 100)
    run.attempt(200.0)
    run.join(205.0, "g2", process=5.0)
    run.restore(205.0, 90)
    run.step_each_second(205.0, 91, 110)
    run.leave(225.0)
    found = run.goodput
    assert sampled_every_s(100.0) == 5.0
    assert told(found) == {"steps": 110.0, "repeated": 10.0, "unknown": 5.0, "stopped": 95.0, "start": 5.0}


def test_steps_that_nobody_has_told_of_and_a_restore_proves_are_steps() -> None:
    run = History()
    run.attempt(0.0)
    run.join(0.0, "g1")
    run.restore(0.0, -1)
    run.step_each_second(0.0, 1, 100)
    run.attempt(200.0)
    run.join(200.0, "g2")
    run.restore(200.0, 103)
    run.sample(201.0, 104, 1)
    run.leave(201.0)
    assert told(run.goodput) == {"steps": 104.0, "unknown": 2.0, "stopped": 95.0}


def test_a_kill_costs_the_steps_that_are_repeated_and_the_start_of_the_next_group() -> None:
    run = trained()  # up to step 40 at 30 s
    run.end(30.25)  # in the middle of a step
    run.join(34.25, "g2", asked=3.5, placed=3.5, process=3.0)
    run.restore(34.25, 38)
    run.sample(35.75, 39, 1, restore=0.5, compilation=0.5)
    for number in range(1, 12):
        run.sample(35.75 + number / 2, 39 + number, 1)
    run.leave(41.25)
    found = run.goodput
    assert told(found) == {
        "hosts": 1.5, "start": 4.5 + 3.5, "restore": 1.0, "compilation": 3.5, "steps": 25.0, "repeated": 1.0, "slower": 0.25,
        "stopped": 0.5,
    }  # fmt: skip
    assert (found.steps, found.repeated) == (52, 2)


def test_a_launcher_starts_the_coordinator_before_it_asks_for_a_group() -> None:
    run = trained()
    run.attempt(20.0)  # in the midst of the training: it says nothing of a start
    run.end(31.0)
    run.attempt(100.0)
    run.join(130.0, "g2", asked=20.0, placed=15.0)
    run.leave(130.0)
    found = run.goodput.seconds_by_cause
    assert (found["stopped"], found["start"], found["hosts"]) == (69.0, pytest.approx(29.5), pytest.approx(6.5))


def test_a_preemption_that_waits_for_a_host() -> None:
    run = trained()
    run.end(30.0, "interrupted")
    run.join(100.0, "g2", asked=70.0, placed=5.0, process=4.0)
    run.restore(100.0, 40)
    run.sample(100.5, 41, 1)
    run.leave(100.5)
    assert told(run.goodput) == {
        "hosts": 1.5 + 65.0, "start": 4.5 + 5.0, "restore": 0.5, "compilation": 3.0, "steps": 20.5,
    }  # fmt: skip


def test_slow_saves_sections_and_steps() -> None:
    run = trained()
    step, now_s = 40, 30.0
    for _ in range(10):  # of each 2 s: half a second of the step, 0.25 s of a save, 1 s for data, 0.25 s that nothing explains
        step, now_s = step + 1, now_s + 2.0
        run.sample(now_s, step, 1, saves=0.25, section__data=0.75, section__data__shuffle=0.25)
    run.leave(now_s)
    found = run.goodput
    assert told(found) == {
        "hosts": 1.5, "start": 4.5, "restore": 0.5, "compilation": 3.0, "steps": 25.0, "saves": 2.5, "waiting": 10.0, "slower": 2.5,
    }  # fmt: skip
    assert found.waiting == {"data": pytest.approx(7.5), "data:shuffle": pytest.approx(2.5)}


def test_a_save_that_stood_still_is_told_of_at_its_end() -> None:
    run = trained()
    run.sample(31.0, 41, 1)  # the save begins at half of this second
    for number in range(5):
        run.sample(32.0 + number, 41)
    run.sample(37.0, 42, 1, saves=5.5, section__data=0.25)
    for number in range(5):
        run.sample(38.0 + number, 43 + number, 1, section__data=0.5)
    run.leave(42.0)
    found = run.goodput
    assert told(found) == {
        "hosts": 1.5, "start": 4.5, "restore": 0.5, "compilation": 3.0, "steps": 23.5, "saves": 5.5, "waiting": 2.75, "slower": 0.25,
    }  # fmt: skip
    assert found.waiting == {"data": pytest.approx(2.75)}


def test_steps_of_a_time_that_is_wholly_explained_are_steps() -> None:
    run = trained()
    run.sample(31.0, 42, 2)
    run.sample(32.0, 42)
    run.sample(33.0, 43, 1, saves=3.0)  # more than the two seconds since the newest step
    for number in range(10):
        run.sample(33.6 + 0.6 * number, 44 + number, 1)  # the steps before them were as much shorter
    run.leave(39.0)
    found = run.goodput
    assert (found.steps, found.seconds_by_cause["saves"]) == (53, 3.0)
    assert found.seconds_by_cause["steps"] == pytest.approx(26.0) and found.seconds_by_cause["slower"] == pytest.approx(0.0)


def test_a_hang_is_no_slow_step() -> None:
    run = trained()
    run.sample(40.0, 40, section__hang=4.0)  # a name that a user may give
    run.sample(50.0, 40, saves=1.0)
    run.end(90.0, "hung")
    found = run.goodput
    assert found.waiting == {"hang": pytest.approx(59.0)}
    assert (found.seconds_by_cause["slower"], found.seconds_by_cause["saves"]) == (0.0, 1.0)


def test_a_rolled_back_step_is_repeated_in_the_same_group() -> None:
    run = trained()
    run.restore(30.0, 20)
    for number in range(1, 31):
        run.sample(30.0 + number / 2, 20 + number, 1)
    assert (run.goodput.repeated, run.goodput.seconds_by_cause["repeated"]) == (20, pytest.approx(10.0))


def test_a_coordinator_that_dies_alone_costs_nothing() -> None:
    run = trained()
    run.attempt(40.0)  # the trainers went on
    run.sample(50.0, 80, 40)
    run.leave(50.0)
    assert run.goodput.seconds_by_cause["steps"] == pytest.approx(40.0) and run.goodput.seconds_by_cause["unknown"] == 0


def test_what_the_trainers_measure_says_how_long_a_step_takes() -> None:
    """With a slow rank from the first step on, the median of what was seen would be the slow step."""
    run = trained()
    run.lines = [line._replace(what=_measured(line.what, 0.4)) for line in run.lines]
    found = run.goodput
    assert found.step_s == pytest.approx(0.4)
    assert found.seconds_by_cause["steps"] == pytest.approx(16.0) and found.seconds_by_cause["slower"] == pytest.approx(3.9)


def test_slow_steps_that_fill_most_of_the_time_are_no_undisturbed_ones() -> None:
    """Samples come by the clock: of 40 s at 0.1 s a step and 60 s at 0.4 s, most samples are of slow steps, and most steps are not slow."""
    run, step = History(), 0
    run.attempt(0.0)
    run.join(0.0, "a")
    run.sample(1.0, 0, 1)
    for t in range(2, 102, 2):
        more = 20 if t <= 40 else 5
        step += more
        run.sample(float(t), step, more)
    measured = [
        one._replace(what=_measured(one.what, 0.1 if one.t <= 40 else 0.4)) if isinstance(one.what, Sampled) else one
        for one in run.lines
    ]
    for lines in (run.lines, measured):
        found = goodput(timeline_of(lines))
        assert found.step_s == pytest.approx(0.1)
        assert found.seconds_by_cause["slower"] == pytest.approx(60 - 150 * 0.1, rel=0.05)


def test_a_measured_step_has_the_sections_in_it_that_lie_between_its_calls() -> None:
    run = History()
    run.attempt(1.0)
    run.join(6.0, "g1", asked=5.0)
    run.restore(6.0, 0)
    run.sample(7.0, 1, 1)
    for number in range(1, 101):  # of each second 0.5 s for data, and 0.1 s by which something slows the step
        run.sample(7.0 + number, number + 1, 1, section__data=0.5)
    run.lines = [line._replace(what=_measured(line.what, 0.9)) for line in run.lines]
    found = run.goodput
    assert found.step_s == pytest.approx(0.4) and found.seconds_by_cause["slower"] == pytest.approx(10.0)


def _measured(what: Line, step_s: float) -> Line:
    if not isinstance(what, Sampled):
        return what
    return replace(what, step_s=step_s)


def test_a_clock_that_goes_back_or_ahead() -> None:
    run = trained()
    run.attempt(-3600.0)  # on a host whose clock is an hour late
    run.sample(-3590.0, 60, 20)
    run.end(-3580.0)
    run.attempt(100.0)
    run.join(110.0, "g2", process=10.0)
    run.leave(120.0)
    found = run.goodput
    assert found.wall_s == pytest.approx(119.5)


def test_an_attempt_that_slept_and_wakes_does_not_count_twice() -> None:
    run = trained()
    late = [Noted(1, 10_000, 4000.0, GroupEnded(group="g1", how="died", cause="")), Noted(1, 10_001, 4000.0, RunLeft(reason=""))]
    run.attempt(40.0)
    run.join(45.0, "g2", process=5.0)
    run.sample(55.0, 60, 20)
    run.leave(65.0)
    run.lines += late
    found = run.goodput
    assert found.end_s == 65.0 and found.steps == 60


def test_samples_tell_of_a_group_whose_other_lines_are_lost() -> None:
    run = trained()
    run.lines = [line for line in run.lines if isinstance(line.what, Sampled)]
    found = run.goodput
    assert found.steps == 40 and found.seconds_by_cause["compilation"] == pytest.approx(3.0)
    assert found.begin_s == pytest.approx(6.0), "since its ranks joined, as they tell"


def test_windows_are_parts_of_the_whole() -> None:
    run = trained()
    run.sample(60.0, 40, saves=20.0)
    run.sample(70.0, 60, 20)
    whole = timeline_of(run.lines)
    found = over_time(whole, 7)
    assert sum(one.wall_s for one in found) == pytest.approx(69.5)
    for one in found:
        check(one)
    assert sum(one.seconds_by_cause["saves"] for one in found) == pytest.approx(20.0)
    assert goodput(whole, 12.0, 22.0).seconds_by_cause["steps"] == pytest.approx(10.0)
    late = goodput(whole, 1e9, 2e9)
    assert (late.wall_s, late.ratio) == (0.0, 0.0)
    assert goodput(timeline_of(run.lines, until_s=100.0)).end_s == 100.0


def test_steps_that_a_slow_rank_made_slower_are_so_in_all_and_over_time() -> None:
    """The ranks' measures beside their snapshots were disturbed: no step took so long before the rank was slow."""
    run, step = History(), 0
    run.attempt(0.0)
    run.join(0.0, "a", asked=0.0)
    run.sample(2.0, 0, 1)
    for t in range(4, 104, 2):
        more = 5 if (is_slow := 42 < t <= 62) else 10
        step += more
        run.sample(float(t), step, more, section__data=0.5 if is_slow else 0.0)
    run.lines = [line._replace(what=_measured(line.what, 0.24)) for line in run.lines]
    whole = timeline_of(run.lines)
    found = goodput(whole)
    check(found)
    assert found.step_s == pytest.approx(0.2) and found.seconds_by_cause["slower"] == pytest.approx(5.0)
    assert goodput(whole, 42.0, 62.0).seconds_by_cause["slower"] == pytest.approx(5.0)
    check_windows(whole, 7)


def test_a_step_longer_than_the_time_between_two_samples_is_done_in_all_of_it() -> None:
    run = History()
    run.attempt(0.0)
    run.join(0.0, "a")
    run.restore(0.0, 0)
    run.sample(10.0, 1, 1)
    for number in range(1, 41):  # a step takes 10 s
        run.sample(10.0 + 2.5 * number, 1 + number // 4, 1 if number % 4 == 0 else 0)
    run.restore(110.0, 1)
    for number in range(1, 41):
        run.sample(110.0 + 2.5 * number, 1 + number // 4, 1 if number % 4 == 0 else 0)
    found = run.goodput
    assert told(found) == {"steps": 110.0, "repeated": 100.0}
    half = goodput(timeline_of(run.lines), 15.0, 17.5)
    assert (half.steps, half.seconds_by_cause["steps"]) == (pytest.approx(0.25), pytest.approx(2.5))


def test_a_group_has_made_no_step_since_the_news_of_its_end() -> None:
    """A Coordinator notes that end when the next group joins. The start began with the news: it waited for hosts meanwhile."""
    run = trained()
    run.sample(36.0, 40)
    run.end(36.0, "interrupted")
    run.join(36.0, "g2", called=35.5, asked=5.0, placed=3.0)
    run.restore(36.5, 40)
    run.sample(37.0, 41, 1, restore=0.5)
    recovery = LoggedRecovery(attempt=1, group="g2", cause="", step=40, tier="peer", seconds=6.5, steps_repeated=0)
    run.note(37.0, recovery)
    run.leave(37.0)
    assert told(run.goodput) == {
        "hosts": 1.5 + 2.0, "start": 4.5 + 0.5 + 3.0, "restore": 1.0, "compilation": 3.0, "steps": 20.0 + 0.5, "slower": 0.5,
    }  # fmt: skip
    without = told(goodput(timeline_of([one for one in run.lines if one.what is not recovery])))
    assert without["hosts"] == pytest.approx(1.5 + 2.0), "it was asked for after that end"


def test_nothing_is_known_of_nothing() -> None:
    found = goodput(timeline_of([]))
    check(found)
    assert (found.wall_s, found.ratio, found.step_s) == (0.0, 0.0, None)


# ---------------------------------------------------------------- any ledger

_SECONDS = st.floats(-1e6, 1e9, allow_nan=False)
_STEPS = st.one_of(st.integers(-1, 300), st.integers(-(2**63), 2**63))
_GROUPS = st.sampled_from(["g1", "g2", "g3"])
_SPENT = st.dictionaries(st.sampled_from(["saves", "restore", "compilation", "section:data", "section:x", "else"]), _SECONDS)
_AGES = st.dictionaries(st.sampled_from(["called", "asked", "placed", "process", "function", "manager"]), _SECONDS)
_LINES: st.SearchStrategy[Line] = st.one_of(
    st.builds(AttemptBegan, reason=st.just("")),
    st.builds(GroupJoined, group=_GROUPS, world=st.just(2), ages=_AGES),
    st.builds(GroupRestored, group=_GROUPS, step=_STEPS),
    st.builds(Sampled, group=_GROUPS, step=_STEPS, steps=_STEPS, step_s=_SECONDS, lived=_SECONDS, spent=_SPENT),
    st.builds(GroupEnded, group=_GROUPS, how=st.sampled_from(["died", "hung"]), cause=st.just("")),
    st.builds(
        LoggedRecovery,
        attempt=st.just(1),
        group=_GROUPS,
        cause=st.just(""),
        step=_STEPS,
        tier=st.just(""),
        seconds=_SECONDS,
        steps_repeated=st.just(0),
    ),
    st.builds(RunLeft, reason=st.just("")),
)
_NOTED = st.builds(Noted, st.integers(0, 3), st.integers(0, 40), st.floats(0, 1e9), _LINES)


@given(st.lists(_NOTED, max_size=40), st.floats(0, 1e9), st.floats(0, 1e9))
def test_the_parts_of_any_ledger_sum_up_to_the_whole(lines: list[Noted], begin_s: float, end_s: float) -> None:
    whole = timeline_of(lines)
    found = goodput(whole)
    check_any(found)
    check_any(goodput(whole, begin_s, end_s))
    assert found.wall_s == pytest.approx(sum(one.end_s - one.begin_s for one in whole.stretches))
    check_windows(whole, 7)
    for before, after in zip(whole.stretches, whole.stretches[1:], strict=False):
        assert before.end_s == after.begin_s < after.end_s


def check_any(found: Goodput) -> None:
    """As `check`, for seconds of any size."""
    assert sum(found.seconds_by_cause.values()) == pytest.approx(found.wall_s, rel=1e-9, abs=1e-3)
    assert min(found.seconds_by_cause.values()) >= -1e-3
    assert 0.0 <= found.ratio <= 1.0


@given(st.integers(0, 2**32), st.sets(st.integers(0, 200)))
def test_the_order_of_lines_does_not_matter_and_lost_ones_leave_no_gap(seed: int, lost: set[int]) -> None:
    run = trained()
    run.end(30.25)
    run.attempt(33.0)
    run.join(34.25, "g2", asked=3.5, placed=3.5, process=3.0)
    run.restore(34.25, 38)
    for number in range(1, 12):
        run.sample(35.75 + number / 2, 38 + number, 1, saves=0.1)
    run.leave(41.25)
    whole = run.goodput
    left = [line for number, line in enumerate(run.lines) if number not in lost]
    twice: list[Any] = left + left[: seed % 20]
    random.Random(seed).shuffle(twice)
    found = goodput(timeline_of(twice))
    check(found)
    assert found == goodput(timeline_of(left))
    if not lost:
        assert found == whole
