"""Who launched a training can see that it saves: processes that wait for a restart start only then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raystate import ConfigError
from raystate.actors.launch_context import GroupStart, LaunchContext, ages, saves_so_far, set_context, summary
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


def test_a_process_that_ray_had_started_before_its_group_is_no_older_than_its_place() -> None:
    now_s = time.time()
    start = GroupStart(asked_s=now_s - 0.002, placed_s=now_s - 0.001)
    set_context(LaunchContext(config=None, group="g", rank=0, world=1, launch="l", start=start))
    try:
        known = dict(ages())
    finally:
        set_context(None)
    assert known["asked"] >= known["placed"] == known["process"]


def test_each_group_of_a_launch_knows_when_the_launch_was_called() -> None:
    start = GroupStart(called_s=time.time() - 60.0)
    known: list[dict[str, float]] = []
    for _ in range(2):
        start.asked()
        set_context(LaunchContext(config=None, group="g", rank=0, world=1, launch="l", start=start))
        try:
            known.append(dict(ages()))
        finally:
            set_context(None)
    assert all(one["called"] >= 60.0 > one["asked"] for one in known)
