"""A HostActor or the Coordinator is away for longer than a few seconds while the loop makes one step after the other durable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import raystate
from tests.model.world import Rank, World

AWAY_S = 12.0  # a process that starts on a busy machine
STEPS = 60


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(8, step, np.float32)}


def coordinator(world: World) -> None:
    world.kill_coordinator(AWAY_S)


def host(world: World) -> None:
    struck = next(iter(world.hosts.values()))
    struck.crash()
    world.at(AWAY_S, struck.start)


def both(world: World) -> None:
    """The HostActor dies while the new Coordinator has not yet written anything."""
    coordinator(world)
    world.at(AWAY_S + 0.5, lambda: host(world))


@pytest.mark.parametrize("strike", [coordinator, host, both])
@pytest.mark.parametrize("nodes", [1, 2])
def test_no_promise_is_lost_by_it(strike: Callable[[World], None], nodes: int) -> None:
    """Storage was fine all the time. A drill's run ended with a StorageError that named dozens of steps."""
    world = World(1, ranks=2, nodes=nodes, save_every_steps=1, keep_last=None, save_timeout_s=600.0, barrier_timeout_s=120.0)

    def trains(rank: Rank) -> None:
        manager = rank.open("first")
        manager.restore(state(0))
        for step in range(1, STEPS + 1):
            if step == 10 and rank.number == 0:
                strike(world)
            rank.rest(0.2)
            assert manager.save(step, state(step))
        manager.close()

    try:
        world.run([Rank(world, number, trains) for number in range(2)])
        assert raystate.Reader(world.config.storage).all_steps() == list(range(1, STEPS + 1))
    finally:
        world.close()
