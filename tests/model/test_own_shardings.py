"""`restore_or_init` without `shardings`: arrays lie where `init`, run as it is written, puts them, at each start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils, nnx
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import raystate
from raystate.manager import StateManager
from raystate.manager.fresh import abstract_state
from raystate.restored import Restored
from tests.arrays.saved import Saved
from tests.arrays.test_spare import compiled
from tests.model.test_every_tier import from_tier
from tests.model.world import World


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((4,), ("x",), (kind,), devices=jax.devices()[:4])


AUTO, EXPLICIT = mesh_of(AxisType.Auto), mesh_of(AxisType.Explicit)
SPLIT, WHOLE = NamedSharding(AUTO, P("x")), NamedSharding(AUTO, P())
HOST = NamedSharding(AUTO, P("x"), memory_kind="pinned_host")
OTHER = jax.devices()[1]
VALUES = np.arange(8, dtype=np.float32)
LOADED = jax.device_put(VALUES, SPLIT)
EXPLICITLY = jax.device_put(VALUES, NamedSharding(EXPLICIT, P("x")))


def weights() -> dict[str, jax.Array]:
    return {"w": jnp.arange(8.0), "b": jnp.ones(4)}


def trained(params: Any) -> dict[str, Any]:
    return {"params": params, "opt": optax.adam(1e-3).init(params), "step": 0}


def linear() -> Any:
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("x", None))
    model = nnx.Linear(8, 8, kernel_init=kernel, rngs=nnx.Rngs(0))
    return nnx.state((model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)))


# name -> (init, the mesh in force, whether it must run to tell where its arrays lie)
INITS: dict[str, tuple[Callable[[], Any], Mesh | None, bool]] = {
    "put last": (lambda: jax.device_put(weights(), SPLIT), None, False),
    "put last, beside a number": (lambda: {"w": jax.device_put(jnp.arange(8.0), SPLIT), "lr": jnp.float32(0.1)}, None, False),
    "put last by names": (lambda: jax.device_put(weights(), P("x")), AUTO, False),
    "put in the host's memory": (lambda: jax.device_put(weights(), HOST), None, False),
    "copied to all": (lambda: jax.device_put(weights(), WHOLE), None, False),
    "put on another device": (lambda: jax.device_put(weights(), OTHER), None, False),
    "constrained": (lambda: jax.lax.with_sharding_constraint(weights(), SPLIT), None, False),
    "a program of its own": (lambda: jax.jit(weights, out_shardings=SPLIT)(), None, False),
    "an explicit mesh": (lambda: trained(jax.device_put(weights(), P("x"))), EXPLICIT, False),
    "nnx": (linear, AUTO, False),
    "replicas for pmap": (lambda: jax_utils.replicate(weights(), jax.devices()[:4]), None, False),
    "pmap": (lambda: jax.pmap(lambda x: {"w": x * 2}, devices=jax.devices()[:4])(jnp.ones((4, 3))), None, False),
    "free": (weights, None, False),
    "closed over, copied to all": (lambda: {"w": jax.device_put(VALUES, WHOLE)}, None, False),
    "an optimizer of what was put": (lambda: trained(jax.device_put(weights(), SPLIT)), None, True),
    "made of what was put": (lambda: jax.tree.map(lambda x: x * 2, jax.device_put(weights(), SPLIT)), None, True),
    "closed over": (lambda: trained({"w": LOADED}), None, True),
    "an optimizer of what is closed over, on an explicit mesh": (lambda: trained({"w": EXPLICITLY}), EXPLICIT, True),
    "made of what is closed over": (lambda: {"w": LOADED * 2}, None, True),
    "from a callback": (lambda: {"w": jax.make_array_from_callback((8,), SPLIT, lambda index: VALUES[index])}, None, True),
    "two devices": (lambda: [jax.device_put(jnp.ones(4), device) for device in jax.devices()[:2]], None, True),
}


def where(state: Any) -> list[Any]:
    """Of each array but numbers, which may lie on all devices that the others have."""

    def of(x: jax.Array) -> Any:
        spread = x.committed, x.sharding.memory_kind, x.sharding.devices_indices_map(x.shape)
        return x.weak_type, spread if x.shape else None

    return [of(x) for x in jax.tree.leaves(state)]


def as_written(init: Callable[[], Any]) -> Any:
    return jax.tree.map(jnp.asarray, init())


@pytest.mark.parametrize("name", INITS)
def test_arrays_lie_where_init_puts_them(name: str):
    init, mesh, must_run = INITS[name]
    ran: list[str] = []

    def noted() -> Any:
        if not isinstance(jnp.zeros(1), Tracer):
            ran.append("for real")
        return init()

    def use(manager: StateManager, _: Any = None) -> Restored:
        with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
            return manager.restore_or_init(noted)

    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        expected = as_written(init)
    got: list[Restored] = []
    world = World(5)
    try:
        world.play(lambda rank: got.append(use(rank.open("first"))))
    finally:
        world.close()
    assert got[0].tier == "init"
    for tier in ("memory", "storage"):
        ran.clear()
        got.append(from_tier(tier, expected, use))
        assert bool(ran) == must_run, "a restart makes no state that it drops, where jit can tell"
    for restored in got:
        assert where(restored.state) == where(expected)
        assert all((a == b).all() for a, b in zip(jax.tree.leaves(restored.state), jax.tree.leaves(expected), strict=True))


def test_a_restart_compiles_no_program_of_a_state_that_lies_anywhere():
    with compiled() as programs:
        abstract_state(INITS["free"][0], None)
    assert not programs


# ---------------------------------------------------------------- abstract leaves without a sharding


def constrained() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return {"w": jax.lax.with_sharding_constraint(jnp.arange(8.0), SPLIT), "keys": jax.device_put(keys, SPLIT)}


def test_an_abstract_leaf_without_a_sharding_has_the_saved_one_as_stock_orbax_has_it(tmp_path: Path):
    """As `jax.eval_shape` gives it on an Auto mesh, where a constraint is no part of a type."""
    state, abstract = constrained(), jax.eval_shape(constrained)
    raystate.save(tmp_path / "ours", state)
    assert v1.load(str(tmp_path / "ours"), abstract)["w"].sharding == SPLIT
    described = raystate.metadata(tmp_path / "ours").trees["state"]
    got = [raystate.load(tmp_path / "ours", asked) for asked in (abstract, described)] + [
        raystate.Reader(tmp_path / "ours").restore(abstract).state
    ]
    got += [from_tier(tier, state, lambda manager, _: manager.restore(abstract)).state for tier in ("memory", "storage")]
    for tree in got:
        for name, array in state.items():
            assert tree[name].committed and tree[name].sharding.is_equivalent_to(array.sharding, 1)


def test_it_goes_onto_the_default_device_where_the_saved_ones_are_not(monkeypatch: pytest.MonkeyPatch):
    saved = Saved({"w": LOADED})
    here = jax.devices()[4:]
    monkeypatch.setattr(jax, "devices", lambda: here)
    got = saved.restore({"w": jax.ShapeDtypeStruct((8,), jnp.float32)})["w"]
    assert not got.committed and len(got.devices()) == 1 and np.array_equal(got, VALUES)


def test_arrays_come_back_into_the_hosts_memory(tmp_path: Path):
    """If the reference says so: the checkpoint doesn't, as little as Orbax's own."""
    state = {"w": jax.device_put(VALUES, HOST), "alone": jax.device_put(VALUES, jax.memory.Space.Host)}
    raystate.save(tmp_path / "ours", state)
    got = [raystate.load(tmp_path / "ours", state)]
    got += [from_tier(tier, state, lambda manager, _: manager.restore(state)).state for tier in ("memory", "storage")]
    for tree in got:
        for name, array in state.items():
            assert tree[name].sharding == array.sharding and tree[name].sharding.memory_kind == "pinned_host"
            assert np.array_equal(tree[name], VALUES)
    assert raystate.load(tmp_path / "ours")["w"].sharding.memory_kind == "device"
