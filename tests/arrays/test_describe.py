"""Leaves to layout: kinds, pieces, the fast path and what is refused."""

import enum

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from raystate.arrays.stage import array_leaves
from raystate.arrays.tree import describe
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.tree import ArraySpec, Layout, LeafSpec


def _array(leaf: LeafSpec) -> ArraySpec:
    assert leaf.array is not None
    return leaf.array


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",))


def _state(mesh, value=1.0, step=3):
    sharded = NamedSharding(mesh, P("x"))
    return {
        "params": {"w": jax.device_put(jnp.full((16, 4), value), sharded), "b": jnp.full((3,), value, jnp.bfloat16)},
        "opt": optax.adam(1e-3).init({"w": jnp.zeros(5)}),
        "step": step,
        "name": "run",
        "table": np.arange(6, dtype=np.int16).reshape(2, 3),
        "np scalar": np.int32(7),
        "none": None,
        "nothing": [],
        "key": jax.random.key(1),
    }


def test_kinds_values_and_arrays(mesh):
    described = describe({"state": _state(mesh), "ema": {"w": jnp.ones(2)}}, process_index=0)
    ema, state = described.layout.trees
    assert (ema.item, state.item) == ("ema", "state")
    leaves = {leaf.name: leaf for leaf in state.leaves}
    assert {name: leaf.kind for name, leaf in leaves.items()} == {
        "key": "array",
        "name": "string",
        "none": "none",
        "nothing": "list",
        "np scalar": "array",
        "opt.0.count": "array",
        "opt.0.mu.w": "array",
        "opt.0.nu.w": "array",
        "opt.1": "none",
        "params.b": "array",
        "params.w": "array",
        "step": "scalar",
        "table": "array",
    }
    w, table, key = (_array(leaves[name]) for name in ("params.w", "table", "key"))
    assert (w.shape, w.dtype, w.chunk, w.typestr) == ((16, 4), "float32", (2, 4), "jax.Array")
    assert (table.shape, table.dtype, table.chunk, table.typestr) == ((2, 3), "int16", (2, 3), "np.ndarray")
    assert (key.shape, key.dtype, key.key_impl) == ((2,), "uint32", "threefry2x32")
    assert _array(leaves["params.b"]).dtype == "bfloat16"
    assert _array(leaves["np scalar"]).shape == ()
    assert described.values == ((), ("run", 3))
    filled = state.with_values(described.values[1])
    assert [leaf.value for leaf in filled.leaves if leaf.kind in ("scalar", "string")] == ["run", 3]
    assert Layout.from_bytes(described.layout_bytes) == described.layout
    assert len(array_leaves(described, 1)) == sum(leaf.kind == "array" for leaf in state.leaves)


def test_pieces_do_not_overlap_and_are_aligned(mesh):
    layout = describe({"state": _state(mesh)}, process_index=0).layout
    end = 0
    for piece in layout.pieces:
        assert piece.offset % 64 == 0
        assert piece.offset >= end
        end = piece.offset + piece.nbytes
        array = _array(layout.trees[piece.tree].leaves[piece.leaf])
        assert piece.nbytes == np.prod(piece.shape, dtype=int) * np.dtype(array.dtype).itemsize
    assert layout.data_bytes == end


def test_replicas_are_kept_once(mesh):
    replicated = jax.device_put(jnp.ones((4, 4)), NamedSharding(mesh, P()))
    layout = describe({"state": {"a": replicated}}).layout
    assert [(piece.shape, piece.owned) for piece in layout.pieces] == [((4, 4), True)]


def test_numpy_belongs_to_process_0_only():
    assert [p.owned for p in describe({"state": {"a": np.ones(3)}}, process_index=1).layout.pieces] == [False]
    assert [p.owned for p in describe({"state": {"a": np.ones(3)}}, process_index=0).layout.pieces] == [True]


def test_the_same_structure_keeps_the_plan_and_takes_the_new_values(mesh):
    first = describe({"state": _state(mesh, 1.0, 3)})
    second = describe({"state": _state(mesh, 2.0, 4)}, previous=first.plan)
    assert second.plan is first.plan
    assert second.values == (("run", 4),)
    assert np.asarray(array_leaves(second, 0)[-2]).flat[0] == 2.0
    assert first.layout_hash == second.layout_hash


@pytest.mark.parametrize(
    "change",
    [
        {"step": 3.0},
        {"step": jnp.int32(3)},
        {"none": 1},
        {"nothing": ()},
        {"table": np.zeros((2, 3), np.int32)},
        {"table": np.zeros((3, 3), np.int16)},
        {"more": 1},
        {"np scalar": np.int64(7)},
        {"key": jax.random.key(1, impl="rbg")},
    ],
    ids=lambda change: f"{next(iter(change))}-{next(iter(change.values()))!r:.12}",
)
def test_another_structure_makes_a_new_plan(mesh, change):
    first = describe({"state": _state(mesh)})
    second = describe({"state": {**_state(mesh), **change}}, previous=first.plan)
    assert second.plan is not first.plan


def test_another_sharding_process_or_item_makes_a_new_plan(mesh):
    array = jnp.ones((8, 8))
    first = describe({"state": {"a": jax.device_put(array, NamedSharding(mesh, P("x")))}}, process_index=0)
    other = {"a": jax.device_put(array, NamedSharding(mesh, P(None, "x")))}
    assert describe({"state": other}, process_index=0, previous=first.plan).layout_hash != first.layout_hash
    same = {"a": jax.device_put(array, NamedSharding(mesh, P("x")))}
    assert describe({"state": same}, process_index=1, previous=first.plan).plan is not first.plan
    assert describe({"other": same}, process_index=0, previous=first.plan).plan is not first.plan


def test_the_plan_does_not_keep_arrays_alive():
    import gc
    import weakref

    described = describe({"state": {"a": jnp.ones(1000)}})
    array = weakref.ref(described.leaves[0])
    plan = described.plan
    del described
    gc.collect()
    assert array() is None
    assert plan is not None


@pytest.mark.parametrize(
    ("leaf", "what"),
    [
        (object(), "object"),
        (b"bytes", "bytes"),
        (1 + 2j, "complex"),
        (np.array(["a"]), "dtype"),
        (np.array([object()]), "dtype"),
        (np.zeros(3, "datetime64[s]"), "dtype"),
        (np.zeros(2, ml_dtypes.uint4), "dtype uint4"),
        (2**63, "64 bits"),
        (jax.ShapeDtypeStruct((1,), jnp.float32), "ShapeDtypeStruct"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_leaf_that_cannot_be_kept_is_named(leaf, what):
    with pytest.raises(RaystateError, match=what) as caught:
        describe({"state": {"a": [1, {"b": leaf}]}})
    assert caught.value.path == "a/1/b"
    assert "a/1/b" in str(caught.value)
    assert caught.value.item == "state"


class Phase(enum.IntEnum):
    WARMUP = 1
    HUGE = 2**63


class Rate(float):
    def __repr__(self) -> str:
        return "a rate"


class Mode(str, enum.Enum):  # noqa: UP042 - whose str() is not its text
    FAST = "fast"


def test_subclasses_of_python_scalars_are_kept_as_these():
    """`in range(…)` walks the range for a subclass of int: the process stood still."""
    state = {"mode": Mode.FAST, "phase": Phase.WARMUP, "rate": Rate(0.5), "w": np.ones(1)}
    first = describe({"state": state})
    again = describe({"state": {**state, "rate": Rate(0.25)}}, previous=first.plan)
    assert again.plan is first.plan
    for described, rate in ((first, 0.5), (again, 0.25)):
        ((mode, phase, got),) = described.values
        assert (type(mode), type(phase), type(got)) == (str, int, float)
        assert (mode, phase, got) == ("fast", 1, rate)
    with pytest.raises(RaystateError, match="64 bits"):
        describe({"state": {"phase": Phase.HUGE}})


@pytest.mark.parametrize("tree", [{}, [], None], ids=str)
def test_a_tree_must_hold_something(tree):
    with pytest.raises(RaystateError, match="nothing to keep"):
        describe({"state": tree})


def test_two_paths_with_one_name_are_refused():
    with pytest.raises(RaystateError, match=r"same name 'a\.b'"):
        describe({"state": {"a.b": np.ones(1), "a": {"b": np.ones(1)}}})
