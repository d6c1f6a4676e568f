"""Only some ranks call `save`: an error within the deadline, which names who does not."""

from __future__ import annotations

import numpy as np
import pytest

import raystate
from tests.model.world import Rank, World

DEADLINE_S = 10.0


def test_one_rank_saves_and_the_other_does_not():
    world = World(ranks=2, nodes=2, save_every_steps=1000, barrier_timeout_s=DEADLINE_S)
    waited_s: list[float] = []

    def saves(rank: Rank, manager: raystate.StateManager) -> None:
        for step in range(10_000):
            rank.rest(0.1)
            manager.save(step + 1, {"w": np.zeros(8)})

    def script(rank: Rank) -> None:
        manager = rank.begin()
        began_s = rank.world.now_s
        if rank.number == 0:
            with pytest.raises(raystate.BarrierTimeoutError, match="rank 1"):
                saves(rank, manager)
            waited_s.append(rank.world.now_s - began_s)
        else:
            while not waited_s:
                rank.rest(0.1)

    world.play_all(script)
    assert DEADLINE_S <= waited_s[0] <= 3 * DEADLINE_S
