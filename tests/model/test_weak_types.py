"""A training that goes on computes in the dtypes that it began with: weak types come back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import raystate
from tests.model.test_uses import run
from tests.model.world import Rank


def init() -> dict[str, Any]:
    """A weak float32, as `jnp.asarray` of a Python number makes it, beside what it must not widen."""
    return {"w": jnp.ones((8,), jnp.bfloat16), "scale": jnp.asarray(1.01), "rates": jnp.full((3,), 0.5), "count": jnp.asarray(2)}


@jax.jit
def train_step(state: dict[str, Any]) -> dict[str, Any]:
    scale = state["scale"] * 1.01
    return {**state, "w": state["w"] * scale + scale + state["count"], "scale": scale, "rates": state["rates"] * 0.9}


def kinds(state: Any) -> Any:
    return jax.tree.map(lambda leaf: (str(leaf.dtype), leaf.weak_type), state)


def equal(a: Any, b: Any) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: x.dtype == y.dtype and np.array_equal(x, y), a, b)))


def test_the_check_sees_weak_types():
    assert kinds(init())["scale"] == ("float32", True)
    assert kinds(init())["count"][1]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("anew", [False, True], ids=["memory", "storage"])
def test_a_run_that_goes_on_computes_as_it_began(anew: bool, sharded: bool):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    shardings = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()) if sharded else None
    undisturbed = init()
    for _ in range(6):
        undisturbed = train_step(undisturbed)

    def script(rank: Rank) -> None:
        state: Any = None
        for opening in range(3):
            if not opening or anew:
                manager = rank.open(f"g{opening}")
            restored = manager.restore_or_init(init, shardings)
            assert kinds(restored.state) == kinds(init())
            assert restored.step == 2 * opening
            assert not opening or restored.tier == ("storage" if anew else "memory")
            state = restored.state
            for step in range(restored.step, restored.step + 2):
                state = train_step(state)
                manager.save(step + 1, state)
            if anew:
                manager.close()
            else:
                manager.wait_until_finished()
        assert kinds(state) == kinds(undisturbed)
        assert equal(state, undisturbed)
        if not anew:
            manager.close()

    run(script, save_every_steps=1)


def test_any_reference_says_what_is_weak(tmp_path: Any):
    raystate.save(tmp_path / "one", {"a": jnp.asarray(1.5), "n": 3, "k": jax.random.key(0)})
    abstract = jax.eval_shape(lambda: {"a": jnp.asarray(1.5), "n": jnp.asarray(1), "k": jax.random.key(0)})
    for reference in (abstract, {"a": jnp.asarray(0.0), "n": jnp.asarray(1), "k": jax.random.key(1)}):
        got = raystate.load(tmp_path / "one", reference)
        assert (got["a"].weak_type, got["n"].weak_type) == (True, True)
        assert (float(got["a"]), int(got["n"])) == (1.5, 3)
    strong = raystate.load(tmp_path / "one", {"a": jax.ShapeDtypeStruct((), jnp.float32), "n": ..., "k": ...})
    assert not strong["a"].weak_type
