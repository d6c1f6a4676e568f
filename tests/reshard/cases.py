"""A state to be saved on one topology and restored on another: its description as JSON, its arrays, and how it is compared."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.struct
import jax
import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "int4", …
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import raystate
from raystate.arrays import shards
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.local_values import local_checksums
from raystate.core.formats.messages import HostId
from raystate.core.formats.tree import CHUNK_BYTES, Layout, SlotTable, WriteOptions
from raystate.runtime.coordinator.packaging import build_package
from raystate.runtime.host.share import write_share
from raystate.runtime.host.writing import as_array
from raystate.runtime.parts import HostPart
from raystate.storage import StepFolder, open_storage
from tests.reshard.nodes import Share, restore, share_of

SAVE = "a1kreshard"
KEY = "key"  # in place of a dtype: typed PRNG keys
DTYPES = (
    "float32", "bfloat16", "float16", "int8", "uint32", "bool", "float8_e4m3fn", "float8_e5m2", "int4", "complex64", KEY,
)  # fmt: skip

Spec = list[list[str]]  # per dimension the mesh axes that split it


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array. `old` and `new` are its partitions before and after; both None: a numpy array."""

    shape: list[int]
    dtype: str
    old: Spec | None
    new: Spec | None


@dataclasses.dataclass(frozen=True)
class Case:
    seed: int
    old_mesh: list[int]  # ("x", "y")
    new_mesh: list[int]
    leaves: list[Leaf]
    own: bool = False  # each process has numpy arrays of its own values

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Case:
        return cls(**{**raw, "leaves": [Leaf(**leaf) for leaf in raw["leaves"]]})

    def bits(self, index: int) -> np.ndarray:
        """The whole array, of random bits (NaNs of every kind among them)."""
        leaf = self.leaves[index]
        seeded = np.random.default_rng([self.seed, index])
        if leaf.dtype == KEY:
            return seeded.integers(0, 2**32, (*leaf.shape, 2), np.uint32)
        if leaf.dtype in ("bool", "int4"):
            return seeded.integers(0, 2, leaf.shape).astype(leaf.dtype)
        dtype = np.dtype(leaf.dtype)
        count = math.prod(leaf.shape) * dtype.itemsize
        return seeded.integers(0, 256, count, np.uint8).view(dtype).reshape(leaf.shape)

    def state(self) -> Any:
        """As it is saved. Every process of the group must call this."""
        return nested([self._array(index) for index in range(len(self.leaves))])

    def _array(self, index: int) -> Any:
        leaf, bits = self.leaves[index], self.bits(index)
        if leaf.old is None:
            return bits if not self.own else dataclasses.replace(self, own=False, seed=self.seed + jax.process_index()).bits(index)
        sharding = sharded(self.old_mesh, leaf.old)
        array = jax.make_array_from_callback(bits.shape, sharding, lambda box: bits[box])
        return jax.random.wrap_key_data(array) if leaf.dtype == KEY else array

    def chunk(self, index: int) -> tuple[int, ...]:
        """How the array was cut."""
        leaf, shape = self.leaves[index], self.bits(index).shape
        size = dict(zip("xy", self.old_mesh, strict=True))
        parts = [math.prod(size[axis] for axis in axes) for axes in leaf.old or []]
        shard = [length // n for length, n in itertools.zip_longest(shape, parts, fillvalue=1)]
        return shards.chunk_shape(tuple(shard), shape, self.bits(index).dtype.itemsize, CHUNK_BYTES)

    def reference(self) -> Any:
        return nested([self._target(index) for index in range(len(self.leaves))])

    def _target(self, index: int) -> Any:
        leaf = self.leaves[index]
        if leaf.new is None:
            return np.zeros_like(self.bits(index))
        dtype = jax.random.key(0).dtype if leaf.dtype == KEY else np.dtype(leaf.dtype)
        return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype, sharding=sharded(self.new_mesh, leaf.new))


def sharded(mesh: Sequence[int], spec: Spec) -> NamedSharding:
    devices = np.array(jax.devices()).reshape(mesh)
    return NamedSharding(Mesh(devices, ("x", "y")), PartitionSpec(*[tuple(axes) if axes else None for axes in spec]))


class Inner(NamedTuple):
    w: Any
    tag: Any


@flax.struct.dataclass
class Outer:
    inner: Inner
    rest: list[Any]
    name: str = flax.struct.field(pytree_node=False, default="static")


def nested(leaves: list[Any]) -> Any:
    """The arrays in containers of every kind, beside scalars and empty ones."""
    first, count, mu, nu, w, *rest = leaves
    adam = optax.ScaleByAdamState(count=count, mu={"layer": mu}, nu={"layer": nu})
    return {
        "params": {"layer": first, "none": None, "empty": {}},
        "opt": (adam, optax.EmptyState()),
        "more": Outer(inner=Inner(w=w, tag=None), rest=rest),
        "step": 3,
        "rate": 0.25,
        "flag": True,
        "text": "größer",
        "nothing": [],
    }


def staged(case: Case) -> tuple[Layout, SlotTable, np.ndarray]:
    """What this process's slot would hold."""
    described = describe({"state": case.state()}, options=WriteOptions(chunk_bytes=CHUNK_BYTES))
    layout = described.layout
    data = np.zeros(layout.data_bytes, np.uint8)
    crc32c = copy(hold(described), data)
    table = SlotTable(
        layout_ref="", crc32c=crc32c, values=described.values, iterators={}, json_items={}, metrics={}, custom=None
    )  # fmt: skip
    return layout, table, data


def hold_share(case: Case) -> Share:
    """This process's part of a snapshot in memory."""
    return share_of(*staged(case))


def save_share(case: Case, root: str) -> HostPart:
    """This process's part of a save, as its HostActor would write it."""
    rank = jax.process_index()
    layout, table, data = staged(case)
    owned = [piece for piece in layout.pieces if piece.owned]
    arrays = [(p.leaf, p.start, as_array(data[p.offset : p.offset + p.nbytes], layout, p)) for p in owned]
    storage, writer = open_storage(root), f"{SAVE}h{rank}"
    prefix = StepFolder(storage, 1, SAVE).write_prefix
    return HostPart(
        host=HostId(str(rank)),
        writer=writer,
        trees=layout.trees,
        objects={"state": write_share(storage, prefix, writer, layout.trees[0], arrays)} if arrays else {},
        claims={"state": [(leaf, start, array.shape) for leaf, start, array in arrays]},
        tables={rank: table},
        local={rank: local_checksums(layout, table)},
    )


def publish(root: str, parts: Sequence[HostPart]) -> None:
    storage = open_storage(root)
    folder = StepFolder(storage, 1, SAVE)
    package = build_package(storage, "reshard", 1, SAVE, parts)
    folder.assemble(package)
    folder.put_package(package)
    folder.publish(package)


def restore_share(case: Case, root: str) -> dict[str, int]:
    """Restore this process's part and compare it.

    Returns:
        "read": bytes, "needed": bytes of this process's distinct boxes, "touched": bytes of the chunks in which they lie.
    """
    reader = raystate.Reader(root)
    state = reader.restore(case.reference()).state
    needed, touched = compared(case, state)
    return {"read": reader.bytes_read, "needed": needed, "touched": touched}


def reshard_share(case: Case, order: dict[str, Any]) -> dict[str, int]:
    """Restore this process's part from memory and compare it.

    Returns:
        "memory", "peer", "storage": bytes from there; "needed": bytes of this process's distinct boxes.
    """
    restored = restore(order, case.reference(), jax.process_index(), jax.process_count())
    needed, _ = compared(case, restored.state)
    return {**restored.bytes_from, "needed": needed}


def compared(case: Case, state: Any) -> tuple[int, int]:
    """(bytes of this process's distinct boxes, bytes of the chunks in which they lie), of a state that is as it was saved."""
    assert jax.tree.structure(state) == jax.tree.structure(case.reference())
    values = nested(list(range(len(case.leaves))))  # where each array is
    needed = touched = 0
    for place, got in zip(jax.tree.leaves(values), jax.tree.leaves(state), strict=True):
        if not isinstance(got, jax.Array | np.ndarray):
            assert got == place
            continue
        leaf, bits = case.leaves[place], case.bits(place)
        if leaf.new is None:
            assert _same(got, bits), leaf
            needed, touched = needed + bits.nbytes, touched + bits.nbytes
            continue
        assert isinstance(got, jax.Array)
        assert got.sharding.is_equivalent_to(sharded(case.new_mesh, leaf.new), len(leaf.shape)), leaf
        data = jax.random.key_data(got) if leaf.dtype == KEY else got
        mine = {str(shard.index): shard for shard in data.addressable_shards}
        chunks = np.zeros(bits.shape, bool)
        for shard in mine.values():
            assert _same(np.asarray(shard.data), bits[shard.index]), (leaf, shard.index)
            needed += shard.data.nbytes
            lengths = zip(shard.index, bits.shape, case.chunk(place), strict=True)
            box = [(*part.indices(length)[:2], chunk) for part, length, chunk in lengths]
            chunks[tuple(slice(low // chunk * chunk, -(-high // chunk) * chunk) for low, high, chunk in box)] = True
        touched += int(chunks.sum()) * bits.itemsize
    return needed, touched


def _same(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def small_chunks(nbytes: int) -> None:
    """What is megabytes in a user's state is a few rows here."""
    global CHUNK_BYTES
    CHUNK_BYTES = nbytes
