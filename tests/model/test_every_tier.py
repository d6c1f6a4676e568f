"""What a restore gives is the same from every tier: values, devices and whether they are bound to them, and memory of XLA's own."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import raystate
from raystate.core.formats.errors import ReferenceMismatchError
from raystate.manager import StateManager
from raystate.restored import Restored
from tests.arrays.test_placing import buffers
from tests.model.test_reshard import play
from tests.model.world import Rank, World

TIERS = ["memory", "peer", "storage", "source"]


def from_tier(tier: str, state: Any, use: Callable[[StateManager, dict[str, Any]], Restored | None]) -> Restored:
    """What `use` gives after `state` was saved as step 1, and as the item "ema".

    Args:
        use: called with a manager, and with the options of `restore_or_init` that name the source.
    """
    world = World(5, ranks=2, nodes=2, save_every_steps=100, check_saves="off")
    folder = Path(tempfile.mkdtemp())
    got: list[Restored | None] = []

    def saves(rank: Rank, manager: StateManager) -> None:
        manager.restore_or_init(lambda: jnp.zeros(1))
        if tier != "source":
            manager.save(1, state, items={"ema": state}, force=tier == "storage")
        if tier == "storage":
            manager.wait_until_finished()
        while tier in ("memory", "peer") and not any(staged.step == 1 for staged in world.held()):
            rank.rest(0.01)

    def restores(rank: Rank, manager: StateManager) -> None:
        restored = use(manager, {"source": folder / "source"} if tier == "source" else {})
        if rank.number == world.ranks - 1:
            got.append(restored)

    try:
        raystate.save(folder / "source", state)
        play(world, 1, "first", saves)
        if tier == "storage":
            world.lose_memory()
        play(world, 2 if tier == "peer" else 1, "second", restores)
    finally:
        world.close()
        shutil.rmtree(folder)
    (restored,) = got
    assert restored is not None and restored.tier == tier
    assert tier == "source" or restored.bytes_from[tier]
    return restored


@pytest.mark.parametrize("tier", TIERS)
def test_a_number_that_the_state_cannot_hold_is_refused(tier: str):
    """`init`'s 0 is an int32 once jit has made it; Python's numbers have no width."""

    def use(manager: StateManager, source: Any) -> Restored:
        with pytest.raises(ReferenceMismatchError, match="tokens: 5000000000 can't be held by int32") as caught:
            manager.restore_or_init(lambda: {"w": jnp.zeros(4), "tokens": 0}, **source)
        assert [path for path, _ in caught.value.differences] == ["tokens"]
        for reference, item in (({"w": jnp.zeros(4, jnp.int8)}, None), (..., {"w": np.zeros(4, np.int8)})):
            if source:
                break
            with pytest.raises(ReferenceMismatchError, match=r"w: 1000\.0 at \[3\] can't be held by int8"):
                manager.restore(reference, items=None if item is None else {"ema": item}, cast=True)
        return manager.restore_or_init(lambda: {"w": jnp.zeros(4, jnp.float32)}, **source)

    restored = from_tier(tier, {"w": jnp.array([0.0, 1.0, -2.0, 1000.0]), "tokens": 5_000_000_000}, use)
    assert restored.state["w"].tolist() == [0, 1, -2, 1000]


def big(fill: float) -> dict[str, Any]:
    return {"w": jnp.full((300, 128), fill), "b": jnp.full(8, fill), "n": jnp.int32(fill), "lr": fill}


@pytest.mark.parametrize("tier", TIERS)
def test_a_jitted_step_takes_what_is_restored_as_it_took_the_fresh_state(tier: str):
    """Beside a batch that is sharded, and donating every buffer."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    batch = jax.device_put(jnp.ones(4), NamedSharding(mesh, P("data")))
    step = jax.jit(lambda state, batch: jax.tree.map(lambda x: x + batch.sum().astype(x.dtype), state))
    fresh = jax.jit(lambda: big(0))()
    restored = from_tier(tier, big(3), lambda manager, source: manager.restore_or_init(lambda: big(0), **source)).state
    for one in (fresh, restored):
        assert not any(leaf.committed for leaf in jax.tree.leaves(one))
        assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(step(one, batch)))
    before = buffers(jax.tree.leaves(restored))
    after = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)(restored)
    assert buffers(jax.tree.leaves(after)) == before
    assert all((leaf == 4).all() for leaf in jax.tree.leaves(after))


def test_a_state_is_bound_to_its_devices_where_inits_own_is():
    other, mesh = jax.devices()[1], jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    put = jax.device_put(jnp.ones(4), other)
    cases: dict[str, tuple[Callable[[], Any], Any]] = {
        "free": (lambda: big(1), None),
        "made of what is bound": (lambda: put * 2, None),
        "constrained": (lambda: jax.lax.with_sharding_constraint(jnp.ones(4), NamedSharding(mesh, P("x"))), None),
        "under a mesh": (lambda: big(1), None),
        "one sharding": (lambda: big(1), SingleDeviceSharding(jax.devices()[0])),
    }
    for name, (init, shardings) in cases.items():
        with jax.set_mesh(mesh) if name == "under a mesh" else contextlib.nullcontext():
            fresh = jax.jit(init, **({} if shardings is None else {"out_shardings": shardings}))()
        for tier in ("memory", "storage"):

            def use(manager: StateManager, _: Any, init: Any = init, shardings: Any = shardings, name: str = name) -> Restored:
                with jax.set_mesh(mesh) if name == "under a mesh" else contextlib.nullcontext():
                    return manager.restore_or_init(init, shardings)

            restored = from_tier(tier, fresh, use).state
            for a, b in zip(jax.tree.leaves(fresh), jax.tree.leaves(restored), strict=True):
                assert (a.committed, a.sharding) == (b.committed, b.sharding), (name, tier)
