"""What a restore asks of the runtime and of memory: counted, not timed."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import raystate
import raystate.restored
from raystate.arrays import memory, placing, restore, tree
from raystate.arrays import reference as matching
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.errors import ReferenceMismatchError
from raystate.core.formats.tree import Layout
from raystate.machine.aligned import aligned

LARGE = (512, 256)


@pytest.fixture(scope="module")
def mesh(own_mesh):
    with own_mesh((8,), ("x",)) as mesh:
        yield mesh


@dataclasses.dataclass
class Given:
    """A source of one tree's arrays, whole, as a reader of storage or a slot gives them."""

    arrays: list[np.ndarray]
    lends: bool

    def read(self, requests: Sequence[Any]) -> list[np.ndarray]:
        boxes = [self.arrays[r.leaf][(*(slice(a, a + n) for a, n in zip(r.start, r.shape, strict=True)), ...)] for r in requests]
        for box in boxes:
            box.flags.writeable = not self.lends
        return boxes


class Calls:
    """Counts the calls of a function, and makes them."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str):
        self._function = getattr(owner, name)
        self.number = 0
        patch.setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.number += 1
        return self._function(*args, **kwargs)


def of_source(arrays: list[np.ndarray], *, lends: bool, sharding: Any = None) -> tuple[Any, Any, Given]:
    """(reference, spec, source)"""
    made: list[Any] = []
    for array in arrays:
        array_aligned = aligned(array.shape, array.dtype)
        array_aligned[...] = array
        made.append(array_aligned)
    spec = describe({"state": made}).layout.trees[0]
    reference = [jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=sharding) for one in made]
    return reference, spec, Given(made, lends)


@pytest.mark.parametrize("spec", [None, P("x"), P()], ids=str)
def test_many_arrays_are_placed_by_one_call(mesh, spec, monkeypatch):
    sharding = None if spec is None else NamedSharding(mesh, spec)
    reference, tree_spec, source = of_source([np.full((8, 4), i, np.float32) for i in range(300)], lends=True, sharding=sharding)
    puts = Calls(monkeypatch, jax, "device_put")
    restored = restore_tree(reference, tree_spec, source)
    assert puts.number == 1
    assert all(np.array_equal(got, wanted) for got, wanted in zip(restored, source.arrays, strict=True))
    if sharding is not None:
        assert all(array.sharding == sharding for array in restored)


@pytest.mark.parametrize("spec", [None, P("x"), P()], ids=str)
def test_thousands_of_small_arrays_are_placed_by_a_program_for_one(mesh, spec, monkeypatch):
    """`device_put` takes 50 µs of Python for each. What the caller has set for its own programs makes no difference."""
    monkeypatch.setattr(placing, "ALIKE", 100)
    placing._copier.cache_clear()
    sharding = None if spec is None else NamedSharding(mesh, spec)
    shape = (8, 4) if spec != P("x") else (64, 4)
    given = [np.full(shape, i, np.float32) for i in range(150)] + [np.full(shape, i, jnp.bfloat16) for i in range(150)]
    given[7].view(np.uint32)[...] = 0x7FC0BEEF + np.arange(given[7].size, dtype=np.uint32).reshape(shape)  # NaNs that differ
    rest = [np.full(shape, i, np.int8) for i in range(20)]  # too few
    reference, tree_spec, source = of_source(given + rest, lends=True, sharding=sharding)
    wanted = jax.device_put(given[0], sharding)
    programs = Calls(monkeypatch, placing, "_copier")
    puts: list[int] = []
    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *args, **kwargs: puts.append(len(x)) or real(x, *args, **kwargs))
    with jax.debug_nans(True), jax.transfer_guard("disallow"), jax.disable_jit(True):
        restored = restore_tree(reference, tree_spec, source)
    devices = 1 if spec is None else 8
    assert programs.number == 2 * devices  # one of each dtype
    assert puts == [20 * devices]
    for got, kept in zip(restored, source.arrays, strict=True):
        assert got.dtype == kept.dtype and np.asarray(got).tobytes() == kept.tobytes()
        low, high = kept.ctypes.data, kept.ctypes.data + kept.nbytes
        assert not any(low <= shard.data.unsafe_buffer_pointer() < high for shard in got.addressable_shards)
    assert (restored[0].sharding, restored[0].committed) == (wanted.sharding, wanted.committed)


def test_small_pieces_of_this_node_are_lent_without_being_dealt_out(monkeypatch):
    state = {f"w{i}": jnp.full((8, 4), i, jnp.float32) for i in range(50)}
    described = describe({"state": state})
    data = np.zeros(described.layout.data_bytes, np.uint8)
    crcs = copy(hold(described), data)
    source = MemorySource([Holding(layout=described.layout, data=data, crc32c=crcs)], "state")
    dealt = Calls(monkeypatch, memory, "share_out")
    restored = restore_tree(state, described.layout.trees[0], source)
    assert dealt.number == 0
    assert all(np.array_equal(restored[name], state[name]) for name in state)


def test_a_reference_is_matched_once(monkeypatch, tmp_path):
    state = {"w": np.arange(6.0), "step": 3}
    raystate.save(tmp_path / "saved", state, items={"ema": state})
    calls = [Calls(monkeypatch, owner, "match_reference") for owner in (raystate.restored, restore)]
    restored = raystate.load(tmp_path / "saved", state)
    assert np.array_equal(restored["w"], state["w"]) and restored["step"] == 3
    assert sum(one.number for one in calls) == 1
    raystate.load(tmp_path / "saved", items={"state": state, "ema": state})
    assert sum(one.number for one in calls) == 3


def test_leaves_alike_are_looked_at_once(mesh, monkeypatch):
    sharding = NamedSharding(mesh, P("x"))
    _, spec, source = of_source([np.full((8, 4), i, np.float32) for i in range(200)], lends=True)
    looked = Calls(monkeypatch, matching, "check_fits")
    # A sharding for each, as of arrays that come from different programs.
    reference = [jax.ShapeDtypeStruct((8, 4), np.float32, sharding=NamedSharding(mesh, P("x"))) for _ in range(200)]
    restored = restore_tree(reference, spec, source)
    assert looked.number == 1
    assert all(array.sharding == sharding for array in restored)


def test_what_is_alike_but_for_one_thing_is_told_apart(mesh):
    one, other = (jax.sharding.SingleDeviceSharding(jax.devices()[i]) for i in (0, 1))
    arrays = [np.full((8, 4), i, np.float32) for i in range(6)]
    _, spec, source = of_source(arrays, lends=True)
    free = jnp.zeros((8, 4), np.float32)
    reference = [
        jax.ShapeDtypeStruct((8, 4), np.float32, sharding=one), jax.ShapeDtypeStruct((8, 4), np.float32, sharding=other),
        jax.ShapeDtypeStruct((8, 4), np.float16, sharding=one), free, jax.device_put(free, one), np.zeros((8, 4), np.float32),
    ]  # fmt: skip
    got = restore_tree(reference, spec, source, cast=True)
    assert [getattr(one, "committed", None) for one in got] == [True, True, True, False, True, None]
    assert [next(iter(array.devices())) for array in got[:3]] == [jax.devices()[0], jax.devices()[1], jax.devices()[0]]
    assert got[2].dtype == np.float16
    assert all(np.array_equal(array, kept) for array, kept in zip(got, arrays, strict=True))
    reference[2] = jax.ShapeDtypeStruct((8, 5), np.float32, sharding=one)
    reference[4] = jax.ShapeDtypeStruct((8, 4), np.int32, sharding=one)
    with pytest.raises(ReferenceMismatchError) as error:
        restore_tree(reference, spec, source)
    assert [path for path, _ in error.value.differences] == ["2", "4"]


@pytest.mark.parametrize("lends", [False, True], ids=["own", "lent"])
@pytest.mark.parametrize(
    "kind", ["large", "small", "scalar", "order", "alignment", "replicas", "cast", "weak", "key", "free", "alike"]
)
def test_every_restored_buffer_is_donated_at_the_first_step(mesh, kind, lends, monkeypatch):
    """XLA's CPU client lends what it makes of aligned host memory, and donates none of it: a step then takes one more state."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = {"scalar": (), "small": (8, 4), "alike": (8, 4), "key": (2,)}.get(kind, LARGE)
    values = (np.arange(np.prod(shape), dtype=np.uint32 if kind == "key" else np.float32) % 1000).reshape(shape)
    reference, spec, source = of_source([values] * 3, lends=lends, sharding=one)
    like = {
        "replicas": jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P())),
        "cast": jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=one),
        "weak": jax.ShapeDtypeStruct(shape, np.float32, sharding=one, weak_type=True),
        "key": jax.random.key(0),
        "free": jax.ShapeDtypeStruct(shape, np.float32),
    }
    if kind in like:
        reference = [like[kind]] * 3
    elif kind == "order":
        source.arrays = [np.asfortranarray(array) for array in source.arrays]
    elif kind == "alignment":
        room = [aligned((values.nbytes + 8,), np.dtype(np.uint8))[8:].view(np.float32).reshape(shape) for _ in range(3)]
        source.arrays = [np.add(values, 0, out=array) for array in room]
    elif kind == "alike":
        monkeypatch.setattr(placing, "ALIKE", 2)
    restored = restore_tree(reference, spec, source, cast=True)
    if kind == "key":
        wanted = jax.random.wrap_key_data(values)
        assert all(jnp.array_equal(jax.random.key_data(key), values) for key in restored)
        after = jax.jit(lambda keys: [jax.random.fold_in(key, 1) for key in keys], donate_argnums=0)(restored)
        assert jnp.array_equal(jax.random.key_data(after[0]), jax.random.key_data(jax.random.fold_in(wanted, 1)))
        return
    assert all(np.array_equal(array, values.astype(array.dtype)) for array in restored)
    before = buffers(restored)
    for array in source.arrays:
        low = array.ctypes.data
        assert not any(low <= pointer < low + array.nbytes for pointer in before)
    after = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)(restored)
    assert all(np.array_equal(array, values.astype(array.dtype) + 1) for array in after)
    assert buffers(after) == before
    assert all(np.array_equal(array, values) for array in source.arrays)


def buffers(arrays: Sequence[jax.Array]) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for array in arrays for shard in array.addressable_shards]


def test_what_arrays_have_in_common_is_asked_once(mesh, monkeypatch):
    sharding = NamedSharding(mesh, P("x"))
    state = [jax.device_put(np.full((8, 4), i, np.float32), sharding) for i in range(200)]
    asked = Calls(monkeypatch, tree, "local_shards")
    first = describe({"state": state})
    assert asked.number == 1
    again = describe({"state": state}, previous=first.plan)
    assert asked.number == 1 and again.plan is first.plan


def test_a_layout_is_parsed_once():
    data = describe({"state": [np.zeros(3), 1.0]}).layout_bytes
    assert Layout.from_bytes(data) is Layout.from_bytes(bytes(bytearray(data)))
    assert Layout.from_bytes(data).to_bytes() == data
