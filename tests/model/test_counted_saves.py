"""Who launched a training can see that it saves: processes that wait for a restart start only then."""

from __future__ import annotations

import numpy as np
import pytest

from raystate import ConfigError
from raystate.launch_context import saves_so_far, set_context
from tests.model.world import Rank, World


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
    world = World(1, ranks=1, nodes=1, save_every_steps=100)
    try:
        member = Rank(world, 0, script)
        world.run([member])
        member.kill()
    finally:
        world.close()
    assert seen == [1, 2, 2]
    set_context(None)
    assert saves_so_far() == 0
