"""Who launched a training can see that it saves: processes that wait for a restart start only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raystate import ConfigError
from raystate.actors.launch_context import LaunchContext, saves_so_far, set_context, summary
from tests.model.world import Rank, World


def play(script: Callable[[Rank], None]) -> None:
    """One rank with this script, in a run of its own."""
    with World(save_every_steps=100) as world:
        world.play(script)


def test_each_save_that_is_not_refused_counts():
    seen: list[int] = []

    def script(rank: Rank) -> None:
        state = {"w": np.arange(3)}
        with rank.open("first") as manager:
            manager.restore(state)
            for step in (1, 2):
                manager.save(step, state)
                seen.append(saves_so_far())
            with pytest.raises(ConfigError):
                manager.save(-1, state)
            seen.append(saves_so_far())

    set_context(None)
    play(script)
    assert seen == [1, 2, 2]
    set_context(None)
    assert saves_so_far() == 0


@pytest.mark.parametrize("saved", [False, True])
def test_the_launcher_hears_whether_anything_was_saved(saved: bool):
    """A loop that forgot `save` looks as fine as any other: `fit` says so at the end."""

    def script(rank: Rank) -> None:
        set_context(LaunchContext(config=rank.world.config, group="first", rank=0, world=1, launch="l"))
        with rank.open("first") as manager:
            state = manager.restore_or_init(lambda: {"w": np.arange(3)}).state
            if saved:
                manager.save(1, state)
        facts.update(summary())

    facts: dict[str, Any] = {}
    try:
        play(script)
    finally:
        set_context(None)
    assert facts["step"] == (1 if saved else -1)
