"""References: every kind of leaf, every difference, any old to any new sharding; nothing aliases the source."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tests.arrays.saved import Saved


@pytest.fixture(scope="module")
def mesh(own_mesh):
    with own_mesh((2, 4), ("x", "y")) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def saved(mesh):
    return Saved(
        {
            "w": jax.device_put(jnp.arange(64, dtype=jnp.float32).reshape(8, 8), NamedSharding(mesh, P("x", "y"))),
            "h": jnp.arange(4, dtype=jnp.bfloat16),
            "count": jnp.int32(11),
            "table": np.arange(6, dtype=np.float64),
            "step": 3,
            "rate": 0.25,
            "flag": True,
            "name": "run",
            "none": None,
            "layers": [{"b": jnp.ones(2)}, {"b": jnp.zeros(2)}],
            "empty": {},
        }
    )


W = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_each_kind_of_leaf(saved, mesh):
    rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "y"))
    got = saved.restore({"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=rows)})["w"]
    assert isinstance(got, jax.Array)
    assert got.sharding == rows
    assert np.array_equal(got, W)
    got = saved.restore({"w": jax.device_put(jnp.zeros((8, 8)), columns)})["w"]
    assert got.sharding == columns
    assert np.array_equal(got, W)
    got = saved.restore({"w": columns, "h": SingleDeviceSharding(jax.devices()[3])})
    assert got["w"].sharding == columns
    assert got["h"].devices() == {jax.devices()[3]}
    got = saved.restore({"w": np.zeros((8, 8), np.float32), "table": np.zeros(6)})
    assert isinstance(got["w"], np.ndarray)
    assert got["table"].dtype == np.float64
    got["w"][0, 0] = 9  # writable, and not the slot's memory
    assert np.array_equal(saved.restore(None)["w"], W)
    got = saved.restore({"step": 0, "rate": 0.0, "flag": False, "name": ""})
    assert got == {"step": 3, "rate": 0.25, "flag": True, "name": "run"}
    assert saved.restore({"step": ..., "w": ...}) == {"step": ..., "w": ...}


def test_numbers_and_0d_arrays_stand_for_each_other(saved, mesh):
    # A TrainState's step begins as an int and is an array after the first jitted step.
    got = saved.restore(
        {"count": 0, "step": jnp.int32(0), "rate": jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))}
    )
    assert got["count"] == 11
    assert type(got["count"]) is int
    assert got["step"].dtype == jnp.int32
    assert int(got["step"]) == 3
    assert got["rate"].sharding.is_fully_replicated
    got = saved.restore({"count": np.int32(0), "step": np.int64(0), "rate": np.zeros(())})
    assert [type(value) for value in got.values()] == [np.int32, np.ndarray, np.int64]
    assert saved.restore({"step": jnp.float32(0)})["step"].dtype == jnp.float32, "a whole Python number is one of floats, too"
    assert set(saved.differences({"count": 0.5, "flag": 1, "rate": 1})) == {"count", "flag", "rate"}


def test_only_what_is_asked_for_is_read_and_each_box_once(saved, mesh):
    saved.source.requests.clear()
    saved.restore({"w": NamedSharding(mesh, P("x")), "count": NamedSharding(mesh, P()), "h": ..., "step": 0})
    got = [(saved.spec.leaves[r.leaf].name, r.start, r.shape) for r in saved.source.requests]
    assert sorted(got) == [("count", (), ()), ("w", (0, 0), (4, 8)), ("w", (4, 0), (4, 8))]


def test_reading_goes_in_batches(saved, monkeypatch):
    import raystate.arrays.restore as restore

    calls: list[int] = []
    monkeypatch.setattr(restore, "BATCH_BYTES", 300)
    monkeypatch.setattr(saved.source._source, "read", lambda r, read=saved.source._source.read: calls.append(len(r)) or read(r))
    assert np.array_equal(saved.restore(None)["w"], W)
    assert sum(calls) == 13  # w has eight boxes
    assert len(calls) > 1


def test_all_differences_are_in_one_error(saved, mesh):
    differences = saved.differences(
        {
            "w": np.zeros((4, 8), np.float32),
            "h": jax.ShapeDtypeStruct((4,), jnp.float32),
            "table": NamedSharding(mesh, P()),
            "step": "text",
            "name": 1,
            "none": np.zeros(1),
            "empty": {"x": 1},
            "layers": [{"b": jnp.zeros(2)}, {"b": NamedSharding(mesh, P("y"))}, {"b": jnp.zeros(2)}],
            "count": object(),
        }
    )
    assert set(differences) == {"w", "h", "table", "step", "name", "none", "empty/x", "layers/1/b", "layers/2/b", "count"}
    assert "(4, 8)" in differences["w"]
    assert "(8, 8)" in differences["w"]
    assert "bfloat16" in differences["h"]
    assert "x64" in differences["table"]
    assert "not in the checkpoint" in differences["layers/2/b"]


def test_cast_and_shapes(saved, mesh):
    got = saved.restore({"w": jax.ShapeDtypeStruct((8, 8), jnp.bfloat16, sharding=NamedSharding(mesh, P("y")))}, cast=True)
    assert got["w"].dtype == jnp.bfloat16
    assert np.array_equal(got["w"], W.astype(jnp.bfloat16))
    assert saved.restore({"table": np.zeros(6, np.float32)}, cast=True)["table"].dtype == np.float32
    got = saved.restore({"w": jax.ShapeDtypeStruct((3, 8), jnp.float32, sharding=NamedSharding(mesh, P("x")))}, shapes="checkpoint")
    assert np.array_equal(got["w"], W)
    assert "fit" in saved.differences({"layers": [{"b": NamedSharding(mesh, P("y"))}]}, shapes="checkpoint")["layers/0/b"]


def test_nothing_that_is_restored_aliases_the_slot(mesh):
    # XLA's CPU client adopts aligned host memory without copying it; a slot is reused a few steps later.
    saved = Saved({"a": jnp.ones(4096), "b": np.ones(4096), "c": jnp.int32(1), "d": jax.random.key(0)})
    sharded = NamedSharding(mesh, P(("x", "y")))
    results = [
        saved.restore({"a": leaf})["a"]
        for leaf in (
            sharded,
            NamedSharding(mesh, P()),
            SingleDeviceSharding(jax.devices()[2]),
            jnp.zeros(4096),
            np.zeros(4096, np.float32),
        )
    ]
    numbers = saved.restore({"b": np.zeros(4096), "c": jnp.int32(0), "d": jax.random.key(1)})
    raw = saved.restore(None)
    saved.data[:] = 0xFF
    for array in [*results, raw["a"], raw["b"], numbers["b"]]:
        assert (np.asarray(array) == 1).all()
    assert int(numbers["c"]) == 1
    assert np.array_equal(jax.random.key_data(numbers["d"]), jax.random.key_data(jax.random.key(0)))


def test_typed_keys(mesh):
    keys = jax.random.split(jax.random.key(5), 8)
    saved = Saved({"k": keys, "u": jax.random.key_data(keys)})
    sharding = NamedSharding(mesh, P("y"))
    for leaf in (jax.ShapeDtypeStruct((8,), keys.dtype, sharding=sharding), jax.device_put(keys, sharding), sharding):
        got = saved.restore({"k": leaf})["k"]
        assert got.dtype == keys.dtype
        assert got.sharding.is_equivalent_to(sharding, 1)
        assert np.array_equal(jax.random.key_data(got), jax.random.key_data(keys))
    wrong = {"k": jax.ShapeDtypeStruct((4,), keys.dtype), "u": jax.ShapeDtypeStruct((8,), keys.dtype)}
    assert set(saved.differences(wrong)) == {"k", "u"}
    assert "rbg" in saved.differences({"k": jax.random.split(jax.random.key(0, impl="rbg"), 8)})["k"]
    assert saved.restore({"u": jax.ShapeDtypeStruct((8,), keys.dtype)}, cast=True)["u"].dtype == keys.dtype


def _same(a, b):
    if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    assert type(a) is type(b)
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_train_states_come_back_in_their_own_types():
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    linen = TrainState.create(apply_fn=model.apply, params=params, tx=optax.chain(optax.clip(1.0), optax.adamw(1e-3)))

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    optimizer = nnx.Optimizer(Net(nnx.Rngs(0)), optax.adamw(1e-3), wrt=nnx.Param)
    states = [
        linen,
        nnx.state(Net(nnx.Rngs(0))),
        nnx.split(optimizer)[1],
        optax.adam(1e-3).init(params),
        (jnp.ones(2), [1, None, ()]),
    ]
    for state in states:
        got = Saved(state).restore(state)
        assert jax.tree.structure(got) == jax.tree.structure(state)
        jax.tree.map(_same, got, state)
        abstract = jax.eval_shape(lambda tree: tree, state)
        got = Saved(state).restore(abstract)
        assert jax.tree.structure(got) == jax.tree.structure(abstract)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_what_was_traced_under_a_mesh_comes_back_on_it(kind):
    """`jax.eval_shape` under an explicit mesh gives shardings on its abstract mesh, which has no devices."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    abstract = NamedSharding(mesh.abstract_mesh, P("x", "y"))
    reference = {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=abstract)}
    with jax.set_mesh(mesh):
        state = {"w": jax.device_put(np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("x", "y")))}
        saved = Saved(state)
        for asked in (reference, {"w": abstract}, jax.eval_shape(lambda tree: tree, state)):
            got = saved.restore(asked)["w"]
            assert np.array_equal(got, state["w"])
        assert saved.restore(reference)["w"].sharding == state["w"].sharding
    with jax.set_mesh(None):
        assert "none is in force: restore under jax.set_mesh" in saved.differences(reference)["w"]
    with jax.set_mesh(jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))):
        assert "the one in force is {'x': 4, 'y': 2}" in saved.differences(reference)["w"]


_specs = st.sampled_from([P(), P("x"), P("y"), P("x", "y"), P("y", "x"), P(("x", "y")), P(None, "y"), P(None, ("y", "x"))])


_shapes = st.tuples(st.sampled_from([0, 8, 16]), st.sampled_from([0, 8, 24]))


@settings(max_examples=60)
@given(old=_specs, new=_specs, dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8]), shape=_shapes)
@example(
    old=P("x"), new=P("y", "x"), dtype=jnp.float32, shape=(0, 8)
)  # arrays without elements could only be restored as they were
@example(old=P("x", "y"), new=P(), dtype=jnp.float32, shape=(16, 0))
def test_any_old_sharding_to_any_new_one(old, new, dtype, shape):
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    array = np.arange(shape[0] * shape[1]).reshape(shape).astype(dtype)
    saved = Saved({"a": jax.device_put(array, NamedSharding(mesh, old))})
    got = saved.restore({"a": NamedSharding(mesh, new)})["a"]
    assert got.sharding == NamedSharding(mesh, new)
    assert np.array_equal(got, array)
    for shard in got.addressable_shards:
        assert np.array_equal(shard.data, np.asarray(array)[shard.index])
