"""Boxes, owners and Orbax's text for a sharding."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from raystate.arrays import shards
from raystate.arrays.shards import chunk_shape, local_shards, sharding_json, straight_boxes
from raystate.core.formats.boxes import Box, slices


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto, AxisType.Auto))


SPECS = [P(), P("x"), P("x", "y"), P(("x", "y"), None), P(None, "y"), P("y", "x"), P(None, ("y", "x"))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kinds", [(AxisType.Auto, AxisType.Auto), (AxisType.Explicit, AxisType.Auto)], ids=str)
def test_sharding_text_is_orbaxs(spec, kinds):
    from orbax.checkpoint._src.metadata.sharding import from_jax_sharding  # no public name gives this text

    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=kinds)
    for sharding in (NamedSharding(mesh, spec), SingleDeviceSharding(jax.devices()[3])):
        expected = from_jax_sharding(sharding)
        assert expected is not None
        assert sharding_json(sharding, process_count=1) == expected.to_serialized_string()


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_boxes_cover_every_element_once_and_are_whole_chunks(mesh, spec):
    array = jax.device_put(jnp.arange(16 * 8).reshape(16, 8), NamedSharding(mesh, spec))
    shards = local_shards(array, process_index=0, process_count=1)
    seen = np.zeros(array.shape, int)
    chunk = chunk_shape(array.sharding.shard_shape(array.shape), array.shape, 4)
    for shard in shards:
        assert shard.owned
        assert shard.shape == chunk
        assert all(start % size == 0 for start, size in zip(shard.start, chunk, strict=True))
        box = tuple(slice(a, a + n) for a, n in zip(shard.start, shard.shape, strict=True))
        seen[box] += 1
        assert np.array_equal(array.addressable_data(shard.position), np.asarray(array)[box])
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("shard", "shape", "expected"),
    [
        ((1024, 1024), (1024, 1024), (1024, 1024)),  # 4 MiB
        ((2048, 4096), (2048, 4096), (1024, 1024)),
        ((1536, 4096), (12288, 4096), (512, 1024)),  # odd factors first: powers of two fit most other shardings
        ((1 << 22,), (1 << 23,), (1 << 20,)),
        ((1048583,), (1048583,), (524292,)),  # a prime that isn't sharded: the last chunk is shorter
        ((1048583,), (2097166,), (1048583,)),  # one that is can't be cut
        ((1048583, 4), (2097166, 4), (1048583, 1)),
        ((0, 3), (0, 3), (1, 3)),
        ((), (), ()),
    ],
    ids=str,
)
def test_large_shards_are_cut_along_all_dimensions(shard, shape, expected):
    assert chunk_shape(shard, shape, 4) == expected


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 6)), min_size=1, max_size=4), st.integers(0, 1), st.sampled_from([1, 4])
)
def test_in_each_part_of_a_shard_a_chunk_lies_in_one_piece(axes, ragged, itemsize):
    """`axes`: (chunks, length of a chunk); the last chunk of the first axis may be a shorter one."""
    chunk = tuple(size for _, size in axes)
    shape = tuple(max(1, count * size - ragged * (axis == 0)) for axis, (count, size) in enumerate(axes))
    shard = Box(tuple(7 * size for size in chunk), shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "LEAST_PART_BYTES", 1)
        patch.setattr(shards, "SMALL_BYTES", 0)
        parts = straight_boxes(shard, chunk, itemsize)
    times = np.zeros(shape, int)
    for part in parts:
        where = slices(part, shard.start)
        times[where] += 1
        flat = np.arange(math.prod(part.shape)).reshape(part.shape)
        for low in itertools.product(*(range(0, length, size) for length, size in zip(part.shape, chunk, strict=True))):
            inside = flat[tuple(slice(at, at + size) for at, size in zip(low, chunk, strict=True))].reshape(-1)
            assert list(inside) == list(range(inside[0], inside[0] + inside.size))
        assert all((a - o) % size == 0 for a, o, size in zip(part.start, shard.start, chunk, strict=True))
    assert (times == 1).all()


def test_a_shard_is_not_cut_into_crumbs():
    box = Box((0, 0), (64, 1 << 16))
    assert straight_boxes(box, (64, 64), 4) == [box], "parts of 16 KiB"
    assert straight_boxes(Box((0, 4), (0, 8)), (1, 2), 4) == [Box((0, 4), (0, 8))]
    assert [part.shape for part in straight_boxes(box, (64, 1 << 14), 4)] == [(64, 1 << 14)] * 4
    assert straight_boxes(box, (16, 1 << 16), 4) == [box], "its chunks lie one after the other as it is"
