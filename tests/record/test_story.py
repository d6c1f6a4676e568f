"""The story of a step: what happened, what was decided and why, and nothing of other steps."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

import pytest

from raystate.core.formats.messages import (
    Advice,
    Appended,
    CarriedOut,
    Event,
    FlushAsked,
    HostDown,
    HostId,
    HostReported,
    HostSummary,
    Intent,
    LeaveAsked,
    Log,
    Proposal,
    Settings,
    SnapshotId,
    Staged,
    Tick,
)
from raystate.observe.record import AttemptRecord, Record, read_record
from raystate.observe.story import Story, known_steps, tell
from tests.record.a_record import play
from tests.record.test_record import every, kinds

A = HostId("a" * 56)


@pytest.fixture(scope="module")
def attempts(tmp_path_factory: pytest.TempPathFactory) -> list[AttemptRecord]:
    folder = tmp_path_factory.mktemp("story")
    play(folder / "run", folder / "record")
    return read_record(folder / "record")


def texts(story: Story, attempt: int) -> list[str]:
    """Events, and below them decisions with their reasons."""
    lines: list[str] = []
    for moment in story.moments:
        if moment.attempt == attempt:
            lines.append(moment.event)
            lines += [f"-> {one.text}" + (f" ({one.reason})" if one.reason else "") for one in moment.decisions]
    return lines


def test_from_the_snapshot_to_its_removal(attempts: list[AttemptRecord]) -> None:
    assert texts(tell(10, attempts), 1) == [
        "host firsthost0 holds the snapshot of rank 0",
        "host firsthost1 holds the snapshot of rank 1",
        "host firsthost2 holds the snapshot of rank 2",
        "-> write save a1k1: hosts firsthost0, firsthost1, firsthost2 (save a1k1 of step 10 (due, try 1) on 3 hosts)",
        "-> it is stable: all of it is in the memory of the hosts",
        "host firsthost0 has written its part of save a1k1",
        "host firsthost1 has written its part of save a1k1",
        "host firsthost2 has written its part of save a1k1",
        "-> build the package of save a1k1",
        "save a1k1 is packaged",
        "-> log entry 2 commits it (save a1k1) (commit of step 10 (due))",
        "log entry 2 is written",
        "-> make save a1k1 visible in storage",
        "step 10 is visible in storage",
        "-> step 10 is durable",
        "save a1k4 is packaged",
        "-> log entry 4 retires it (retention: not among 2 kept steps)",
        "log entry 4 is written",
        "step 30 is visible in storage",
        "-> remove its files",
        "the files of step 10 are gone from its place",
        "-> step 10 is retired: retention: not among 2 kept steps",
    ]
    assert list(tell(10, attempts).milestones) == ["staged", "save begun", "stable", "committed", "durable", "retired"]


def test_a_failure_and_the_next_try(attempts: list[AttemptRecord]) -> None:
    story = tell(20, attempts)
    lines = texts(story, 1)
    failed = lines.index("host firsthost0 could not write save a1k2: StorageError: 503: try again")
    again = "-> write save a1k3: hosts firsthost0, firsthost1, firsthost2 (save a1k3 of step 20 (due, try 2) on 3 hosts)"
    assert failed < lines.index(again)
    assert {one.level for moment in story.moments for one in moment.decisions} == {"debug", "info", "warning"}
    assert story.milestones["durable"] - story.milestones["save begun"] > 1.0, "it waited before the second try"


def test_a_damaged_step_is_saved_again(attempts: list[AttemptRecord]) -> None:
    story = tell(30, attempts)
    lines = texts(story, 2)
    assert lines[0].startswith("attempt 2 claims the run (claimed after attempt 1)")
    aside = "-> log entry 7 sets it aside (damaged: rank 0: checksum; rank 1: checksum; rank 2: checksum)"
    assert lines.index("rank 0 could not restore step 30: checksum") < lines.index(aside) < lines.index("-> move its files aside")
    assert lines[-1] == "-> step 30 is durable"
    assert "set aside" not in story.milestones, "of its last life"


def test_other_steps_have_their_own_story(attempts: list[AttemptRecord]) -> None:
    assert known_steps(attempts) == [10, 20, 30]
    for step in (10, 20, 30):
        for line in texts(tell(step, attempts), 1):
            if line != "step 30 is visible in storage":  # what the removal of step 10 has waited for
                assert not any(f"step {other} " in line for other in {10, 20, 30} - {step}), line
    assert tell(77, attempts).moments == ()


# ---------------------------------------------------------------- single events


def story_of(step: int, *records: tuple[Any, tuple[Any, ...]]) -> list[str]:
    made = tuple(
        Record(attempt=1, number=number, time_s=float(number), now_s=0.0, event=event, commands=commands)
        for number, (event, commands) in enumerate(records)
    )
    return texts(tell(step, [AttemptRecord(attempt=1, settings=Settings(run="lm", storage="s"), records=made)]), 1)


def staged(step: int) -> HostReported:
    piece = Staged(rank=0, world=2, lineage="1.1.x", step=step, layout="l", promised=False)
    return HostReported(summary=HostSummary(host=A, incarnation="i", seq=step, staged=(piece,)))


def advice(**fields: Any) -> tuple[Advice, ...]:
    told = Advice(attempt=1, seq=1, lineage="1.1.x", **fields)
    return (dataclasses.replace(told, host=A), dataclasses.replace(told, host=HostId("b")))


@pytest.mark.parametrize("kind", kinds(Event), ids=lambda kind: kind.__name__)
def test_every_event_has_a_sentence(kind: type[Any]) -> None:
    for one in every(kind):
        sentence = one.words()
        assert sentence and "<" not in sentence and kind.__name__ not in sentence


def test_a_snapshot_that_dies() -> None:
    lines = story_of(5, (staged(5), ()), (HostDown(host=HostId("b"), reason="said nothing"), advice(dead=(5,))), (staged(5), ()))
    assert lines == [
        "host aaaaaaaa holds the snapshot of rank 0",
        "host b is lost: said nothing",
        "-> its snapshot is dead: it can't become complete",
    ]


def test_a_common_stop() -> None:
    proposal = Proposal(id=3, kind="stop", step=8, state="proposed", reason="preempted")
    assert story_of(8, (Tick(), advice(proposal=proposal))) == [
        "time has passed",
        "-> all ranks are asked to stop at it (preempted)",
    ]


def test_who_waits_for_it() -> None:
    saves = (SnapshotId("1.1.x", 4), SnapshotId("1.1.x", 6))
    flush = FlushAsked(ask=typing.cast("Any", "q"), lineage="1.1.x", rank=1, promised=saves)
    leave = LeaveAsked(ask=typing.cast("Any", "r"), lineage="1.1.x", rank=1, last=saves[-1])
    assert story_of(6, (flush, ()), (leave, ())) == [
        "rank 1 waits until its saves are durable: 4, 6",
        "rank 1 closes; its last step is 6",
    ]
    assert story_of(5, (flush, ()), (leave, ())) == []


def test_a_removal_and_a_line_of_the_log() -> None:
    removed = CarriedOut(intent=Intent(kind="retire", step=2, save="a1k1", attempt=1, seq=3))
    line = Log(level="info", text="step 2 is retired: newer ones are kept")
    other = Log(level="warning", text="step 9 could not be published, unlike step 2")
    assert story_of(2, (removed, (line,)), (Appended(seq=9, outcome="ok"), (other,))) == [
        "the files of step 2 are gone from its place",
        f"-> {line.text}",
    ]


def test_the_folder_may_be_empty(tmp_path: Path) -> None:
    assert read_record(tmp_path) == []
    assert known_steps([]) == []
