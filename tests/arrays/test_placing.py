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
from raystate.aligned import aligned
from raystate.arrays import Holding, MemorySource, copy, describe, hold, memory, placing, restore, restore_tree, tree
from raystate.arrays import reference as matching
from raystate.core.errors import ReferenceMismatchError
from raystate.core.tree import Layout

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
        boxes = [self.arrays[r.leaf][tuple(slice(a, a + n) for a, n in zip(r.start, r.shape, strict=True))] for r in requests]
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


def test_what_is_nobody_elses_becomes_the_array_and_what_is_lent_never_does(monkeypatch):
    """On the CPU an array may be made of the very memory that was read: a third of a restore's time. A slot's memory is used again."""
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for lends in (False, True):
        reference, spec, source = of_source([np.ones(LARGE, np.float32), np.ones(LARGE, jnp.bfloat16)], lends=lends, sharding=one)
        copies = Calls(monkeypatch, placing, "_copy")
        restored = restore_tree(reference, spec, source)
        assert copies.number == (2 if lends else 0)
        for array, given in zip(restored, source.arrays, strict=True):
            assert (array.unsafe_buffer_pointer() == given.ctypes.data) is not lends
            given[...] = 7
            assert not lends or np.array_equal(array, np.ones(LARGE, array.dtype))
        monkeypatch.undo()


@pytest.mark.parametrize("change", ["dtype", "order", "alignment", "replicas"])
def test_what_cannot_be_adopted_is_copied(mesh, change):
    wanted = (np.arange(np.prod(LARGE), dtype=np.float32) % 1000).reshape(LARGE)
    sharding = NamedSharding(mesh, P()) if change == "replicas" else jax.sharding.SingleDeviceSharding(jax.devices()[0])
    reference, spec, source = of_source([wanted], lends=False, sharding=sharding)
    if change == "dtype":
        reference = [jax.ShapeDtypeStruct(LARGE, jnp.float16, sharding=sharding)]
    elif change == "order":
        source.arrays = [np.asfortranarray(wanted)]
    elif change == "alignment":
        raw = aligned((wanted.nbytes + 8,), np.dtype(np.uint8))
        source.arrays = [raw[8:].view(np.float32).reshape(LARGE)]
        source.arrays[0][...] = wanted
    (restored,) = restore_tree(reference, spec, source, cast=True)
    assert np.array_equal(restored, wanted.astype(restored.dtype))
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    after = step(restored)  # XLA writes to no memory that is not its own: replicas share it
    assert np.array_equal(after, wanted.astype(after.dtype) + 1)
    if change == "replicas":
        assert np.array_equal(source.arrays[0], wanted)


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
