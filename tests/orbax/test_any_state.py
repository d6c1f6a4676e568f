"""Random states through memory and storage: every container, dtype, shape and sharding, numbers and texts at their limits."""

from __future__ import annotations

import math
from typing import Any

import jax
import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "int4", …
import numpy as np
import optax
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.tree import STORABLE, describe
from raystate.core.formats.errors import ConfigError
from tests.orbax.from_state import staged

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
WIDE = ("int64", "uint64", "float64", "complex128")  # not for jax without x64
ONLY_STOCK_JAX = ("int2", "float4_e2m1fn", "float8_e3m4", "float8_e8m0fnu")  # see test_stock_orbax_reads_any_state
MESHES = [(8,), (2, 4), (4, 2), (1, 8)]


def _bits(draw: st.DrawFn, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    seeded = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = np.dtype(dtype)
    if dtype == "bool" or dtype in ("int2", "int4", "float4_e2m1fn"):
        return seeded.integers(0, 2, shape).astype(np.float32).astype(kind)
    return seeded.integers(0, 256, math.prod(shape) * kind.itemsize, np.uint8).view(kind).reshape(shape)


def _sharding(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    if draw(st.booleans()):
        return SingleDeviceSharding(draw(st.sampled_from(jax.devices())))
    sizes = draw(st.sampled_from(MESHES))
    devices = np.array(draw(st.permutations(jax.devices())) if draw(st.booleans()) else jax.devices()).reshape(sizes)
    mesh = Mesh(devices, ("x", "y")[: len(sizes)])
    free, spec = list(mesh.axis_names), []
    for length in shape:
        fitting = [axis for axis in free if length % mesh.shape[axis] == 0]
        axis = draw(st.sampled_from([None, *fitting]))
        if axis is not None:
            free.remove(axis)
        spec.append(axis)
    return NamedSharding(mesh, PartitionSpec(*spec))


@st.composite
def arrays(draw: st.DrawFn, dtypes: tuple[str, ...]) -> Any:
    shape = tuple(draw(st.lists(st.sampled_from([0, 1, 3, 8, 16]), max_size=3)))
    dtype = draw(st.sampled_from(dtypes))
    bits = _bits(draw, dtype, shape)
    match draw(st.sampled_from(["jax", "jax", "jax", "numpy", "key"])):
        case "numpy":
            if draw(st.booleans()) and bits.ndim > 1:
                bits = bits.T if draw(st.booleans()) else bits[::-1, ::2]
            if dtype in ("float32", "int32", "uint16") and draw(st.booleans()):
                bits = bits.astype(np.dtype(dtype).newbyteorder(">"))
            return bits if bits.shape or draw(st.booleans()) else bits[()]
        case "key":
            impl = draw(st.sampled_from(["threefry2x32", "rbg"]))
            keys = jax.random.split(jax.random.key(draw(st.integers(0, 9)), impl=impl), (8, *shape[:1]))
            return jax.device_put(keys, _sharding(draw, keys.shape)) if keys.size else keys
        case _:
            if dtype in WIDE:
                return bits
            return jax.device_put(bits, _sharding(draw, shape))


def states(dtypes: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    numbers = st.integers(-(2**63), 2**63 - 1) | st.floats() | st.booleans()
    empty = st.sampled_from([None, {}, [], (), optax.EmptyState()])
    names = st.text("abé.~/ c0\0", min_size=1, max_size=3) | st.sampled_from(["0", "1", "zarr.json", "mlp/~/linear_0", ".."])
    keys = names | st.integers(0, 12).map(str)
    leaves = arrays(dtypes) | numbers | text | empty

    def containers(inner: Any) -> Any:
        return (
            st.lists(inner, min_size=1, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(keys, inner, min_size=1, max_size=3)
            | st.dictionaries(st.integers(0, 99), inner, min_size=1, max_size=2)
            | st.builds(optax.TraceState, inner)
            | st.builds(optax.ScaleByAdamState, inner, inner, inner)
        )

    return st.dictionaries(keys, st.recursive(leaves, containers, max_leaves=8), min_size=1, max_size=4)


def plain(value: Any) -> Any:
    """What must be equal for bit-equality."""
    if isinstance(value, bool | int | float | str) and not isinstance(value, np.generic):
        return type(value).__name__, repr(value)
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return str(jax.random.key_impl(value)), np.asarray(jax.random.key_data(value)).tobytes()
    array = np.asarray(value)
    return array.dtype.name, array.shape, array.astype(array.dtype.newbyteorder("=")).tobytes()


def same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert plain(a) == plain(b)
        if isinstance(b, jax.Array):
            assert isinstance(a, jax.Array) and a.sharding == b.sharding
        else:
            assert type(a) is type(b)


def taken(state: Any) -> bool:
    try:
        describe({"state": state}, process_index=0)
    except ConfigError:
        return False
    return True


def elsewhere(state: Any, draw: Any) -> Any:
    """References for the same state with each jax.Array on another sharding."""

    def leaf(value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return value
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=_sharding(draw, value.shape))

    return jax.tree.map(leaf, state)


def check_there(got: Any, reference: Any, state: Any) -> None:
    for a, wanted, b in zip(jax.tree.leaves(got), jax.tree.leaves(reference), jax.tree.leaves(state), strict=True):
        assert plain(a) == plain(b)
        assert not isinstance(wanted, jax.ShapeDtypeStruct) or a.sharding == wanted.sharding


@settings(max_examples=25, suppress_health_check=QUIET)
@given(state=states(tuple(sorted(STORABLE))), data=st.data())
def test_any_state_comes_back_from_memory(state: dict[str, Any], data: st.DataObject):
    assume(taken(state))
    layout, table, slot = staged({"state": state}, times=2)
    spec = layout.trees[0].with_values(table.values[0])
    source = MemorySource([Holding(layout=layout, data=slot, crc32c=table.crc32c)], "state")
    same(restore_tree(state, spec, source), state)
    reference = elsewhere(state, data.draw)
    check_there(restore_tree(reference, spec, source), reference, state)
