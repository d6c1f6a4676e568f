"""`manager.section`: a name for what a loop does beside its steps. It costs the loop nothing, and may have a time-out of its own."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import pytest

from raystate import ConfigError, StateManager
from raystate.core.formats.messages import TrainerWord
from raystate.manager.control_words import ControlWords
from tests.model.world import ModelLink, Rank, World, state


def play(script: Callable[[Rank, StateManager], None], **config: Any) -> None:
    """One rank with this script, after a restore."""

    def of(rank: Rank) -> None:
        manager = rank.open("g")
        manager.restore(state(0))
        script(rank, manager)

    with World(save_every_steps=100, **config) as world:
        world.play(of)


def told(manager: StateManager) -> TrainerWord:
    return manager._session.spent.told(manager._pipeline.machine.word())


def test_its_time_counts_under_its_name_and_not_under_those_around_it():
    def script(rank: Rank, manager: StateManager) -> None:
        with manager.section("eval"):
            rank.rest(1.0)
            with manager.section("data"):
                rank.rest(2.0)
            manager.save(1, state(1))
        found.update(told(manager).spent)
        manager.close()

    found: dict[str, float] = {}
    play(script)
    assert found["section:data"] == pytest.approx(2.0, abs=0.1)
    assert found["section:eval"] == pytest.approx(1.0, abs=0.1)


def test_it_goes_on_after_exceptions_and_the_end_and_on_other_threads():
    def script(rank: Rank, manager: StateManager) -> None:
        data = manager.section("data")
        with pytest.raises(KeyError), data, data:
            raise KeyError
        assert not manager._session.spent.around
        thread = threading.Thread(target=lambda: data.__enter__())
        thread.start()
        thread.join()
        assert not manager._session.spent.around
        rank.rest(1.0)
        assert dict(told(manager).spent)["section:data"] < 0.1
        manager.close()
        for one in (data, manager.section("late"), manager.section("later", timeout_s=3)):
            with one:
                pass

    play(script)


def test_a_time_out_ends_with_its_section_whichever_thread_ends_it():
    def script(rank: Rank, manager: StateManager) -> None:
        def batches() -> Generator[int, None, None]:
            with manager.section("data", timeout_s=3):
                yield 1

        read = batches()
        next(read)
        assert (told(manager).section, told(manager).section_s) == ("data", 3.0)
        thread = threading.Thread(target=read.close)
        thread.start()
        thread.join()
        assert told(manager).section == ""
        elsewhere = threading.Thread(target=lambda: manager.section("late", timeout_s=3).__enter__())
        elsewhere.start()
        elsewhere.join()
        assert told(manager).section == ""
        manager.close()

    play(script)


def test_it_speaks_to_none_but_with_a_time_out(monkeypatch: pytest.MonkeyPatch):
    counts: Counter[str] = Counter()
    words: list[TrainerWord] = []

    def counted(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def call(*given: Any, **rest: Any) -> Any:
            counts[name] += 1
            words.extend(one for one in given if isinstance(one, TrainerWord))
            return real(*given, **rest)

        monkeypatch.setattr(owner, name, call)

    def script(rank: Rank, manager: StateManager) -> None:
        del rank
        counts.clear()
        for _ in range(1000):
            with manager.section("data"), manager.section("tokens"):
                pass
        seen["without"] = Counter(counts)
        words.clear()
        with manager.section("eval", timeout_s=600), manager.section("data"):
            pass
        seen["with"] = Counter(counts)
        manager.close()

    for name in ("write",):
        counted(ControlWords, name)
    for name in ("ask", "tell", "call_host", "call_hosts", "rest"):
        counted(ModelLink, name)
    seen: dict[str, Counter[str]] = {}
    play(script)
    assert seen == {"without": {}, "with": {"write": 2}}
    assert [(one.section, one.section_s) for one in words[:2]] == [("eval", 600.0), ("", 0.0)]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"name": ""}, "needs a name"),
        ({"name": None}, "needs a name"),
        ({"name": ["data"]}, "needs a name"),
        ({"name": "eval", "timeout_s": 0}, "a number of seconds, above 0"),
        ({"name": "eval", "timeout_s": float("nan")}, "above 0"),
        ({"name": "eval", "timeout_s": float("inf")}, "above 0"),
        ({"name": "eval", "timeout_s": 10**400}, "above 0"),
        ({"name": "eval", "timeout_s": True}, "above 0"),
        ({"name": "eval", "timeout_s": "60"}, "above 0"),
    ],
)
def test_a_mistake_is_named(given: dict[str, Any], text: str):
    def script(rank: Rank, manager: StateManager) -> None:
        del rank
        with pytest.raises(ConfigError, match=text):
            manager.section(**given)
        manager.close()

    play(script)


def test_a_word_says_where_the_newest_save_came():
    def script(rank: Rank, manager: StateManager) -> None:
        for step in (1, 2):
            rank.rest(1.0)
            assert rank.link is not None
            entered[step] = rank.link.node_clock()
            manager.save(step, state(step))
        found.update(told(manager).reached)
        manager.close()

    entered: dict[int, float] = {}
    found: dict[int, float] = {}
    play(script, snapshot_every_steps=1)
    assert found == {2: pytest.approx(entered[2], abs=0.05)}
