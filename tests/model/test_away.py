"""A HostActor or the Coordinator is away for longer than a few seconds while the loop makes one step after the other durable."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import raystate
from tests.model.world import Rank, World, state

STEPS = 60


def coordinator(world: World, away_s: float) -> None:
    world.kill_coordinator(away_s)


def host(world: World, away_s: float) -> None:
    struck = next(iter(world.hosts.values()))
    struck.crash()
    world.at(away_s, struck.start)


def both(world: World, away_s: float) -> None:
    """The HostActor dies while the new Coordinator has not yet written anything."""
    coordinator(world, away_s)
    world.at(away_s + 0.5, lambda: host(world, away_s))


@pytest.mark.parametrize("strike", [coordinator, host, both])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("away_s", [3.0, 12.0])
@pytest.mark.parametrize("step_s", [0.02, 0.1, 0.2])
def test_no_promise_is_lost_by_it(strike: Callable[[World, float], None], nodes: int, away_s: float, step_s: float) -> None:
    """Storage was fine all the time. A drill's run ended with a StorageError that named dozens of steps."""
    world = World(
        1,
        ranks=2,
        nodes=nodes,
        save_every_steps=1,
        keep_last=None,
        host_timeout_s=10.0,
        save_timeout_s=600.0,
        barrier_timeout_s=120.0,
    )

    def trains(rank: Rank) -> None:
        manager = rank.begin(state(0))
        for step in range(1, STEPS + 1):
            if step == 10 and rank.number == 0:
                strike(world, away_s)
            rank.rest(step_s)
            assert manager.save(step, state(step))
        manager.close()

    with world:
        world.play(trains)
        assert raystate.Reader(world.config.storage).all_steps() == list(range(1, STEPS + 1))
