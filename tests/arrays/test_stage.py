"""hold() and copy(): the bits of this step, whatever the next one does to its arrays."""

import functools
import threading

import google_crc32c
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from raystate.arrays import Holding, MemorySource, copy, describe, hold, restore_tree
from raystate.core.errors import CapacityError

DEADLINE_S = 60


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",))


def _slot(described):
    return np.full(described.layout.data_bytes, 0xAB, np.uint8)


def _raw(described, data, crc32c):
    spec = described.layout.trees[0].with_values(described.values[0])
    return restore_tree(None, spec, MemorySource([Holding(layout=described.layout, data=data, crc32c=crc32c)], "state"))


@pytest.mark.parametrize("spec", [P(), P("x")], ids=str)
def test_a_donated_state_is_copied_as_it_was(mesh, spec):
    @functools.partial(jax.jit, donate_argnums=0)
    def step(x):
        return jnp.sin(x) * 2 + 1

    x = step(jax.device_put(jnp.arange(8 * 4096, dtype=jnp.float32), NamedSharding(mesh, spec)))
    expected = np.array(x)
    described = describe({"state": {"x": x}})
    held = hold(described)
    for _ in range(3):
        x = step(x)
    x.block_until_ready()
    assert described.leaves[0].is_deleted()  # the danger is real
    data = _slot(described)
    crc32c = copy(held, data)
    assert np.array_equal(_raw(described, data, crc32c)["x"], expected)


@pytest.mark.parametrize("replicated", [True, False])
def test_hold_returns_while_the_step_still_computes(mesh, replicated):
    gate = threading.Event()
    entered = threading.Event()

    def wait(x):
        entered.set()
        assert gate.wait(DEADLINE_S)
        return x

    device = jax.devices()[0]
    target = NamedSharding(mesh, P()) if replicated else NamedSharding(mesh, P("x"))

    @jax.jit
    def slow(x):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * 2

    double = jax.jit(lambda x: x + 1, donate_argnums=0)
    start = jax.device_put(jnp.arange(1024, dtype=jnp.float32), device)
    plain = slow(start)
    x = plain if not replicated else jax.device_put(plain, target)
    try:
        assert entered.wait(DEADLINE_S)
        described = describe({"state": {"x": x}})
        held = hold(described)
        assert not x.is_ready()  # the gate is closed: hold came back before the computation ended
    finally:
        gate.set()
    y = double(x)
    y.block_until_ready()
    data = _slot(described)
    crc32c = copy(held, data)
    assert np.array_equal(_raw(described, data, crc32c)["x"], np.arange(1024, dtype=np.float32) * 2)
    assert np.array_equal(y, np.arange(1024, dtype=np.float32) * 2 + 1)


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
    import raystate.arrays.stage as stage

    monkeypatch.setattr(stage, "_BYTES_PER_COPY_THREAD", 1024)
    monkeypatch.setattr(stage, "_copy_threads", lambda: 4)
    monkeypatch.setattr(stage, "BLOCK_BYTES", 1000)
    tree = {f"{i}": jax.device_put(jnp.arange(8 * 512) * i, NamedSharding(mesh, P("x"))) for i in range(5)}
    tree["odd"] = jnp.arange(1237).astype(jnp.float8_e5m2)
    described = describe({"state": tree})
    data = _slot(described)
    crc32c = copy(hold(described), data)
    for piece, crc in zip(described.layout.pieces, crc32c, strict=True):
        assert crc == google_crc32c.value(data[piece.offset : piece.offset + piece.nbytes].tobytes())
    raw = _raw(described, data, crc32c)
    assert all(np.array_equal(raw[name], array) for name, array in tree.items())


def test_every_dtype_and_typed_keys_survive():
    tree = {
        name: jnp.asarray(np.arange(6).reshape(2, 3).astype(getattr(ml_dtypes, name, None) or np.dtype(name)))
        for name in ("int4", "uint4", "int8", "float8_e4m3fn", "bfloat16", "float16", "float32", "bool", "complex64", "uint32")
    }
    tree["key"] = jax.random.split(jax.random.key(3), 4)
    described = describe({"state": tree})
    data = _slot(described)
    crc32c = copy(hold(described), data)
    spec = described.layout.trees[0]
    got = restore_tree(tree, spec, MemorySource([Holding(layout=described.layout, data=data, crc32c=crc32c)], "state"))
    for name, array in tree.items():
        if name == "key":
            assert got[name].dtype == array.dtype
            assert np.array_equal(jax.random.key_data(got[name]), jax.random.key_data(array))
        else:
            assert got[name].dtype == array.dtype
            assert np.asarray(got[name]).tobytes() == np.asarray(array).tobytes()


def test_copy_lets_go_of_the_held_arrays_even_when_it_fails():
    described = describe({"state": {"a": jnp.ones(1000), "b": np.ones(3)}})
    held = hold(described)
    with pytest.raises(CapacityError) as caught:
        copy(held, np.zeros(100, np.uint8))
    assert caught.value.needed_bytes == described.layout.data_bytes
    data = _slot(described)
    copy(held, data)
    assert [held.take(i) for i in range(2)] == [None, None]


def test_a_failing_computation_is_raised_by_copy():
    def fail(x):
        raise RuntimeError("no such batch")

    x = jax.jit(lambda x: jax.pure_callback(fail, jax.ShapeDtypeStruct(x.shape, x.dtype), x))(jnp.ones(4))
    described = describe({"state": {"x": x}})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no such batch"):
        copy(hold(described), _slot(described))
