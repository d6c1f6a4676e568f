"""How a drill is held against its run's ledger, with lines that are made up. tests/cluster/test_drill.py does it with real ones."""

from __future__ import annotations

from typing import Any

import pytest

from jobs.drill.outcomes import Before, Outcome
from jobs.drill.table import KIND_NAMES
from raystate.observe.goodput import CAUSES
from raystate.observe.ledger.lines import (
    AttemptBegan,
    CoordinatorStood,
    GroupEnded,
    GroupJoined,
    HostChanged,
    Hung,
    Line,
    LoggedRecovery,
    Noted,
    Noticed,
    RunLeft,
    SaveLost,
    StorageChanged,
)
from tests.record.accounting import Accounting, account, told


def before(**facts: Any) -> Before:
    return Before(**{"alive": True, "trained": 50, "stable": 49, "durable": 40, "phase": "idle", **facts})


def outcome(**facts: Any) -> Outcome:
    return Outcome(**{"number": 1, "kind": "trainer", "aim": "any", "target": "rank 0", "before": before(), **facts})


DIED, OTHER = "the process of rank 1 died", "the process of rank 0 died"


def recovery(cause: str) -> LoggedRecovery:
    return LoggedRecovery(attempt=1, group="g2", cause=cause, step=3, tier="memory", seconds=1.0, steps_repeated=0)


def down(host: str) -> HostChanged:
    return HostChanged(host=host, state="down", why="its node is gone")


RIGHT_AND_WRONG: list[tuple[str, Line, Line]] = [
    ("trainer", recovery(DIED), recovery(OTHER)),
    ("trainer", GroupEnded(group="g", how="died", cause=DIED), GroupEnded(group="g", how="hung", cause="rank 1 made no step")),
    ("stop-trainer", Hung(group="g", ranks=(0, 1)), Hung(group="g", ranks=(0,))),
    ("host", HostChanged(host="n1", state="new"), HostChanged(host="n2", state="new")),
    ("stop-host", down("n1"), HostChanged(host="n1", state="up")),
    ("coordinator", AttemptBegan(reason="claimed after attempt 1"), CoordinatorStood(seconds=4.0)),
    ("stop-coordinator", CoordinatorStood(seconds=4.0), down("n1")),
    ("node", down("n1"), down("n2")),
    ("stop-node", down("n1"), recovery(DIED)),
    ("shrink", down("n1"), HostChanged(host="n1", state="new")),
    ("drain", Noticed(host="n1", reason="Ray drains it"), Noticed(host="n2", reason="Ray drains it")),
    ("outage", StorageChanged(works=False, why="disk full"), StorageChanged(works=True)),
    ("stall", StorageChanged(works=False, why="it stands still"), SaveLost(step=3, why="gave way")),
]


@pytest.mark.parametrize(("kind", "right", "wrong"), RIGHT_AND_WRONG)
def test_a_fault_is_told_by_its_own_line_in_its_own_time(kind: str, right: Line, wrong: Line) -> None:
    one = outcome(number=4, kind=kind, node="n1", rank=1, struck_s=100.0, over_s=110.0)
    noise, after = Noted(1, 1, 50.0, right), Noted(1, 9, 120.0, right)
    works = Noted(1, 1, 60.0, StorageChanged(works=True))
    found = told([noise, works, Noted(1, 2, 105.0, wrong), Noted(1, 3, 106.0, right), after], one)
    assert (found.number, found.kind, found.is_right) == (4, kind, True) and found.cause
    found = told([noise, works, Noted(1, 2, 105.0, wrong), after], one)
    assert not found.is_right and found.cause, "another cause is named"
    found = told([noise, works, after], one)
    assert not found.is_right and not found.cause


def test_storage_that_failed_already_when_it_was_struck_is_told_of() -> None:
    one = outcome(kind="stall", struck_s=100.0, over_s=110.0)
    fails = Noted(1, 1, 95.0, StorageChanged(works=False, why="it is too slow"))
    assert told([fails, Noted(1, 3, 108.0, StorageChanged(works=True))], one).is_right
    assert not told([fails, Noted(1, 3, 97.0, StorageChanged(works=True))], one).is_right


def test_each_kind_of_fault_has_a_line() -> None:
    assert {kind for kind, _, _ in RIGHT_AND_WRONG} | {"clock"} == set(KIND_NAMES)


def test_of_a_clock_that_jumps_the_ledger_tells_nothing() -> None:
    one = outcome(kind="clock", node="n1", struck_s=100.0, over_s=110.0)
    assert told([Noted(1, 1, 105.0, SaveLost(step=3, why="gave way"))], one).is_right
    assert not told([Noted(1, 1, 105.0, GroupEnded(group="g", how="died", cause=DIED))], one).is_right


def accounted(driver_s: float = 100.0, lines: tuple[tuple[float, Line], ...] = (), unknown_s: float = 0.0) -> Accounting:
    """Of a run of 100 s, with one fault."""
    whole: list[tuple[float, Line]] = [
        (0.0, AttemptBegan(reason="first claim")),
        (5.0, GroupJoined(group="g", world=2)),
        (99.0, GroupEnded(group="g", how="ended", cause="")),
        (100.0, RunLeft(reason="all ranks have closed")),
        *lines,
    ]
    noted = [Noted(1, number, at_s, what) for number, (at_s, what) in enumerate(sorted(whole, key=lambda one: one[0]))]
    found = account(noted, [outcome(rank=1, struck_s=50.0, over_s=60.0, seconds=1.0, safe_s=0.1)], driver_s)
    seconds = {**found.seconds_by_cause, "unknown": unknown_s}
    seconds["start"] -= unknown_s
    return Accounting(driver_s=driver_s, seconds_by_cause=seconds, told=found.told)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lines": ((55.0, recovery(DIED)),)}, []),
        ({"lines": ((55.0, recovery(DIED)),), "driver_s": 100.9, "unknown_s": 0.9}, []),
        ({"lines": ((55.0, recovery(DIED)),), "driver_s": 103.0}, ["100.0 s, and the driver measured 103.0 s (-2.9%)"]),
        ({"lines": ((55.0, recovery(DIED)),), "driver_s": 97.0}, ["100.0 s, and the driver measured 97.0 s (+3.1%)"]),
        ({"lines": ((55.0, recovery(DIED)),), "unknown_s": 2.5}, ["of 2.5 s (2.5%) the ledger does not tell the cause"]),
        ({}, ["of fault 1 (trainer) the ledger tells nothing"]),
        ({"lines": ((55.0, recovery(OTHER)),)}, [f"of fault 1 (trainer) the ledger tells {OTHER}"]),
    ],
)
def test_an_accounting_that_is_off_does_not_hold(given: dict[str, Any], said: list[str]) -> None:
    found = accounted(**given)
    assert set(found.seconds_by_cause) == set(CAUSES)
    problems = found.problems()
    assert len(problems) == len(said) and all(text in problem for text, problem in zip(said, problems, strict=True))
    assert found.sum_s == pytest.approx(100.0)
