"""How `raystate report` tells of ends, lost Coordinators, outages and saves that were given up, and whether all is safe."""

from __future__ import annotations

import dataclasses
import re

import pytest

from raystate.cli.report_axes import moment
from raystate.cli.report_events import gathered, without_storage
from raystate.cli.report_facts import ReportContent, facts_of
from raystate.cli.report_life import life_of
from raystate.cli.report_page import render
from raystate.cli.report_time import KINDS
from raystate.observe.ledger.lines import (
    AttemptBegan,
    GroupEnded,
    GroupJoined,
    HostChanged,
    LoggedRecovery,
    LoggedSave,
    Noticed,
    RunLeft,
    Sampled,
    SaveLost,
    Slowed,
    StorageChanged,
)
from tests.cli.made_run import BEGIN_S, Lines, made_lines, made_report


@pytest.fixture(scope="module")
def made() -> ReportContent:
    return made_report()


def test_a_slow_rank_is_told_with_what_it_cost_in_all(made: ReportContent) -> None:
    lines, slow = Lines(), {"rank": 1, "host": "h", "section": "data", "by_s": 0.2, "since_step": 110}
    for at_s, step in ((0.0, 100), (10.0, 150)):
        lines.add(1, at_s, Sampled(group="g", step=step, steps=step))
    lines.add(1, 11.0, Slowed(**slow))
    lines.add(1, 25.0, Slowed(**slow, ends=True))
    lines.add(1, 30.0, Sampled(group="g", step=190, steps=190))
    (one,) = life_of(lines.noted).slow
    assert one.cost_s == pytest.approx(0.2 * (180 - 110))
    page = render(dataclasses.replace(made, life=life_of(lines.noted)))
    assert 'data-is="in all about">14.0 s<' in page and "Rank 1 was slow, which cost about 14.0 s." in page


def replaced(group: str) -> Lines:
    """Its Coordinator dies at 20 s, and the next one, from 32 s on, hears of that group."""
    lines = Lines()
    lines.add(1, 0.0, AttemptBegan(reason="first claim"))
    lines.add(1, 20.0, Sampled(group="g1", step=100, steps=100))
    lines.add(2, 32.0, AttemptBegan(reason="claimed after attempt 1"))
    lines.add(2, 40.0, Sampled(group=group, step=150, steps=150))
    return lines


@pytest.mark.parametrize(("group", "told"), [("g1", "its worker group lived on"), ("g2", "its worker group did not go on")])
def test_the_loss_of_a_coordinator_is_told_as_one(made: ReportContent, group: str, told: str) -> None:
    life = life_of(replaced(group).noted)
    (event,) = life.moments
    assert (event.kind, event.at_s) == ("coordinator", BEGIN_S + 32.0)
    assert event.what == "the Coordinator was lost and replaced: attempt 2 began"
    assert event.text == f"nothing was coordinated for 12.0 s; {told}"
    assert life.attempts[1].text == f"claimed after attempt 1: {event.text}"
    page = render(dataclasses.replace(made, life=life))
    assert (
        "The Coordinator was lost and replaced." in page and "claimed after attempt 1: nothing was coordinated for 12.0 s" in page
    )


def test_an_attempt_after_the_end_of_the_run_replaces_no_coordinator() -> None:
    lines = replaced("g2").noted
    left = lines[1]._replace(n=10, t=BEGIN_S + 21.0, what=RunLeft(reason="all ranks have closed"))
    assert [(one.kind, one.text) for one in life_of([*lines, left]).moments] == [
        ("end", "all ranks have closed"), ("attempt", "the run is used again, after its end"),
    ]  # fmt: skip


def saved(lines: Lines, at_s: float, step: int) -> None:
    lines.add(1, at_s, LoggedSave(attempt=1, step=step, save=f"a1k{step}", seconds=1.0))


def test_an_outage_of_storage_tells_how_long_nothing_became_durable_and_what_was_at_risk() -> None:
    lines = Lines()
    saved(lines, 0.0, 50)
    saved(lines, 10.0, 100)
    for at_s, step in ((9.0, 95), (20.0, 200), (60.0, 600), (90.0, 900)):
        lines.add(1, at_s, Sampled(group="g", step=step, steps=step))
    lines.add(1, 30.0, StorageChanged(works=False, why="503"))
    saved(lines, 70.0, 590)
    lines.add(1, 70.0, StorageChanged(works=True))
    fails, works = life_of(lines.noted).moments
    assert (fails.kind, fails.text) == (
        "storage",
        "503; nothing became durable for 60.0 s, after step 100; up to 500 steps at risk",
    )
    assert (works.kind, works.what) == ("works", "storage works again, after 40.0 s")
    assert KINDS["storage"] != KINDS["works"]
    (still,) = life_of([one for one in lines.noted if one.t < BEGIN_S + 65]).moments
    assert "nothing became durable for 50.0 s so far, after step 100" in still.text


def test_an_outage_ends_for_the_coordinator_that_told_of_it() -> None:
    """Its successor tells anew of what it finds."""
    lines = Lines()
    lines.add(1, 0.0, AttemptBegan(reason="the run starts"))
    lines.add(1, 100.0, StorageChanged(works=False, why="503"))
    lines.add(2, 130.0, AttemptBegan(reason="claimed after attempt 1"))
    lines.add(2, 300.0, StorageChanged(works=False, why="503"))
    lines.add(2, 300.0, StorageChanged(works=True))
    lines.add(2, 400.0, StorageChanged(works=False, why="503"))
    life = life_of(lines.noted)
    assert [(begin_s - BEGIN_S, None if end is None else end.at_s - BEGIN_S) for begin_s, end in without_storage(life.moments)] == [
        (100.0, 130.0), (300.0, 300.0), (400.0, None),
    ]  # fmt: skip
    assert [one.what for one in life.moments if one.kind == "works"] == ["storage works again, after 0 ms"]


def test_an_end_is_never_later_than_the_begin_of_its_restart() -> None:
    lines = Lines()
    lines.add(1, 0.0, Sampled(group="g1", step=10, steps=10))
    lines.add(1, 20.0, GroupEnded(group="g1", how="interrupted", cause="drained"))
    lines.add(1, 20.1, GroupJoined(group="g2", world=2, ages={"asked": 5.0}))
    back = LoggedRecovery(attempt=1, group="g2", cause="drained", step=10, tier="peer", seconds=6.5, steps_repeated=0)
    lines.add(1, 21.5, back)
    life = life_of(lines.noted)
    assert [(one.what, one.at_s - BEGIN_S) for one in life.moments] == [("a group stopped, as was asked", pytest.approx(15.0))]
    assert life.groups[0].end_s - BEGIN_S == pytest.approx(15.0)
    asked = [one for one in lines.noted if not isinstance(one.what, GroupJoined)] + [
        lines.noted[2]._replace(what=GroupJoined(group="g2", world=2))
    ]
    assert [one.at_s - BEGIN_S for one in life_of(asked).moments] == [pytest.approx(15.0)], "the recovery tells it, too"


def test_a_hang_is_no_death() -> None:
    told = {one.kind for one in life_of(made_lines()).moments if "hung" in one.what}
    assert told == {"hang"}


def test_saves_that_gave_way_for_the_same_reason_are_one_line() -> None:
    lines = Lines()
    for step in range(20, 240, 20):
        lines.add(1, step, SaveLost(step=step, why=f"the snapshot of step {step} gave way to newer ones"))
    lines.add(1, 300, StorageChanged(works=True))
    lines.add(1, 310, SaveLost(step=300, why="the snapshot of step 300 gave way to newer ones"))
    lines.add(1, 320, SaveLost(step=320, why="another reason"))
    moments = life_of(lines.noted).moments
    assert [(one.what, one.text) for one in gathered(moments)] == [
        (
            "11 steps were given up: 20, 40, 60, 80, 100, 120, 140, 160 and 3 more, the last 220",
            "the snapshot of each step gave way to newer ones",
        ),
        ("storage works again", ""),
        ("step 300 was given up", "the snapshot of step 300 gave way to newer ones"),
        ("step 320 was given up", "another reason"),
    ]
    assert len(moments) == 14, "scripts get each"


@pytest.mark.parametrize(
    ("lost", "ends", "told"),
    [
        ((), True, "The run ended (done); step 3,000 is the newest durable step, and nothing is lost."),
        ((500,), True, "step 3,000 is the newest durable step, and nothing is lost: the 1 save that was given up is older."),
        ((500, 3100), True, "step 3,000 is the newest durable step, and the steps after 3,000 are lost: save() had promised 3100."),
        ((500,), False, ", and no promised step after it is lost: the 1 save that was given up is older; 7 steps after it are not durable"),
    ],
)  # fmt: skip
def test_the_headline_answers_whether_it_is_safe(made: ReportContent, lost: tuple[int, ...], ends: bool, told: str) -> None:
    lines = Lines()
    lines.add(1, 0, AttemptBegan(reason="first claim"))
    lines.add(1, 5, Sampled(group="g", step=3000 if ends else 3007, steps=10))
    for step in lost:
        lines.add(1, 6, SaveLost(step=step, why="why"))
    if ends:
        lines.add(1, 9, RunLeft(reason="done"))
    page = render(dataclasses.replace(made, life=life_of(lines.noted)))
    (summary,) = re.findall(r'class="summary">([^<]*)<', page)
    assert told in summary
    assert ends or f"The run has not ended (its last word: {moment(BEGIN_S + 6)})" in summary


def test_all_axes_of_time_have_the_same_times_of_day(made: ReportContent) -> None:
    page = render(made)
    times = [re.findall(r">(\d\d:\d\d)</text>", one) for one in page.split("<h2>") if one.startswith(("Timeline", "Steps over"))]
    assert all(times) and len(times) == 2
    assert {*times[1]} <= {*times[0]}, "the wider zooms have more"
    assert "min since" not in page


def test_hosts_are_told_with_the_names_of_their_machines(made: ReportContent) -> None:
    lines = Lines()
    lines.add(1, 0, Sampled(group="g", step=10, steps=10))
    lines.add(1, 1, Slowed(rank=5, host="77ab01cdef", section="data", by_s=0.1, since_step=9, machine="gpu-node-7"))
    lines.add(1, 2, Noticed(host="3f2a9c11bb", reason="maintenance", within_s=30.0, machine="gpu-node-8"))
    lines.add(1, 3, HostChanged(host="3f2a9c11bb", state="left", machine="gpu-node-8"))
    lines.add(1, 4, HostChanged(host="5a0b4dfa99", state="up"))
    life = life_of(lines.noted)
    told = [
        "rank 5 is slow (host 77ab01cd (gpu-node-7))",
        "notice for host 3f2a9c11 (gpu-node-8), within 30 s",
        "host 3f2a9c11 (gpu-node-8) left as announced",
        "host 5a0b4dfa is up again",
    ]
    assert [one.what for one in life.moments] == told
    page = render(dataclasses.replace(made, life=life))
    assert all(one in page for one in told) and 'data-is="host">77ab01cd (gpu-node-7)<' in page
    facts = facts_of(dataclasses.replace(made, life=life))
    assert [one["machine"] for one in facts["slow_ranks"]] == ["gpu-node-7"]
    assert [one["what"] for one in facts["events"]] == told


def test_hosts_are_named_by_their_first_digits(made: ReportContent) -> None:
    host = "7ca4eebd" + 6 * "4d4b701d"
    lines = Lines()
    lines.add(1, 0, SaveLost(step=1, why=f"rank 1 (host {host}) has no copy of it"))
    lines.add(1, 1, RunLeft(reason="done"))
    page = render(dataclasses.replace(made, life=life_of(lines.noted), notes=(f"its copy on rank 1 (host {host}) is gone",)))
    assert host not in page and page.count("(host 7ca4eebd)") == 3
