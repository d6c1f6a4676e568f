"""How many workers an elastic run has, and when it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.messages import (
    StopAsked,
)
from raystate.core.launcher.elastic import FEW_STEPS, GROWN_FOR, MOST_HELD, MOST_PATIENCE, Elastic, Sizes, Wish, room_of
from raystate.waits import ROOM_STAYS_S
from tests.core.driver import Driver, training

EVERY_S = 30.0


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", (0, 2), (3, 2), (1,), (1, 2, 3), (1, "2"), (True, 2), [1, 2], None])
def test_what_is_no_number_of_workers(bad: Any):
    with pytest.raises(ConfigError, match=r"num_workers = .*: must be an int of at least 1, or \(fewest, most\)"):
        Sizes.of(bad)


@pytest.mark.parametrize("bad", [0, -8, 2.0, True, "8"])
def test_what_is_no_batch(bad: Any):
    with pytest.raises(ConfigError, match=r"global_batch = .*: must be an int of at least 1"):
        Sizes.of(2, bad)


@pytest.mark.parametrize(
    ("given", "batch", "named"), [(3, 8, "3 workers"), ((1, 3), 8, "3 workers"), ((3, 4), 8, "3 workers"), ((5, 5), 8, "5 workers")]
)
def test_workers_that_cannot_share_the_batch_are_refused(given: Any, batch: int, named: str):
    with pytest.raises(
        ConfigError, match=rf"{named} can't share a global batch of 8 examples evenly; of up to \d these can: 1, 2"
    ) as told:
        Sizes.of(given, batch)
    assert told.value.field == "num_workers"


def test_sizes_between_the_ends_that_cannot_share_the_batch_are_left_out():
    assert [Sizes.of((2, 8), 8).fitting(room) for room in (1, 2, 3, 7, 8, 99)] == [None, 2, 2, 4, 8, 8]
    assert [Sizes.of((2, 4)).fitting(room) for room in (1, 2, 3, 4, 99)] == [None, 2, 3, 4, 4]


def test_as_many_workers_as_there_is_room_for():
    most = 10**15  # no list of so many
    assert [Sizes.of((2, most)).fitting(room) for room in (1, 7)] == [None, 7]
    with pytest.raises(ConfigError, match=rf"of up to {most} these can: 1, 2, 4, 8$"):
        Sizes.of((1, most), 8)


def test_room_by_how_the_workers_are_placed():
    places = {"a": 2, "b": 1, "c": 0}
    assert [room_of(places, strategy) for strategy in ("PACK", "SPREAD", "STRICT_SPREAD", "STRICT_PACK")] == [3, 3, 2, 2]
    assert room_of({}, "STRICT_PACK") == 0


# ---------------------------------------------------------------- a worker group's size


class Run:
    """A launcher that does what `Elastic` says, second by second. A group of a size that works makes a step each second."""

    def __init__(
        self,
        num_workers: Any = (1, 2),
        *,
        room: int,
        batch: int | None = None,
        every_s: float = EVERY_S,
        broken: Sequence[int] = (),
    ):
        self.elastic = Elastic(Sizes.of(num_workers, batch), every_s)
        self.now_s = 1000.0
        self.room = room
        self.workers = 0
        self.broken = broken
        self.step = 7  # restored
        self.told: list[str] = []
        self.start()

    def newest(self) -> Callable[[], int]:
        step = self.step
        return lambda: step

    def start(self, *, room: int | None = None, failed: bool = False) -> int:
        """A group starts; the group before has ended, or failed."""
        self.room = self.room if room is None else room
        self.elastic.ended(self.newest(), failed=failed)
        self.workers = self.elastic.size_for(self.room, self.now_s)
        if told := self.elastic.outcome(self.workers):
            self.told.append(told)
        self.elastic.started(self.now_s, self.newest())
        return self.workers

    def fail(self) -> bool:
        """The group fails for good. Whether its size is taken back."""
        self.elastic.ended(self.newest(), failed=True)
        return self.elastic.take_back(self.now_s)

    def train(self, seconds: float, room: int | None = None) -> list[tuple[float, Wish]]:
        """(seconds from now, wish) for each time the group is asked to make way; it doesn't stop for it."""
        self.room = self.room if room is None else room
        began_s, wishes = self.now_s, list[tuple[float, Wish]]()
        while self.now_s < began_s + seconds:
            self.now_s += 1.0
            self.step += self.workers not in self.broken
            wish = self.elastic.look(self.room, self.now_s)
            if wish is not None:
                self.elastic.asked(wish, self.now_s)
                wishes.append((self.now_s - began_s, wish))
        return wishes

    def grow(self, seconds: float = 100 * EVERY_S, *, room: int | None = None) -> float:
        """Train until it has grown once; seconds until then."""
        began_s, self.room = self.now_s, self.room if room is None else room
        while self.now_s < began_s + seconds:
            if self.train(1.0):
                self.start()
                return self.now_s - began_s
        raise AssertionError("it never grew")


def test_two_one_two():
    run = Run(room=2)
    assert not run.train(200.0)
    assert run.start(room=1) == 1
    assert not run.train(200.0)
    ((after_s, wish),) = run.train(15.0, room=2)
    assert after_s == ROOM_STAYS_S + 1
    assert wish.workers == 2
    assert wish.reason == "there has been room for 2 workers for 10 s: the run grows from 1"
    assert run.start() == 2
    assert run.told == ["goes on with 1 worker instead of 2", "goes on with 2 workers instead of 1"]
    assert run.elastic.is_full


def test_a_growth_waits_for_the_grace_after_the_last_start():
    run = Run(room=2)
    run.start(room=1)
    assert not run.train(EVERY_S - 1, room=2)
    assert [after_s for after_s, _ in run.train(1.0)] == [1.0]


def test_a_node_that_comes_and_goes_is_no_room():
    run = Run(room=1)
    run.train(EVERY_S)
    for _ in range(20):
        assert not run.train(ROOM_STAYS_S - 1, room=2)
        assert not run.train(1.0, room=1)
    assert run.train(ROOM_STAYS_S + 2, room=2)


def test_two_that_come_one_after_the_other_cost_one_restart():
    run = Run((1, 4), room=1)
    run.train(EVERY_S)
    assert not run.train(ROOM_STAYS_S - 2, room=2)
    ((_, wish),) = run.train(ROOM_STAYS_S + 2, room=3)
    assert wish.workers == 3


def test_one_that_never_settles_does_not_hold_up_the_others():
    run = Run((1, 4), room=1)
    run.train(EVERY_S)
    wishes = [wish for _ in range(10) for _, wish in [*run.train(2.0, room=2), *run.train(2.0, room=3)]]
    assert [wish.workers for wish in wishes] == [2]


def test_room_that_is_gone_when_the_group_starts_again():
    run = Run(room=1)
    run.train(EVERY_S)
    assert run.train(ROOM_STAYS_S + 1, room=2)
    assert run.start(room=1) == 1
    assert run.told == ["goes on with 1 worker all the same: the room was gone"]
    assert not run.train(2 * EVERY_S - 1, room=2), "it was for nothing: the next time is put off"
    assert run.train(1.0)


def test_a_size_that_finds_no_place_is_followed_by_a_smaller_one():
    elastic = Elastic(Sizes.of((1, 8), 8), EVERY_S)
    tried = [elastic.size_for(8, 0.0)]
    for _ in range(4):
        elastic.not_placed()
        tried.append(elastic.size_for(8, 0.0))
    assert tried == [8, 4, 2, 1, 8]


def test_a_node_that_dies_whenever_the_run_has_grown_is_tried_less_and_less():
    run = Run(room=1)
    waited: list[float] = []
    for _ in range(8):
        run.room = 2
        waited.append(run.grow())
        run.train(5.0)
        run.start(room=1)
    assert waited == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 960.0, 960.0]
    run.grow(room=2)
    run.train(GROWN_FOR * EVERY_S)
    run.start(room=1)
    assert run.grow(room=2) == EVERY_S, "it has stayed: from the beginning"


def test_a_growth_to_a_size_that_worked_before_is_taken_back_too():
    run = Run(room=2)
    run.train(60.0)
    assert run.start(room=1) == 1
    run.train(60.0, room=2)
    run.broken = (2,)  # what it needs has gone with the node
    assert run.start() == 2
    run.train(5.0)
    assert run.start(failed=True) == 2
    assert run.fail(), "it has not made a step since the run grew"
    assert run.start() == 1


@pytest.mark.parametrize("grown", [0, 1])
def test_a_growth_whose_group_never_starts_is_taken_back_though_its_size_worked_before(grown: int):
    run = Run((1, 2), room=2 - grown)
    run.train(60.0, room=2)
    if grown:
        assert run.start() == 2
        run.train(60.0)
    assert run.start(room=1) == 1
    run.train(60.0, room=2)
    assert run.elastic.size_for(2, run.now_s) == 2, "and its processes can't be started"
    assert run.fail()
    assert run.start() == 1


def test_what_has_never_worked_is_not_gone_back_to():
    run = Run((1, 4), room=1)
    assert not run.fail()
    run = Run((1, 4), room=1, broken=(1,))
    run.start(room=2, failed=True)
    assert not run.fail()


@pytest.mark.parametrize(("steps", "worked"), [(FEW_STEPS, False), (FEW_STEPS + 1, True)])
def test_a_size_has_worked_if_it_made_more_than_a_few_steps_before_it_failed(steps: int, worked: bool):
    run = Run((1, 4), room=1)
    run.grow(room=2)
    run.train(steps)
    assert run.fail() is not worked


def test_the_time_passes_while_nothing_trains_too():
    run = Run((2, 4), room=2, broken=(4,))
    run.grow(room=4)
    assert run.fail()
    run.now_s += MOST_PATIENCE * EVERY_S - 1
    assert run.elastic.size_for(4, run.now_s) == 2
    assert run.elastic.size_for(4, run.now_s + 1) == 4


def test_a_size_that_only_fails_is_tried_ever_less():
    run = Run((1, 2), room=1, broken=(2,))
    run.grow(room=2)
    held: list[float] = []
    for _ in range(4):
        assert run.fail()
        run.start()
        held.append(run.grow(MOST_HELD * EVERY_S) / EVERY_S)
    assert held == [MOST_PATIENCE, 2 * MOST_PATIENCE, 4 * MOST_PATIENCE, 8 * MOST_PATIENCE]


def test_a_size_that_works_is_not_taken_back_for_another_s_failures():
    """A mistake of the program at step N, or storage that is out."""
    run = Run((1, 4), room=1)
    run.grow(room=2)
    run.train(EVERY_S)
    assert run.start(failed=True) == 2
    assert not run.fail()


def test_a_larger_group_that_never_trains_is_taken_back_too():
    run = Run((1, 4), room=1)
    run.train(EVERY_S)
    run.room = 3
    run.elastic.ended(run.newest(), failed=False)
    assert run.elastic.size_for(3, run.now_s) == 3
    assert run.fail()
    assert run.start() == 1


def test_nobody_asks_for_the_newest_step_before_it_matters():
    run = Run((1, 4), room=1)
    asked: list[int] = []
    for _ in range(50):
        run.elastic.ended(lambda: asked.append(0) or 5, failed=True)
        run.elastic.started(run.now_s, run.newest())
    assert not asked


# ---------------------------------------------------------------- the ranks stop for it


def resize(driver: Driver, group: str = "g") -> None:
    driver.send(StopAsked(reason="the run grows", within_s=None, group=group))


def test_a_group_of_before_is_not_meant():
    driver = training()
    resize(driver, group="another")
    driver.stage(5)
    driver.tick(1.0)
    assert driver.advice().proposal is None


def test_what_is_not_agreed_in_time_is_given_up_and_may_be_asked_again():
    driver = training(barrier_timeout_s=20.0)
    resize(driver)
    asked = driver.proposal
    driver.tick(20.1)
    assert (driver.proposal.id, driver.proposal.state) == (asked.id, "withdrawn")
    assert driver.core.journal.published == (), "nothing is lost: the training goes on"
    driver.stage(9)
    driver.tick(100.0)
    again = driver.advice().proposal
    assert again is None or again.state == "withdrawn", "and is left alone"
    resize(driver)
    again = driver.proposal
    assert (again.state, again.id > asked.id) == ("proposed", True)


def test_a_run_that_ends_is_not_stopped_on_the_way():
    driver = training()
    driver.leave(driver.key(4), ranks=[0])
    resize(driver)
    assert driver.advice().proposal is None
