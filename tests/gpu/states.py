"""States of all that a GPU may hold, the step that donates them, and slots to copy them into."""

from __future__ import annotations

import functools
import mmap
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from raystate.arena.files import page_ceil
from raystate.arrays.gpu import GpuStager
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.stage import HeldState, copy
from raystate.arrays.tree import Described
from raystate.machine.checksum import Bytes

DTYPES: list[Any] = [
    *(np.float32, np.int8, np.uint16, np.bool_, np.complex64),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4),
]


def state(seed: int, *, arrays: int = 12, rows: int = 16) -> dict[str, Any]:
    """On four devices: every dtype, sharded, replicated and alone, large and small, keys, scalars, and arrays without elements."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), devices=jax.devices()[:4])
    specs = [P(), P("x"), P("y", "x"), P(("x", "y")), P(None, "y")]
    random = np.random.default_rng(seed)
    made: dict[str, Any] = {}
    for number in range(arrays):
        dtype, spec = DTYPES[number % len(DTYPES)], specs[number % len(specs)]
        values = random.integers(0, 2 if dtype is np.bool_ else 7, (rows * (1 + number % 3), 8)).astype(dtype)
        made[f"a{number}"] = jax.device_put(values, NamedSharding(mesh, spec))
    made["large"] = jax.device_put(random.normal(size=(512, 1024)).astype(np.float32), NamedSharding(mesh, P("x", "y")))
    made["columns"] = jax.device_put(random.normal(size=(2, 300_000)).astype(np.float32), NamedSharding(mesh, P(None, "x")))
    made["more"] = jax.device_put(random.normal(size=(2, 300_000)).astype(np.float32), NamedSharding(mesh, P("x")))
    made["one"] = jax.device_put(random.normal(size=100).astype(np.float32), SingleDeviceSharding(jax.devices()[3]))
    made["scalar"] = jax.device_put(np.float32(seed), NamedSharding(mesh, P()))
    made["empty"] = jax.device_put(np.zeros((0, 3), np.float32), NamedSharding(mesh, P()))
    made["keys"] = jax.device_put(jax.random.split(jax.random.key(seed), 4), NamedSharding(mesh, P("x")))
    return made


def step(old: dict[str, Any]) -> dict[str, Any]:
    """Other values, in the same memory."""
    return {name: _next(array) for name, array in old.items()}


@functools.partial(jax.jit, donate_argnums=0)
def _next(array: jax.Array) -> jax.Array:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(jax.random.key_data(array) + 1)
    return ~array if array.dtype == bool else (array + jnp.ones((), array.dtype)).astype(array.dtype)


def count_up(old: dict[str, Any]) -> dict[str, Any]:
    """In the same memory, the bits of each element counted up, so that dtypes go through all that they can hold; see `Model`."""
    alone = {name: array for name, array in old.items() if len(array.sharding.device_set) == 1}
    return {**_counted_up({name: array for name, array in old.items() if name not in alone}), **_counted_up(alone)}


@functools.partial(jax.jit, donate_argnums=0)
def _counted_up(old: dict[str, Any]) -> dict[str, Any]:

    def one(array: jax.Array) -> jax.Array:
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jax.random.key_data(array) + 1)
        if array.dtype in (bool, jnp.int4):
            return array ^ jnp.ones((), array.dtype)
        if array.dtype == jnp.complex64:
            return array + jnp.ones((), array.dtype)
        bits = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(array, bits) + jnp.ones((), bits), array.dtype)

    return {name: one(array) for name, array in old.items()}


class Model:
    """The contents of such a state's slot, in numpy. `slot`: all of its pages."""

    def __init__(self, described: Described, tree: dict[str, Any]):
        self.slot = slot(described)
        leaves, known = described.layout.trees[0].leaves, values(tree)
        at: dict[np.dtype, list[np.ndarray]] = {}
        self._ends: list[tuple[int, str]] = []
        for piece in described.layout.pieces:
            name = str(leaves[piece.leaf].path[-1])
            value = known[name]
            part = np.ascontiguousarray(value[tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))])
            self.slot[piece.offset : piece.offset + piece.nbytes] = part.reshape(-1).view(np.uint8)
            first = piece.offset // value.dtype.itemsize
            at.setdefault(value.dtype, []).append(np.arange(first, first + part.size))
            self._ends.append((piece.offset + piece.nbytes, name))
        self._at = {dtype: np.concatenate(places) for dtype, places in at.items()}

    def count_up(self) -> None:
        """As the devices do."""
        for dtype, places in self._at.items():
            if dtype.kind == "b" or dtype == ml_dtypes.int4:
                self.slot[places] ^= 1
            elif dtype == np.complex64:
                self.slot.view(np.complex64)[places] += 1
            else:
                self.slot.view(f"u{dtype.itemsize}")[places] += 1

    def names_of(self, places: np.ndarray) -> set[str]:
        """Of arrays that these bytes belong to."""
        return {name for place in places[:1000] for name in [next(n for end, n in sorted(self._ends) if place < end)]}


def values(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Copies on the host."""
    keys = {name: jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a for name, a in tree.items()}
    return {name: np.array(array) for name, array in keys.items()}


def slot(described: Described) -> Bytes:
    """Pages of a slot, full of what was there before."""
    pages = np.frombuffer(mmap.mmap(-1, page_ceil(described.layout.data_bytes)), np.uint8)
    pages[:] = 0xAB
    return pages


def wrong(described: Described, held: HeldState, pages: Bytes, expected: dict[str, np.ndarray]) -> list[str]:
    """Names of arrays that differ in the slot."""
    crc32c = copy(held, pages)
    spec = described.layout.trees[0].with_values(described.values[0])
    holding = Holding(layout=described.layout, data=pages, crc32c=crc32c)
    found = values(restore_tree(None, spec, MemorySource([holding], "state")))
    return [
        name for name, value in expected.items() if found[name].tobytes() != value.tobytes() or found[name].dtype != value.dtype
    ]


def attached(stager: GpuStager, *slots: Bytes) -> Any:
    """Wait until they are registered; the function that takes it back."""
    detach = stager.attach(slots)
    join("raystate-register")
    return detach


def join(name: str) -> None:
    import threading

    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(60)
