"""hold() and copy(): the bits of this step, whatever the next one does to its arrays."""

import functools
import itertools
import sys

import google_crc32c
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from raystate.arrays import shards
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.spare import Spare
from raystate.arrays.stage import copy, hold, host_arrays
from raystate.arrays.tree import describe
from raystate.core.formats.boxes import Box, slices
from raystate.core.formats.errors import CapacityError, CorruptCheckpointError
from raystate.core.formats.tree import WriteOptions
from raystate.machine import checksum
from raystate.machine import threads as in_threads
from raystate.machine.aligned import SMALL_BYTES


@pytest.fixture(scope="module")
def mesh(own_mesh):
    with own_mesh((8,), ("x",)) as mesh:
        yield mesh


def _slot(described):
    return np.full(described.layout.data_bytes, 0xAB, np.uint8)


def _raw(described, data, crc32c):
    spec = described.layout.trees[0].with_values(described.values[0])
    return restore_tree(None, spec, MemorySource([Holding(layout=described.layout, data=data, crc32c=crc32c)], "state"))


def _used(trees):
    """(plan, stagers with spare memory that an earlier save has left)"""
    spare = Spare()
    described = describe(trees)
    copy(hold(described, spare), _slot(described))
    spare.prepare()
    return described.plan, (spare,)


@pytest.mark.parametrize("again", [False, True], ids=["fresh memory", "the same memory"])
@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_a_donated_state_is_copied_as_it_was(mesh, spec, again):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(x):
        return jnp.sin(x) * 2 + 1

    x = step(jax.device_put(jnp.arange(8 * 4096, dtype=jnp.float32), NamedSharding(mesh, spec)))
    plan, spare = _used({"state": {"x": x}}) if again else (None, ())
    x = step(x)
    expected = np.array(x)
    described = describe({"state": {"x": x}}, previous=plan)
    held = hold(described, *spare)
    for _ in range(3):
        x = step(x)
    x.block_until_ready()
    assert described.leaves[0].is_deleted()  # the danger is real
    data = _slot(described)
    crc32c = copy(held, data)
    assert np.array_equal(_raw(described, data, crc32c)["x"], expected)


@pytest.mark.parametrize("again", [False, True], ids=["fresh memory", "the same memory"])
@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_hold_returns_while_the_step_still_computes(mesh, spec, again):
    @jax.jit
    def step(x, passes):
        return jax.lax.fori_loop(0, passes, lambda _, y: jnp.sin(y) + x, x)

    def start():
        return jax.device_put(jnp.arange(8 * 1024, dtype=jnp.float32), NamedSharding(mesh, spec))

    passes = 1000
    step(start(), passes).block_until_ready()
    plan, spare = _used({"state": {"x": start()}}) if again else (None, ())
    if again:
        copy(hold(describe({"state": {"x": start()}}, previous=plan), *spare), np.zeros(1 << 20, np.uint8))
    ahead = False
    while not ahead:  # however fast the machine: a step long enough to be still running when hold is back
        x = step(start(), passes)
        described = describe({"state": {"x": x}}, previous=plan)
        held = hold(described, *spare)
        ahead = not x.is_ready()
        y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
        data = _slot(described)
        raw = _raw(described, data, copy(held, data))
        expected = np.asarray(step(start(), passes))
        assert np.array_equal(raw["x"], expected)
        assert np.array_equal(y, expected + 1)
        passes *= 4
        assert passes < 10**6, "hold waited for the step each time"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_a_state_is_kept_under_whatever_mesh_is_set(kind):
    """The copies are made on one device each, and a mesh of more devices is in force (a second save raised)."""
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        state = {
            "w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("x", "y"))),
            "r": jax.device_put(jnp.arange(3), NamedSharding(mesh, P())),
            "one": jax.device_put(jnp.arange(4), jax.devices()[3]),
            "key": jax.random.key(0),
        }
        plan, spare = _used({"state": state})
        for _ in range(3):
            described = describe({"state": state}, previous=plan)
            data = _slot(described)
            raw = _raw(described, data, copy(hold(described, *spare), data))
            assert np.array_equal(raw["w"], state["w"]) and np.array_equal(raw["one"], state["one"])
            assert np.array_equal(jax.random.key_data(raw["key"]), jax.random.key_data(state["key"]))
        assert jax.sharding.get_mesh() == mesh


def test_memory_is_used_again_but_never_under_a_held_step(mesh):
    """Every dtype, sharded and replicated, small and large; two steps held at once, and one whose copy failed."""
    sharded, replicated = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())

    def state(seed):
        random = np.random.default_rng(seed)
        dtypes = ("float32", "bfloat16", "int8", "int4", "bool", "float8_e4m3fn", "complex64")
        tree = {}
        for size, values in (("small", random.integers(0, 2, (8, 16))), ("large", random.integers(0, 2, (8, SMALL_BYTES + 1)))):
            for dtype in dtypes:
                tree[f"{size}-{dtype}-cut"] = jax.device_put(jnp.asarray(values, dtype), sharded)
                tree[f"{size}-{dtype}-whole"] = jax.device_put(jnp.asarray(values, dtype), replicated)
        tree["empty"] = jax.device_put(jnp.zeros((0, 3)), replicated)
        tree["empty-bfloat16"] = jax.device_put(jnp.zeros((0, 3), jnp.bfloat16), replicated)
        tree["number-bfloat16"] = jax.device_put(jnp.bfloat16(seed), replicated)
        return {"state": tree | {"key": jax.random.key(seed)}}

    def pointers(held):
        packed = np.frombuffer(held.kept[0]._buffers.packed, np.uint8).ctypes.data
        return [packed, *(array.unsafe_buffer_pointer() for arrays in held.kept[0]._buffers.groups for array in arrays)]

    expected = []
    for seed in range(4):
        described = describe(state(seed))
        expected.append(_slot(described))
        copy(hold(described), expected[-1])
    plan, spare = _used(state(0))
    first, second = (hold(describe(state(seed), previous=plan), *spare) for seed in (0, 1))
    assert not set(pointers(first)) & set(pointers(second))
    used = pointers(first)
    for held, wanted in ((second, expected[1]), (first, expected[0])):
        data = np.full_like(wanted, 0xAB)
        copy(held, data)
        assert data.tobytes() == wanted.tobytes()
    again = hold(describe(state(2), previous=plan), *spare)
    assert pointers(again) == used, "fresh memory although some was free"
    with pytest.raises(CapacityError):
        copy(again, np.zeros(8, np.uint8))
    again.release()  # perhaps somebody still looks at it: not to be used again
    assert used not in [pointers(held) for held in (hold(describe(state(3), previous=plan), *spare) for _ in range(3))]


def test_numpy_leaves_may_change_after_hold():
    table = np.arange(10)
    reversed_view = np.arange(12).reshape(3, 4)[::-1, ::2]
    expected = reversed_view.copy()
    swapped = np.arange(5, dtype=">f4")
    described = describe({"state": {"a": table, "b": reversed_view, "c": swapped, "d": np.float16(2)}})
    held = hold(described)
    table[:] = -1
    reversed_view[:] = -1
    data = _slot(described)
    raw = _raw(described, data, copy(held, data))
    assert np.array_equal(raw["a"], np.arange(10))
    assert np.array_equal(raw["b"], expected)
    assert np.array_equal(raw["c"], np.arange(5, dtype="f4"))
    assert raw["d"] == 2


def test_crc32c_is_that_of_the_slots_bytes_also_with_threads(mesh, monkeypatch):
    from raystate.arrays import stage

    monkeypatch.setattr(in_threads, "_BYTES_PER_THREAD", 1024)
    monkeypatch.setattr(stage, "copy_cores", lambda: 4)
    monkeypatch.setattr(checksum, "_SMALL_BYTES", 1000)  # pieces on either side of it
    tree = {f"{i}": jax.device_put(jnp.arange(8 * 512) * i, NamedSharding(mesh, P("x"))) for i in range(5)}
    tree["odd"] = jnp.arange(1237).astype(jnp.float8_e5m2)
    described = describe({"state": tree})
    data = _slot(described)
    crc32c = copy(hold(described), data)
    for piece, crc in zip(described.layout.pieces, crc32c, strict=True):
        assert crc == google_crc32c.value(data[piece.offset : piece.offset + piece.nbytes].tobytes())
    raw = _raw(described, data, crc32c)
    assert all(np.array_equal(raw[name], array) for name, array in tree.items())


def test_crc32c_is_of_what_was_copied_not_of_what_the_slot_holds_then(monkeypatch):
    real = checksum.copy

    def spoiling(dst, src):
        real(dst, src)
        dst[0] ^= 1

    described = describe({"state": {"x": jnp.arange(8.0)}})
    good = copy(hold(described), _slot(described))
    monkeypatch.setattr(checksum, "copy", spoiling)
    data = _slot(described)
    assert copy(hold(described), data) == good
    with pytest.raises(CorruptCheckpointError, match="don't match their crc32c"):
        _raw(described, data, good)


def test_copy_lets_go_of_the_held_arrays_even_when_it_fails():
    described = describe({"state": {"a": jnp.ones(1000), "b": np.ones(3)}})
    held = hold(described)
    with pytest.raises(CapacityError) as caught:
        copy(held, np.zeros(100, np.uint8))
    assert caught.value.needed_bytes == described.layout.data_bytes
    data = _slot(described)
    copy(held, data)
    assert [held.take(i) for i in range(2)] == [None, None]


def test_several_copy_threads_take_the_shards_of_one_array(mesh, monkeypatch):
    # jax takes an array apart when it is first asked for a shard, and a second thread that asks meanwhile misses some (IndexError).
    from raystate.arrays import stage

    monkeypatch.setattr(in_threads, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(stage, "copy_cores", lambda: 8)
    tree = {f"{i}": jax.device_put(jnp.arange(8 * 16), NamedSharding(mesh, P("x"))) for i in range(40)}
    described = describe({"state": tree})
    data = _slot(described)
    expected = copy(hold(described), data)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            assert copy(hold(described), data) == expected
    finally:
        sys.setswitchinterval(interval_s)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=str)
def test_a_shard_whose_chunks_are_columns_lies_in_the_slot_column_by_column(mesh, spec, monkeypatch):
    """Written to storage from there without a copy; what is restored is not in the slot."""
    monkeypatch.setattr(shards, "LEAST_PART_BYTES", 1)
    values = np.arange(16 * 8 * SMALL_BYTES // 16, dtype=np.float32).reshape(16, -1)
    bits = values.astype(ml_dtypes.bfloat16)[::-1]  # not contiguous, no buffer
    tree = {"a": jax.device_put(values, NamedSharding(mesh, spec)), "b": bits, "c": np.float32(3), "d": np.zeros((0, 4), np.int8)}
    described = describe({"state": tree}, options=WriteOptions(chunk_bytes=16384))
    layout = described.layout
    pairs = itertools.pairwise(layout.pieces)
    cut = {one.leaf for one, other in pairs if one.start[:1] == other.start[:1] and one.start != other.start}
    assert {0, 1} <= cut
    assert layout.write_buffer_bytes == 0
    monkeypatch.setattr(in_threads, "_BYTES_PER_THREAD", 1)
    monkeypatch.setattr(in_threads.os, "sched_getaffinity", lambda _: range(16))
    for spare in ((), (Spare(),)):
        data = _slot(described)
        crc32c = copy(hold(described, *spare), data)
        for piece, crc in zip(layout.pieces, crc32c, strict=True):
            assert crc == google_crc32c.value(data[piece.offset : piece.offset + piece.nbytes].tobytes())
        raw = _raw(described, data, crc32c)
        assert all(np.array_equal(raw[name], np.asarray(tree[name])) for name in tree)
        source = MemorySource([Holding(layout=layout, data=data, crc32c=crc32c)], "state")
        reference = {**tree, "a": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=SingleDeviceSharding(jax.devices()[0]))}
        restored = restore_tree(reference, layout.trees[0].with_values(described.values[0]), source)
        assert restored["b"].base is not None, "put together, and not copied then"
        data[:] = 0
        assert np.array_equal(restored["a"], values), "it is not in the slot"
        assert np.array_equal(restored["b"], bits)
    assert all(np.array_equal(one, other) for one, other in zip(_by_piece(described), host_arrays(hold(described)), strict=True))


def _by_piece(described):
    values = [np.asarray(leaf) for leaf in described.leaves]
    for piece in described.layout.pieces:
        yield values[piece.leaf][slices(Box(piece.start, piece.shape), (0,) * len(piece.start))]
