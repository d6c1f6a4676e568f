"""raystate.Counted: iterators without a position of their own go on where they were."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import raystate
from tests.model.world import Rank, World

STATE = {"w": np.zeros(2, np.float32)}


def numbers(last: int = 1000) -> Iterator[int]:
    yield from range(last)


def test_it_counts_and_skips():
    made: list[None] = []

    def make() -> Iterator[int]:
        made.append(None)
        return numbers()

    counted = raystate.Counted(make)
    assert not made, "nothing is read before the first item"
    assert list(itertools.islice(counted, 3)) == [0, 1, 2]
    assert (counted.count, counted.get_state()) == (3, {"epoch": 0, "count": 3, "processes": 1})
    again = raystate.Counted(numbers)
    again.set_state(counted.get_state())
    assert (next(again), next(counted)) == (3, 3)
    counted.set_state({"count": 1, "processes": 1})  # a restore in mid-training goes back
    assert (next(counted), len(made)) == (1, 2)
    assert list(raystate.Counted(lambda: [7, 8])) == [7, 8], "an iterable will do"


EPOCHS = 3


def _epochs(counted: raystate.Counted[int], stops_after: int = -1) -> Iterator[int]:
    """The loop of every tutorial; and a state after each item, as `save` takes it."""
    for _ in range(counted.epoch, EPOCHS):
        for item in counted:
            yield item
            stops_after -= 1
            if stops_after == 0:
                return
        yield -1  # what the program does at the end of each epoch


@pytest.mark.parametrize("stops_after", range(1, 13))
def test_each_epoch_begins_anew_and_a_restart_goes_on_in_its_own(stops_after: int):
    """Each shuffled in an order of its own."""

    def make() -> raystate.Counted[int]:
        counted: raystate.Counted[int] = raystate.Counted(lambda: np.random.default_rng(counted.epoch).permutation(4).tolist())
        return counted

    whole = list(_epochs(make()))
    assert [sorted(whole[at : at + 5]) for at in (0, 5, 10)] == [[-1, 0, 1, 2, 3]] * 3
    assert whole[:4] != whole[5:9]
    killed, again = make(), make()
    seen = list(_epochs(killed, stops_after))
    again.set_state(killed.get_state())
    assert seen + list(_epochs(again)) == whole


def test_a_state_after_an_epochs_end_is_of_the_next_one():
    """A program that saves once an epoch: what it does at its end isn't done again."""
    counted = raystate.Counted(lambda: range(2))
    assert list(counted) == [0, 1]
    assert counted.get_state() == {"epoch": 1, "count": 0, "processes": 1}
    assert next(counted, None) is None, "an iterator that has ended has ended, until the next loop"
    assert list(counted) == [0, 1]
    empty: raystate.Counted[int] = raystate.Counted(lambda: ())
    assert [list(empty), list(empty)] == [[], []]


def test_a_loop_that_is_left_goes_on():
    counted = raystate.Counted(lambda: range(3))
    for _ in counted:
        break
    assert (list(counted), counted.epoch) == ([1, 2], 1)


def test_two_of_a_zip_begin_each_epoch_together():
    """zip asks only the first for its end: the second gave an empty epoch next, and then pairs that were shifted."""
    numbers, letters = raystate.Counted(lambda: iter(range(3))), raystate.Counted(lambda: iter("abc"))
    pairs = [(0, "a"), (1, "b"), (2, "c")]
    assert [[*zip(numbers, letters, strict=False)] for _ in range(3)] == [pairs] * 3
    assert (numbers.epoch, letters.epoch, letters.count) == (3, 2, 3)
    assert [*zip(letters, numbers, strict=False)] == [("a", 0), ("b", 1), ("c", 2)]


def test_an_item_that_is_looked_at_is_not_counted_before_it_is_given():
    batches = raystate.Counted(lambda: iter(range(5)))
    assert [next(batches), next(batches)] == [0, 1]
    rest = iter(iter(batches))
    assert batches.get_state()["count"] == 2
    assert [*rest] == [2, 3, 4]


def test_a_generator_that_has_raised_is_made_anew():
    """The next loop gave nothing, and an epoch was counted that had no end."""
    fails = [True]

    def reads() -> Iterator[int]:
        yield from (1, 2)
        if fails.pop() if fails else False:
            raise OSError("the disk is away")
        yield 3

    batches = raystate.Counted(reads)
    with pytest.raises(OSError, match="away"):
        list(batches)
    assert ([*batches], batches.epoch) == ([3], 1)


def test_two_ranks_each_go_on_with_their_own_count():
    world = World(ranks=2, save_every_steps=100)
    got: dict[int, int] = {}

    def trains(rank: Rank) -> None:
        manager = rank.open("first")
        data = raystate.Counted(numbers)
        manager.restore(STATE, items={"data": data})
        for step in range(1, 4):
            for _ in range(1 + rank.number):  # of different lengths
                next(data)
            manager.save(step, STATE, items={"data": data})
        next(data)  # taken, and in no step
        manager.close()

    def comes_back(rank: Rank) -> None:
        manager = rank.open("second")
        data = raystate.Counted(numbers)
        restored = manager.restore(STATE, items={"data": data})
        assert restored is not None
        assert restored.items["data"] is data
        got[rank.number] = next(data)
        manager.close()

    world.play_all(trains, comes_back)
    assert got == {0: 3, 1: 6}


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: raystate.Counted(numbers()), raystate.ConfigError, r"a function that makes the iterator anew, not a generator"),  # pyright: ignore[reportArgumentType]
        (lambda: next(raystate.Counted(lambda: 3)), raystate.ConfigError, "make_iterator gave a int, which can't be iterated"),  # pyright: ignore[reportArgumentType]
        (lambda: _restored({"seed": 7, "position": 3}), raystate.ReferenceMismatchError, "another iterator saved it"),
        (lambda: _restored({"count": -1}), raystate.ReferenceMismatchError, "no count"),
        (lambda: _restored({"count": 3, "processes": 4}), raystate.ItemTopologyError, "of 4 processes.*about 1.*shared=True"),
        (lambda: next(_restored({"count": 5, "processes": 1}, last=4)), raystate.RaystateError, "ended after 4 items, but 5"),
        (lambda: _goes_back_with_one_iterator(), raystate.ConfigError, "the iterator that it had given before"),
        (lambda: _two_epochs_of(numbers(3)), raystate.ConfigError, "the iterator that it had given before"),
        (
            lambda: _two_epochs_of(numbers(3), map),
            raystate.ConfigError,
            "epoch 2 have no first item, and those of the epoch before had 3",
        ),
    ],
)
def test_a_wrong_use_is_told(call: Any, kind: type[Exception], said: str):
    with pytest.raises(kind, match=said):
        call()


def _goes_back_with_one_iterator() -> None:
    only = numbers()
    counted = raystate.Counted(lambda: only)
    for _ in range(3):
        next(counted)
    counted.set_state({"count": 1, "processes": 1})
    next(counted)


def _two_epochs_of(only: Iterator[int], wrap: Any = lambda _, items: items) -> None:
    counted = raystate.Counted(lambda: wrap(int, only))
    for _ in range(2):
        assert list(counted) == [0, 1, 2]


def _restored(state: dict[str, int], last: int = 1000, **options: Any) -> raystate.Counted[int]:
    counted = raystate.Counted(lambda: numbers(last), **options)
    counted.set_state(state)
    return counted


def test_a_shared_count_is_for_any_number_of_processes():
    assert raystate.Counted(numbers, shared=True).get_state() == {"epoch": 0, "count": 0, "processes": 0}
    assert next(_restored({"count": 3, "processes": 4}, shared=True)) == 3
    assert next(_restored({"count": 3, "processes": 0})) == 3
