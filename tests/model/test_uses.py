"""What a manager does for its user, in one process and without Ray."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from tests.model.world import Rank, World
from tests.orbax.listening import listening


def run(script: Any, *, ranks: int = 1) -> None:
    world = World(1, ranks=ranks, nodes=1, save_every_steps=2)
    try:
        members = [Rank(world, number, script) for number in range(ranks)]
        world.run(members)
        for member in members:
            member.kill()
    finally:
        world.close()


@pytest.mark.parametrize("value", [np.arange(6, dtype=np.int16), 3, jax.numpy.ones(2)], ids=["numpy", "int", "jax"])
def test_row2_the_manager_takes_a_single_value(value: Any):
    def script(rank: Rank) -> None:
        manager = rank.open("first")
        assert manager.restore(value) is None
        assert manager.save(2, value)
        manager.wait_until_finished()
        for restored in (manager.restore(value), manager.restore(value, step=2)):
            assert restored is not None and type(restored.state) is type(value)
            np.testing.assert_array_equal(restored.state, value)

    run(script)


def test_row23_a_run_is_heard_from_its_process_0():
    def count(name: str) -> int:
        return sum(one == name for one, _ in heard)

    def script(rank: Rank) -> None:
        manager = rank.open("first")
        state = {"w": np.zeros(1024, np.uint8)}
        manager.restore(state)
        for step in range(1, 6):
            manager.save(step, state)
            manager.wait_until_finished()
        if rank.number == 0:
            assert count("/jax/orbax/write/async/start") == count("/jax/orbax/write/success") == 2, "of the steps 2 and 4 only"
            assert count("/jax/orbax/write/async/blocking_duration_secs") == 2
            assert dict(heard)["/jax/orbax/write/gbytes"] == pytest.approx(1024 / 2**30)
            assert count("/jax/orbax/read/start") == 1 and count("/jax/orbax/read/success") == 0, "nothing was there"
        manager.restore(state)
        if rank.number == 0:
            assert count("/jax/orbax/read/start") == 2 and count("/jax/orbax/read/success") == 1

    with listening() as heard:
        run(script, ranks=2)
