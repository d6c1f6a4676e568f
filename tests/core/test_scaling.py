"""What an event costs doesn't grow with the number of hosts, unless it concerns all of them: the work of a whole step grows like the hosts.

Work is counted as lines of Python that run in raystate.core: that doesn't depend on the machine.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from raystate.core.formats.messages import FlushReply, JoinReply
from tests.core.fleet import PHASES, ready

pytestmark = pytest.mark.timeout(1200)  # counting is slow, on a busy machine very

FEW, MANY = 16, 4096
LINES_OF_A_FATE = 50
GROWTH = 1.6  # work for each host with MANY hosts, as a multiple of that with FEW


class Work:
    """Lines of raystate.core that have run, by function."""

    def __init__(self) -> None:
        self.lines: dict[str, int] = {}

    @property
    def total(self) -> int:
        return sum(self.lines.values())

    @contextmanager
    def counted(self) -> Iterator[None]:
        lines = self.lines

        def trace(frame: Any, event: str, _: Any) -> Any:
            code = frame.f_code
            if "/raystate/core/" not in code.co_filename:
                return None
            if event == "line":
                name = code.co_qualname
                lines[name] = lines.get(name, 0) + 1
            return trace

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(None)


@pytest.fixture(scope="module")
def works() -> dict[tuple[str, int], Work]:
    """What each phase costs with few hosts and with many."""
    found: dict[tuple[str, int], Work] = {}
    for count in (FEW, MANY):
        fleet = ready(count)
        for name, phase in PHASES.items():
            work = found[name, count] = Work()
            with work.counted():
                phase(fleet)
    return found


def test_what_each_rank_is_told_of_a_group_does_not_grow():
    told = {count: ready(count).replies(JoinReply) for count in (FEW, 16 * FEW)}
    sizes = {count: max(len(pickle.dumps(one)) for one in replies) for count, replies in told.items()}
    assert [len(replies) for replies in told.values()] == list(told)
    assert max(sizes.values()) <= min(sizes.values()) + 8, sizes


def test_a_report_that_comes_alone_costs_no_more_beside_many_hosts():
    lines: dict[int, int] = {}
    for count in (FEW, 16 * FEW):
        fleet = ready(count)
        fleet.say(2, pending=(2,))
        work = Work()
        with work.counted():
            fleet.core.handle(fleet.waiting[0], fleet.now_s)
        lines[count] = work.total
    assert lines[16 * FEW] <= 1.1 * lines[FEW], lines


@pytest.mark.parametrize("name", PHASES)
def test_work_for_each_host_does_not_grow(name: str, works: dict[tuple[str, int], Work]):
    few, many = works[name, FEW], works[name, MANY]
    grown = {
        where: f"{few.lines.get(where, 0) / FEW:.1f} -> {lines / MANY:.1f}"
        for where, lines in many.lines.items()
        if lines / MANY > 2 + GROWTH * few.lines.get(where, 0) / FEW
    }
    print(f"{name}: {few.total / FEW:.0f} lines for each of {FEW} hosts, {many.total / MANY:.0f} for each of {MANY}")  # noqa: T201
    assert many.total / MANY <= GROWTH * few.total / FEW, grown
    assert not grown


def test_a_look_at_who_waits_costs_ranks_plus_promises():
    """Not their product: a look that takes longer than the time between two ticks leaves no time for what it waits for."""
    works: dict[tuple[int, int], int] = {}
    for ranks, promises in ((FEW, 1), (FEW, 64), (16 * FEW, 1), (16 * FEW, 64)):
        fleet = ready(ranks)
        steps = range(2, 2 + promises)
        fleet.say(1 + promises, pending=tuple(steps))
        for rank in range(ranks):
            fleet.flush(rank, *map(fleet.key, steps))
        fleet.settle()
        work = Work()
        with work.counted():
            fleet.tick()
            fleet.settle()
        assert not fleet.replies(FlushReply)
        works[ranks, promises] = work.total
    for ranks in (FEW, 16 * FEW):
        assert works[ranks, 64] <= works[ranks, 1] + 64 * LINES_OF_A_FATE, works
