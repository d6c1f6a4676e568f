"""A loop that saves rarely is not taken for one that hangs, whatever it calls meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raystate.manager import StateManager
from tests.model.world import Rank, Violation, World, state

HANG_S = 6.0

CALLS: dict[str, Callable[[StateManager], object]] = {
    "reached_preemption": lambda manager: manager.reached_preemption(1),
    "should_save": lambda manager: manager.should_save(2),
    "latest_step": lambda manager: manager.latest_step(),
    "all_steps": lambda manager: manager.all_steps(),
    "best_step": lambda manager: manager.best_step("loss", "min"),
    "metadata": lambda manager: manager.metadata(1),
    "check_for_errors": lambda manager: manager.check_for_errors(),
    "is_saving_in_progress": lambda manager: manager.is_saving_in_progress(),
    "wait_until_finished": lambda manager: manager.wait_until_finished(),
}


def played(call: Callable[[StateManager], object]) -> None:
    """Saves once, and then makes only this call for several times as long as a hang takes."""

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        manager.save(1, state(1), metrics={"loss": 1.0}, force=True)
        manager.wait_until_finished()
        until_s = rank.world.now_s + 4 * HANG_S
        while rank.world.now_s < until_s:
            call(manager)
            rank.rest(HANG_S / 4)
        manager.close()

    with World(hang_timeout_s=HANG_S) as world:
        world.run([Rank(world, 0, script)])


@pytest.mark.parametrize("name", CALLS)
def test_each_call_is_a_sign_of_life(name: str) -> None:
    played(CALLS[name])


def test_a_loop_that_calls_nothing_is_ended() -> None:
    with pytest.raises(Violation, match="is ended by its host"):
        played(lambda _: None)
