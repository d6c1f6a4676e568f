"""What users of flax and Orbax do with a run, and what is on disk then: read by stock Orbax, which knows nothing of raystate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from orbax.checkpoint import v1

import raystate
from tests.docs.checks import assert_equal, in_memory
from tests.model.world import Rank, World

MODEL = nn.Dense(3)


def init() -> TrainState:
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, 4)))["params"]
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=optax.adamw(1e-2))


def on_disk(world: World, step: int) -> dict[str, np.ndarray]:
    return in_memory(v1.load(f"{world.config.storage.removeprefix('file://')}/{step}"))


def steps_on_disk(world: World) -> list[int]:
    folder = Path(world.config.storage.removeprefix("file://"))
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def play(script: Any) -> None:
    with World(save_every_steps=2, keep_last=9) as world:
        world.play(script)


def test_a_linen_train_state_and_the_kinds_of_its_leaves():
    def script(rank: Rank) -> None:
        manager = rank.open("first")
        state = manager.restore_or_init(init).state
        for step in range(2):
            state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, state.params))
            manager.save(step + 1, state)
        manager.wait_until_finished()
        expected = in_memory({"params": state.params, "opt_state": state.opt_state, "step": state.step})
        assert_equal(expected, on_disk(rank.world, 2))

        abstract = jax.eval_shape(init)
        hosts = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract)
        for step in (None, 2):  # from memory, and from storage
            for reference, kind in ((abstract, jax.Array), (state, jax.Array), (hosts, np.ndarray)):
                restored = manager.restore(reference, step=step)
                assert restored is not None and type(restored.state) is TrainState
                assert type(restored.state.opt_state) is type(state.opt_state)
                assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(restored.state.params))
                assert all(isinstance(leaf, kind) for leaf in jax.tree.leaves(restored.state.opt_state))
                assert_equal(in_memory(state), in_memory(restored.state))
        manager.close()

    play(script)


def test_a_step_that_exists_is_refused_and_a_rollback_saves_it_anew():
    def values(step: int, rate: int) -> dict[str, np.ndarray]:
        return {"w": np.full(3, step * rate, np.float32)}

    def script(rank: Rank) -> None:
        manager = rank.open("first")
        world = rank.world
        manager.restore(values(0, 1))
        for step in range(1, 9):
            manager.save(step, values(step, 1))
            manager.wait_until_finished()
        assert steps_on_disk(world) == [2, 4, 6, 8]

        assert manager.restore(values(0, 1), step=4) is not None
        with pytest.raises(raystate.StepOrderError, match="6"):
            manager.save(6, values(6, 100), force=True)
        assert steps_on_disk(world) == [2, 4, 6, 8]
        assert_equal(values(6, 1), on_disk(world, 6))

        restored = manager.restore(values(0, 1), step=4, rollback=True)
        assert restored is not None
        assert_equal(values(4, 1), restored.state)
        assert steps_on_disk(world) == [2, 4]
        for step in (5, 6):
            manager.save(step, values(step, 100))
        manager.close()
        assert steps_on_disk(world) == [2, 4, 6]
        for step, rate in ((2, 1), (4, 1), (6, 100)):
            assert_equal(values(step, rate), on_disk(world, step))

    play(script)
