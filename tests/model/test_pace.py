"""How long a loop waits that makes steps durable faster than they are written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from raystate.core.messages import HostWord
from raystate.manager.pace import MOST_WAIT_S, NO_PROGRESS_S, StoragePace


@dataclass
class Session:
    """A trainer's, for what the pace asks it. Seconds pass while it waits for a slot."""

    obstacles: list[str] = field(default_factory=list[str])
    fails: bool = False
    now_s: float = 0.0
    asked_s: list[float] = field(default_factory=list[float])
    slot_s: float = 1e9  # when there is one
    durable: list[float] = field(default_factory=list[float])  # when a step becomes so
    forgets: bool = False  # a HostActor that has just started

    @property
    def link(self) -> Any:
        return self

    @property
    def joined(self) -> Any:
        return self

    newest_step = -1
    lineage = "1.2.x"
    is_over = is_left = False
    barrier_timeout_s = 120.0
    hang_timeout_s: float | None = None

    @property
    def config(self) -> Any:
        return self

    def clock(self) -> float:
        return self.now_s

    def host_word(self) -> HostWord:
        return HostWord(grants=(1,), durable_step=-1 if self.forgets else sum(one <= self.now_s for one in self.durable))

    def storage_fails(self) -> bool:
        return self.fails

    def ask_for_obstacle(self, _timeout_s: float) -> str:
        self.asked_s.append(self.now_s)
        return self.obstacles.pop(0) if self.obstacles else ""

    def has_slot(self, limit_s: float) -> bool:
        self.now_s += limit_s
        return self.now_s >= self.slot_s


def waited(pace: StoragePace, session: Session) -> float:
    began_s = session.now_s
    pace.wait_for_slot(session.has_slot)
    return session.now_s - began_s


def test_storage_that_stands_still_costs_seconds_once():
    session = Session()
    pace = StoragePace(session)  # type: ignore[arg-type]
    assert waited(pace, session) == pytest.approx(NO_PROGRESS_S, abs=0.3)
    assert waited(pace, session) == 0.0
    session.durable = [session.now_s]
    assert waited(pace, session) > NO_PROGRESS_S, "it is worth waiting again"


def test_storage_that_fails_costs_nothing():
    session = Session(fails=True, obstacles=["host b away"] * 100)
    assert waited(StoragePace(session), session) <= 0.2  # type: ignore[arg-type]
    assert session.asked_s == []


def test_somebody_who_is_away_is_waited_for():
    session = Session(obstacles=["host b away"] * 100, slot_s=13.0)
    assert waited(StoragePace(session), session) == pytest.approx(13.0, abs=0.2)  # type: ignore[arg-type]
    assert len(session.asked_s) == 3, "a question every four seconds"


def test_nobody_is_waited_for_without_end():
    session = Session(obstacles=["host b away"] * 100)
    pace = StoragePace(session)  # type: ignore[arg-type]
    assert waited(pace, session) == pytest.approx(MOST_WAIT_S, abs=0.3)
    assert waited(pace, session) == 0.0


def test_what_is_over_is_not_waited_for():
    session = Session(obstacles=["host b away", ""])
    assert waited(StoragePace(session), session) == pytest.approx(2 * NO_PROGRESS_S, abs=0.5)  # type: ignore[arg-type]


def test_a_slot_that_comes_every_few_seconds_is_no_progress_of_storage():
    """A save that is due gives way to the next one in the end: the loop went at that pace for as long as storage stood still."""
    session = Session()
    pace, waits = StoragePace(session), list[float]()  # type: ignore[arg-type]
    for _ in range(20):
        session.slot_s = session.now_s + 3.5
        waits.append(waited(pace, session))
    assert sum(waits) == pytest.approx(NO_PROGRESS_S, abs=0.5)


def test_a_host_that_comes_and_goes_does_not_begin_the_wait_anew():
    session = Session(obstacles=["host b away"] * 100, durable=[0.0])
    pace = StoragePace(session)  # type: ignore[arg-type]

    def has_slot(limit_s: float) -> bool:
        session.forgets = int(session.now_s) % 3 == 0
        return session.has_slot(limit_s)

    pace.wait_for_slot(has_slot)
    assert MOST_WAIT_S <= session.now_s <= MOST_WAIT_S + 0.5


@pytest.mark.parametrize(("name", "limit_s"), [("barrier_timeout_s", 24.0), ("hang_timeout_s", 12.0)])
def test_the_wait_ends_before_this_rank_counts_as_late(name: str, limit_s: float):
    session = Session(obstacles=["host b away"] * 100)
    setattr(session, name, limit_s)
    assert waited(StoragePace(session), session) == pytest.approx(6.0, abs=0.5)  # type: ignore[arg-type]


def test_a_manager_that_is_closed_meanwhile_waits_no_more():
    session = Session()
    session.is_over = True
    assert waited(StoragePace(session), session) == 0.0  # type: ignore[arg-type]
