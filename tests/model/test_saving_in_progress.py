"""`is_saving_in_progress`: what one rank may ask alone, at every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import raystate
from raystate.core.formats.messages import FlushAsked
from tests.model.world import ModelLink, Rank, World, state

MOST_S = 120.0  # of the world's


def play(world: World, script: Callable[[Rank], None]) -> None:
    world.play_all(script)


def until_decided(rank: Rank, manager: raystate.StateManager) -> None:
    deadline_s = rank.world.now_s + MOST_S
    while manager.is_saving_in_progress():
        assert rank.world.now_s < deadline_s, "it never ends"
        rank.rest(0.02)


@pytest.mark.parametrize("seed", range(3))
def test_in_progress_until_the_step_is_on_disk(seed: int):
    world = World(seed, ranks=2, nodes=2, save_every_steps=100)
    world.slow = True

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        assert not manager.is_saving_in_progress()
        assert not manager.save(1, state(1)), "nothing is due"
        assert not manager.is_saving_in_progress()
        assert manager.save(2, state(2), force=True)
        assert manager.is_saving_in_progress()
        if rank.number == 0:  # the other one never asks
            until_decided(rank, manager)
            assert np.array_equal(raystate.load(world.config.storage)["w"], state(2)["w"])
        manager.close()

    play(world, script)


def test_a_save_that_a_restore_gave_up_is_in_progress_no_more():
    world = World(ranks=2, save_every_steps=100)

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        manager.save(1, state(1), force=True)
        manager.wait_until_finished()
        world.stuck = True
        manager.save(2, state(2), force=True)
        assert manager.is_saving_in_progress()
        manager.restore(state(0), step=1)
        until_decided(rank, manager)
        world.stuck = False
        manager.wait_until_finished()  # the restore has ended that promise
        manager.close()

    play(world, script)


def test_a_coordinator_that_dies_meanwhile():
    world = World(save_every_steps=100)

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        world.storage.out = True
        manager.save(2, state(2), force=True)
        world.kill_coordinator()
        assert manager.is_saving_in_progress()
        world.storage.out = False
        until_decided(rank, manager)
        assert manager.latest_step() == 2
        manager.close()

    play(world, script)


@pytest.mark.parametrize("close", [False, True])
def test_a_step_that_was_durable_long_ago_is_not_lost_with_the_coordinator(close: bool):
    """It is retired since, and no rank has waited for it: the log knows."""
    world = World(ranks=2, nodes=2, save_every_steps=100, keep_last=2)

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        for step in range(1, 13):
            assert manager.save(step, state(step), force=True)
            until_decided(rank, manager)
        if rank.number == 0:
            world.kill_coordinator()
        if not close:
            until_decided(rank, manager)
            manager.wait_until_finished()
        manager.close()

    play(world, script)


def test_a_loop_that_asks_all_the_time_costs_the_coordinator_little(monkeypatch: pytest.MonkeyPatch):
    asked: list[float] = []
    real = ModelLink.ask

    def counted(self: ModelLink, event: Any, timeout_s: float) -> Any:
        if isinstance(event, FlushAsked):
            asked.append(self.clock())
        return real(self, event, timeout_s)

    monkeypatch.setattr(ModelLink, "ask", counted)
    world = World(save_every_steps=100)
    world.slow = True

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        manager.save(1, state(1), force=True)
        began_s = world.now_s
        until_decided(rank, manager)
        assert 1 <= len(asked) <= 1 + (world.now_s - began_s) / 0.1
        asked.clear()
        for _ in range(50):
            assert not manager.is_saving_in_progress()
            rank.rest(0.1)
        assert asked == [], "it is decided"
        manager.close()

    play(world, script)
