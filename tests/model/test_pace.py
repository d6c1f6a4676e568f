"""How long a loop waits that makes steps durable faster than they are written, and what a crash costs meanwhile."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import raystate
from raystate.core.formats.messages import HostWord
from raystate.core.formats.settings import most_wait_s
from raystate.manager.pace import StoragePace
from raystate.waits import AT_ONCE_S
from tests.model.world import Rank, World

STEPS, BEGINS, STEP_S = 80, 20, 0.1
MOST_S = AT_ONCE_S + most_wait_s(120.0, None)


@dataclass
class Session:
    """A trainer's, for what the pace asks it. Seconds pass while it waits for a slot."""

    fails_s: float = 1e9  # when storage does
    now_s: float = 0.0
    slot_s: float = 1e9  # when there is one
    durable: list[float] = field(default_factory=list[float])  # when a step becomes so
    forgets: bool = False  # a HostActor that has just started

    @property
    def link(self) -> Any:
        return self

    lineage = "1.2.x"
    is_over = is_left = False
    barrier_timeout_s = 120.0
    hang_timeout_s: float | None = None

    @property
    def config(self) -> Any:
        return self

    @property
    def words(self) -> Any:
        return self

    def clock(self) -> float:
        return self.now_s

    def host_word(self) -> HostWord:
        return HostWord(grants=(1,), durable_step=-1 if self.forgets else sum(one <= self.now_s for one in self.durable))

    def storage_fails(self) -> bool:
        return self.now_s >= self.fails_s

    def has_slot(self, limit_s: float) -> bool:
        self.now_s += limit_s
        return self.now_s >= self.slot_s


def waited(pace: StoragePace, session: Session) -> float:
    began_s = session.now_s
    pace.wait_for_slot(session.has_slot)
    return session.now_s - began_s


def test_a_step_waits_until_it_has_a_slot_or_storage_is_said_to_fail():
    session = Session(slot_s=13.0, fails_s=20.0)
    pace = StoragePace(session)  # type: ignore[arg-type]
    assert waited(pace, session) == pytest.approx(13.0, abs=0.2)
    session.slot_s = 1e9
    assert waited(pace, session) == pytest.approx(7.0, abs=0.2)
    assert waited(pace, session) == 0.0


def test_where_nobody_says_anything_the_wait_ends_once():
    session = Session()
    pace = StoragePace(session)  # type: ignore[arg-type]
    assert waited(pace, session) == pytest.approx(MOST_S, abs=0.3)
    assert waited(pace, session) == 0.0
    session.durable = [session.now_s]
    assert waited(pace, session) == pytest.approx(MOST_S, abs=0.3), "it is worth waiting again"


def test_a_host_that_comes_and_goes_does_not_begin_the_wait_anew():
    session = Session(durable=[0.0])
    pace = StoragePace(session)  # type: ignore[arg-type]

    def has_slot(limit_s: float) -> bool:
        session.forgets = int(session.now_s) % 3 == 0
        return session.has_slot(limit_s)

    pace.wait_for_slot(has_slot)
    assert session.now_s == pytest.approx(MOST_S, abs=0.5)


@pytest.mark.parametrize(("name", "limit_s"), [("barrier_timeout_s", 24.0), ("hang_timeout_s", 12.0)])
def test_the_wait_ends_before_this_rank_counts_as_late(name: str, limit_s: float):
    session = Session()
    setattr(session, name, limit_s)
    assert waited(StoragePace(session), session) == pytest.approx(6.0 + AT_ONCE_S, abs=0.5)  # type: ignore[arg-type]


def test_a_manager_that_is_closed_meanwhile_waits_no_more():
    session = Session()
    session.is_over = True
    assert waited(StoragePace(session), session) == 0.0  # type: ignore[arg-type]


# ---------------------------------------------------------------- what a crash costs, by count


def _out(world: World) -> None:
    world.storage.out = True


def _stuck(world: World) -> None:
    world.stuck = True


def _slow(world: World) -> None:
    world.slow = True


def costs(every: int, begin: Callable[[World], None], *, ranks: int, slots: int = 3) -> tuple[list[int], str]:
    """How many steps a crash would cost, at the end of each step from the moment on in which storage becomes so; and what was lost."""
    world = World(1, ranks=ranks, nodes=ranks, save_every_steps=every, snapshot_slots=slots, barrier_timeout_s=120.0)
    made, found, lost = dict.fromkeys(range(ranks), 0), list[int](), list[str]()

    def newest() -> int:
        held: defaultdict[int, set[int]] = defaultdict(set)
        for one in world.held():
            held[one.step].add(one.rank)
        return max((step for step, by in held.items() if len(by) == ranks), default=-1)

    def trains(rank: Rank) -> None:
        manager = rank.begin()
        for step in range(1, STEPS + 1):
            if step == BEGINS and not rank.number:
                begin(world)
            rank.rest(STEP_S)
            made[rank.number] = step
            while min(made.values()) < step:  # a step is a collective
                rank.rest(0.002)
            if step > BEGINS:
                found.append(step - newest())
            manager.save(step, {"w": np.full(8, step, np.float32)})
        world.storage.out = world.slow = world.stuck = False
        try:
            manager.wait_until_finished()
        except raystate.StorageError as error:
            lost.append(str(error))
        manager.close()

    world.play_all(trains)
    return found, "".join(lost)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("begin", [_out, _stuck, _slow], ids=["out", "stuck", "slow"])
def test_a_crash_costs_few_steps_whatever_storage_does(begin: Callable[[World], None], every: int, ranks: int):
    """It cost up to 45: promised steps held all slots. What one step costs beside its own: the one in flight, and where two ranks
    skip different ones, one more of each."""
    found, lost = costs(every, begin, ranks=ranks)
    assert max(found) <= 2 * ranks + (every == 3)
    assert sum(one > 1 for one in found) < len(found) * 3 / 4
    assert bool(lost) != (begin is _slow), "storage that makes progress is waited for, and loses no promised step"


def test_a_crash_costs_few_steps_with_two_slots():
    assert max(costs(2, _out, ranks=1, slots=2)[0]) <= 3


def test_slow_storage_holds_up_snapshots_from_one_due_step_to_the_next_at_most():
    found, lost = costs(10, _slow, ranks=1)
    assert max(found) <= 10 and not lost
