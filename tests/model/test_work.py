"""What a save and a restore cost in messages, calls and requests, whatever the machine: more than this is a step back.

Each limit is what was counted when it was written, and a little more: the order of turns is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from jax import tree_util

from raystate.core.formats.codec import dumps, plain
from raystate.core.formats.messages import HostReported
from raystate.core.formats.words import trainer_word_to_json
from raystate.manager import pipeline
from raystate.manager.control_words import ControlWords
from raystate.observe.ledger.lines import EVENTS
from raystate.observe.ledger.writer import LedgerWriter
from raystate.runtime.link import HostCall
from raystate.waits import REPORT_EVERY_S
from tests.model.world import ModelLink, Rank, Weather, World

RANKS = 2
STEP_S = 0.5
STATE = {"w": np.zeros((64, 64), np.float32), "b": np.zeros(64, np.float32)}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of what goes from one process to another, by what it is, since it was cleared."""
    found: Counter[str] = Counter()

    def counted(owner: type, name: str, what: Callable[..., str], number: Callable[..., int] = lambda *_: 1) -> None:
        real = getattr(owner, name)

        def call(self: Any, *arguments: Any, **rest: Any) -> Any:
            if said := what(*arguments):
                found[said] += number(*arguments)
            return real(self, *arguments, **rest)

        monkeypatch.setattr(owner, name, call)

    def calls(several: Sequence[HostCall], *_: Any) -> int:
        return len(several)

    counted(World, "tell", lambda event: f"told {type(event).__name__}")
    counted(ModelLink, "ask", lambda event, _: f"asked {type(event).__name__}")
    counted(ModelLink, "call_host", lambda _host, method, *_: f"called {method}")
    counted(ModelLink, "call_hosts", lambda *_: "called for pieces", calls)
    counted(World, "order", lambda order: f"ordered {type(order).__name__}")
    counted(World, "write", lambda *_: "ordered Write")
    # The ledger goes by the machine's clock, not by the world's: tests/record/test_ledger.py counts its requests.
    counted(Weather, "before", lambda operation, name: "" if name.startswith(EVENTS) else f"storage {operation}")
    return found


def play(counts: Counter[str], script: Callable[[Rank, Callable[[str], None]], None], **config: Any) -> dict[str, Counter[str]]:
    """What was counted before each mark that rank 0 sets."""
    world = World(7, ranks=RANKS, nodes=RANKS, **config)
    marks: dict[str, Counter[str]] = {}

    def of(rank: Rank) -> None:
        def mark(name: str) -> None:
            if rank.number == 0:
                marks[name] = Counter(counts)
                counts.clear()

        script(rank, mark)

    with world:
        world.play(of, RANKS)
    return marks


def saving(steps: int) -> Callable[[Rank, Callable[[str], None]], None]:
    def script(rank: Rank, mark: Callable[[str], None]) -> None:
        manager = rank.begin(STATE)
        for step in range(1, 1 + 2 * steps):
            if step == steps + 1:
                mark("before")
            manager.save(step, STATE)
            rank.rest(STEP_S)
        mark("saves")
        rank.rest(10 * STEP_S)  # until rank 0, too, is here
        manager.close()

    return script


def check(found: Counter[str], per: int, limits: Mapping[str, float]) -> None:
    """Nothing else, and of each no more."""
    share = {what: number / per for what, number in found.items()}
    assert {what: number for what, number in share.items() if number > limits.get(what, 0)} == {}, f"the limits are {limits}"


def test_a_snapshot(counts: Counter[str]):
    """Of each rank: it calls save(), it has staged, and what its host was told has come."""
    steps = 10
    found = play(counts, saving(steps), save_every_steps=10_000)["saves"]
    check(found, steps, {"told HostReported": 3 * RANKS, "ordered Advice": RANKS + 1})


def test_a_save_that_keeps_nothing(counts: Counter[str], monkeypatch: pytest.MonkeyPatch):
    """Its state is flattened once, to be held, and not looked at; its HostActor hears of it, but no oftener than it reports."""
    for owner, name in ((pipeline, "describe"), (ControlWords, "write"), (tree_util, "tree_flatten")):
        real = getattr(owner, name)

        def counted(*given: Any, _name: str = name, _real: Any = real, **rest: Any) -> Any:
            counts[_name] += 1
            return _real(*given, **rest)

        monkeypatch.setattr(owner, name, counted)

    def script(rank: Rank, mark: Callable[[str], None]) -> None:
        manager = rank.begin(STATE)
        manager.save(1, STATE)
        rank.rest(STEP_S)
        mark("before")
        began_s = rank.world.now_s
        for step in range(2, 1002):
            manager.save(step, STATE)
            rank.rest(REPORT_EVERY_S / 50)
        counts["reports"] = int((rank.world.now_s - began_s) / REPORT_EVERY_S) + 2  # that there may be of a rank
        mark("passed")
        rank.rest(10 * STEP_S)
        manager.close()

    found = play(counts, script, save_every_steps=10_000, snapshot_every_steps=10_000)["passed"]
    assert found["describe"] == 0
    assert found["tree_flatten"] <= RANKS * 1000
    assert 0 < found["write"] <= RANKS * found["reports"]
    assert found["reports"] < 500


def test_a_durable_step(counts: Counter[str]):
    """The array data goes to storage beside what is counted: TensorStore writes it."""
    steps = 10
    found = play(counts, saving(steps), save_every_steps=1, keep_last=2)["saves"]
    messages = {
        "told HostReported": 5 * RANKS + 1,
        "ordered Advice": 3 * RANKS + 1,
        "ordered Write": RANKS,
    }
    # Five of the step's own small files, its package, the log's entry; markers and small files are read back. The log's
    # entry before this one is looked at, and the package, so that nothing is written into the place of a folder that is away; the
    # newest entry before and after a removal, for the same reason; and each host looks whether a directory is there.
    objects = {"create": 7, "kvstore": RANKS, "checksum": 4, "read": 8, "exists": 1 + RANKS, "delete": 1}
    # Of a directory: what is there is listed and set right before the step is moved to its place.
    folders = {"list": 6 + 2 * RANKS + 1, "sweep": 1, "fsync_tree": 1, "rename_tree": 2, "delete_tree": 1}
    check(found, steps, messages | {f"storage {name}": number for name, number in (objects | folders).items()})


def test_a_restore(counts: Counter[str]):
    """From memory, of a living group: each rank asks which step, and tells that it has it. Nothing comes from storage."""

    def script(rank: Rank, mark: Callable[[str], None]) -> None:
        manager = rank.begin(STATE)
        for step in (1, 2):
            manager.save(step, STATE)
            rank.rest(STEP_S)
        manager.wait_until_finished()
        rank.rest(STEP_S)
        mark("before")
        restored = manager.restore(STATE)
        assert restored is not None and restored.tier == "memory"
        mark("restore")
        rank.rest(10 * STEP_S)
        manager.close()

    found = play(counts, script, save_every_steps=1)["restore"]
    asked = {"asked RestoreAsked": 1, "asked RestoreTried": 1, "called for pieces": 1}
    check(found, RANKS, asked | {"told HostReported": 6, "ordered Advice": 3, "ordered Invalidate": 1})


def test_what_is_measured_costs_no_call_and_few_bytes(counts: Counter[str], monkeypatch: pytest.MonkeyPatch):
    """Sections, times of the training thread, counters, samples: they go with the words, reports and lines that there are anyway."""
    steps, sections = 20, [f"a section of the loop, the {number}th" for number in range(20)]  # more than are told apart
    largest: Counter[str] = Counter()

    def measured(owner: Any, name: str, what: str, size: Callable[..., int]) -> None:
        real = getattr(owner, name)

        def call(*given: Any, **rest: Any) -> Any:
            counts[what] += 1
            largest[what] = max(largest[what], size(*given))
            return real(*given, **rest)

        monkeypatch.setattr(owner, name, call)

    measured(ControlWords, "write", "word", lambda _, word: len(trainer_word_to_json(word)))
    measured(World, "tell", "report", lambda _, event: len(dumps(plain(event.summary))) if isinstance(event, HostReported) else 0)
    measured(LedgerWriter, "note", "line", lambda _, line: len(line))
    for name in ("ask", "tell", "call_host", "call_hosts"):
        measured(ModelLink, name, "remote calls", lambda *_: 0)

    def script(rank: Rank, mark: Callable[[str], None]) -> None:
        manager = rank.begin(STATE)
        for step in range(1, 1 + 2 * steps):
            if step == steps + 1:
                mark("before")
            for number, section in enumerate(sections):
                with manager.section(section):
                    if number == step % len(sections):
                        rank.rest(STEP_S / 5)
            manager.save(step, STATE)
            rank.rest(STEP_S * 4 / 5)  # a step takes as long as in the tests above
        mark("steps")
        rank.rest(10 * STEP_S)
        manager.close()

    found = play(counts, script, save_every_steps=10_000)["steps"]
    assert found["remote calls"] == 0
    check(
        Counter({what: number for what, number in found.items() if what != "line"}),
        steps,
        {"told HostReported": 3 * RANKS, "report": 3 * RANKS, "ordered Advice": RANKS + 1, "word": 3 * RANKS},
    )
    assert 0 < found["line"] <= steps, "a sample, now and then"
    assert 0 < largest["word"] <= 1300 and 0 < largest["report"] <= 2600 and 0 < largest["line"] <= 1100, largest
