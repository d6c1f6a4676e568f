"""A rank hangs in any call, or between two, while another is in any call: that one ends once the Coordinator knows, and names it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from raystate.core.formats.errors import RaystateError
from raystate.manager import StateManager
from tests.model.world import Rank, World, state

BARRIER_S = 20.0
MARGIN_S = 12.0  # reports, the tick, and two looks of a rank
FOREVER_S = 100_000.0
HUNG = 1  # this rank

Call = Callable[[StateManager, int], Any]


def _save(manager: StateManager, step: int) -> None:
    manager.save(step, state(step))


def _saves(manager: StateManager, step: int) -> None:
    """Due ones: there are more than slots."""
    for one in range(step, step + 60):
        manager.save(one, state(one))
        manager._session.link.rest(seconds=1.0)


def _waits(manager: StateManager, step: int) -> None:
    for one in range(step, step + 4):
        manager.save(one, state(one))
    manager.wait_until_finished()


def _preemption(manager: StateManager, step: int) -> None:
    for one in range(step, step + 60):
        manager.save(one, state(one))
        manager._session.link.rest(seconds=1.0)
        if manager.reached_preemption(one):
            return


def _close(manager: StateManager, step: int) -> None:
    for one in range(step, step + 4):
        manager.save(one, state(one))
    manager.close()


CALLS: dict[str, Call] = {
    "saves": _saves,
    "wait_until_finished": _waits,
    "reached_preemption": _preemption,
    "restore": lambda manager, _: manager.restore(state(0)),
    "restore_or_init": lambda manager, _: manager.restore_or_init(lambda: state(0)),
    "rollback": lambda manager, _: manager.restore(state(0), step=1, rollback=True),
    "delete": lambda manager, _: manager.delete(1),
    "close": _close,
}
SHOWN = ("wait_until_finished", "close")  # what `make test` plays
HANGS: dict[str, Call] = {"between two calls": lambda _manager, _step: None, "save": _save, **CALLS}


@contextlib.contextmanager
def hanging(rank: Rank, rests: int) -> Iterator[None]:
    """The rank stands still for ever at its n-th rest from now, or at the end of the call."""
    link: Any = rank.link
    real, left = link.rest, [rests]

    def rest(*args: Any, **more: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            rank.rest(FOREVER_S)
        real(*args, **more)

    link.rest = rest
    with contextlib.suppress(RaystateError):
        yield
    rank.rest(FOREVER_S)


def _play(call: Call, hang: Call, *, rests: int, launched: bool, seed: int) -> str:
    """What the other rank is told; "" if its call simply returned."""
    world = World(
        seed, ranks=2, nodes=2, barrier_timeout_s=BARRIER_S, save_timeout_s=600.0, restore_timeout_s=40.0, start_timeout_s=300.0,
        save_every_steps=1, keep_last=None,
    )  # fmt: skip
    told: list[str] = []

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0), launched=launched)
        for step in range(1, 7):
            manager.save(step, state(step))
            rank.rest(0.1)
        manager.wait_until_finished()
        if rank.number == HUNG:
            with hanging(rank, rests):
                hang(manager, 7)
        began_s = world.now_s
        error = ""
        try:
            call(manager, 7)
        except RaystateError as caught:
            error = f"{type(caught).__name__}: {caught}"
            manager.__exit__(type(caught), caught, None)
        took_s = world.now_s - began_s
        told.append(error)
        assert took_s < 2 * BARRIER_S + MARGIN_S, f"it took {took_s:.0f} s: {error or 'no error'}"
        world.playing[HUNG].kill()

    with world:
        world.play(script)
    return told[0]


@pytest.mark.parametrize("hang", HANGS)
@pytest.mark.parametrize("call", [pytest.param(call, marks=() if call in SHOWN else pytest.mark.more) for call in CALLS])
def test_each_call_ends_once_the_coordinator_knows_of_the_rank_that_hangs(call: str, hang: str) -> None:
    for rests in (0, 3):
        launched = bool(rests) == (len(hang) % 2 == 0)
        told = _play(CALLS[call], HANGS[hang], rests=rests, launched=launched, seed=rests)
        assert not told or f"rank {HUNG}" in told, told
