"""Whoever asks a Coordinator how it is does it no harm."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from raystate.core.coordinator.machine import Coordinator
from raystate.observe.pace import Pace
from raystate.observe.status import RunStatus, status_of
from tests.model.world import Rank, World

STATE = {"w": np.zeros(3)}


def test_a_look_that_fails_or_is_not_waited_for():
    world = World(save_every_steps=1)
    found: list[RunStatus] = []
    errors: list[BaseException | None] = []

    def shown(machine: Coordinator, now_s: float) -> RunStatus:
        return status_of(machine, now_s, Pace())

    def fails(machine: Coordinator, now_s: float) -> None:
        raise ZeroDivisionError

    def script(rank: Rank) -> None:
        manager = rank.begin(STATE)
        coordinator = world.coordinator
        assert coordinator is not None
        assert coordinator.look(shown).cancel()
        failing, good = coordinator.look(fails), coordinator.look(shown)
        manager.save(1, STATE)
        manager.wait_until_finished()
        errors.append(failing.exception(0))
        found.append(good.result(0))
        assert world.coordinator is coordinator and not coordinator.ended, "it goes on"
        found.append(_later(coordinator.look(shown), rank))
        manager.close()

    world.play_all(script)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert [one.training for one in found] == [True, True]
    assert found[1].durable_step == 1


def _later(future: Future[RunStatus], rank: Rank) -> RunStatus:
    while not future.done():
        rank.rest(0.01)
    return future.result(0)
