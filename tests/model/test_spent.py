"""Where a training thread's time goes, as its word tells."""

from __future__ import annotations

import threading

import jax.numpy as jnp
import pytest

from raystate.core.formats.reports import COMPILATION, SAVES, TrainerWord
from raystate.manager.spent import LONGEST_NAME, MOST_SECTIONS, OTHER, STEPS, Spent
from tests.model.world import Rank, World, state

NOTHING = TrainerWord(lineage="1.1.a", rank=0, world=1)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def spent(clock: Clock) -> Spent:
    return Spent(clock)


def told(spent: Spent) -> dict[str, float]:
    return dict(spent.told(NOTHING).spent)


def test_a_span_stops_the_one_around_it(spent: Spent, clock: Clock):
    with spent.span("section:eval"):
        clock.now_s += 1
        with spent.span(SAVES):
            clock.now_s += 10
            with spent.span(STEPS):
                clock.now_s += 100
            assert told(spent) == {"section:eval": 1, SAVES: 10}, "what runs counts, too"
            clock.now_s += 20
        clock.now_s += 2
    clock.now_s += 1000
    word = spent.told(NOTHING)
    assert dict(word.spent) == {"section:eval": 3, SAVES: 30}
    assert word.lived_s == 1133


def test_spans_of_generators_end_in_any_order(spent: Spent, clock: Clock):
    first, second = spent.span("section:a"), spent.span("section:b")
    first.__enter__()
    second.__enter__()
    clock.now_s += 1
    first.__exit__(None, None, None)
    clock.now_s += 2
    second.__exit__(None, None, None)
    second.__exit__(None, None, None)
    clock.now_s += 4
    assert told(spent) == {"section:a": 0, "section:b": 3}


def test_another_thread_counts_nothing(spent: Spent, clock: Clock):
    def other() -> None:
        with spent.span("section:data"):
            clock.now_s += 5
        spent.compiled(3.0)
        spent.reached(8)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    word = spent.told(NOTHING)
    assert (word.spent, word.reached, word.lived_s) == ((), (), 5)


def test_compilations_lie_in_each_other_and_in_spans(spent: Spent, clock: Clock):
    with spent.span("restore"):
        clock.now_s += 3
        spent.compiled(1.0)
        clock.now_s += 4
        spent.compiled(2.0)
        clock.now_s += 1
        spent.compiled(7.5)  # both of them lie in it
        clock.now_s += 2
        spent.compiled(1.5)  # after it
    assert told(spent) == {COMPILATION: 9.0, "restore": 1.0}
    clock.now_s += 5
    spent.compiled(5.0)  # in no span
    assert told(spent) == {COMPILATION: 14.0, "restore": 1.0}


def test_names_without_end_keep_the_word_small(spent: Spent, clock: Clock):
    for number in range(100):
        with spent.section(f"{number:02}" + "x" * 1000):
            clock.now_s += 1
    sums = told(spent)
    assert len(sums) == MOST_SECTIONS + 1
    assert sums.pop(OTHER) == 100 - MOST_SECTIONS
    assert {len(name) for name in sums} == {len("section:") + LONGEST_NAME}
    assert spent.section("00" + "x" * 1000).cause != OTHER, "a known one stays"


def test_of_all_steps_there_is_one_that_a_seldom_report_sees(spent: Spent):
    for step in range(1, 1001):
        with spent.span(SAVES):
            spent.reached(step)
    assert [step for step, _ in spent.told(NOTHING).reached] == [1000, 960, 512]
    spent.begin_anew()
    assert spent.told(NOTHING).reached == ()


def test_what_a_real_manager_tells():
    def script(rank: Rank) -> None:
        manager = rank.open("g")
        manager.restore_or_init(lambda: {"w": jnp.zeros(8)})
        for step in (1, 2, 4):
            rank.rest(1.0)
            manager.save(step, state(step))
        words.append(manager._session.spent.told(manager._pipeline.machine.word()))
        manager.close()

    words: list[TrainerWord] = []
    with World(save_every_steps=100) as world:
        world.play(script)
    (word,) = words
    assert word.steps == 4
    assert [step for step, _ in word.reached] == [4]
    assert 0 <= dict(word.spent)["saves"] < word.lived_s
    assert {"restore", COMPILATION} <= dict(word.spent).keys()
    assert word.lived_s >= 3.0
