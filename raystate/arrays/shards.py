"""Who holds what of a jax.Array: boxes of its sharding, and the sharding as Orbax writes it down."""

from __future__ import annotations

import functools
import json
import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

from raystate.core.formats.boxes import Box, Index, grid
from raystate.core.formats.tree import CHUNK_BYTES
from raystate.machine.aligned import SMALL_BYTES

LEAST_PART_BYTES = 256 << 10  # of parts on average: each takes a line in the layout
MOST_PARTS = 64  # that an axis is cut into at once: the length of a shard may have large prime factors only


Places = tuple[tuple[Any, Box], ...]  # (device of this process, the box that it has)


class Shard(NamedTuple):
    """One distinct box of an array on this process. `position` is into `array.addressable_shards`."""

    position: int
    start: Index
    shape: Index
    owned: bool


def box_of(index: tuple[slice, ...], shape: Index) -> Box:
    """A jax index (slices with step 1) as start and shape, in elements of the global array."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return Box(tuple(low for low, _, _ in bounds), tuple(high - low for low, high, _ in bounds))


@functools.lru_cache(maxsize=1024)
def places_of(sharding: Sharding, shape: tuple[int, ...]) -> Places:
    """Which box each device of this process has, in the order of jax."""
    indices = sharding.addressable_devices_indices_map(shape)
    return tuple((device, box_of(index or (), shape)) for device, index in indices.items())


def local_shards(array: jax.Array, *, process_index: int, process_count: int) -> list[Shard]:
    """The distinct boxes of `array` on this process, first holder first.

    `owned` is set on exactly one process per box: the holder of replica 0. In a run of several, an
    array that only this process can see counts as its copy of a value that all have. Process 0 owns
    it, and the values are compared before a commit.
    """
    local = is_process_local(array.sharding, process_count)
    found: dict[Box, Shard] = {}
    for position, shard in enumerate(array.addressable_shards):
        box = box_of(shard.index, array.shape)
        owned = process_index == 0 if local else shard.replica_id == 0
        known = found.get(box)
        if known is None:
            found[box] = Shard(position, box.start, box.shape, owned)
        elif owned and not known.owned:
            found[box] = known._replace(owned=True)
    return list(found.values())


def is_process_local(sharding: Sharding, process_count: int) -> bool:
    """Whether an array with this sharding has no identity beyond this process, although there are others."""
    return process_count > 1 and sharding.is_fully_addressable


def chunk_shape(shard: Index, shape: Index, itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> Index:
    """How one shard's box is cut into chunks: the unit that is written, checksummed and read back as a whole.

    A job that restores with other axes sharded needs narrow parts of many shards. So chunks are cut along all dimensions, the longest
    first, until they have at most `chunk_bytes`; then each process reads little more than what it needs.

    Args:
        shard: the largest shard's shape.
        shape: the array's.
        itemsize: bytes.
        chunk_bytes: see `WriteOptions`. A shard whose length has no small factors may stay above it.
    """
    chunk = [max(1, size) for size in shard]
    fixed: set[int] = set()
    while math.prod(chunk) * itemsize > chunk_bytes and len(fixed) < len(chunk):
        axis = max((i for i in range(len(chunk)) if i not in fixed), key=lambda i: chunk[i])
        parts = _parts(chunk[axis], sharded=shard[axis] != shape[axis])
        if parts > 1:
            chunk[axis] = -(-chunk[axis] // parts)
        else:
            fixed.add(axis)
    return tuple(chunk)


def _parts(length: int, *, sharded: bool) -> int:
    """In how many parts to cut. The largest prime factor first: what stays is a power of two, and so fits most other shardings."""
    for factor in range(MOST_PARTS, 1, -1):
        if length % factor == 0 and all(factor % small for small in range(2, factor)):
            return factor
    # Shards begin on chunk boundaries; only where there are none inside may the last chunk be a shorter one.
    return 1 if sharded else min(length, 2)


def straight_boxes(box: Box, chunk: Index, itemsize: int) -> list[Box]:
    """A shard's box in parts, each of which holds the elements of each of its chunks one after the other, in row-major order.

    Such a part is written to storage from where it lies in a slot. Of any other TensorStore makes a copy first, in fresh memory, and
    keeps it until all is written: three times as slow, and as much memory again. A small shard stays whole: it may be held as bytes.

    Args:
        box: made of whole chunks.
        chunk: from `chunk_shape`.
        itemsize: bytes.
    """
    first = next(
        (axis for axis, (size, length) in enumerate(zip(chunk, box.shape, strict=True)) if min(size, length) > 1), len(chunk)
    )
    steps = [size if axis > first else max(1, length) for axis, (size, length) in enumerate(zip(chunk, box.shape, strict=True))]
    parts = math.prod(-(-length // step) for length, step in zip(box.shape, steps, strict=True))
    if parts <= 1 or box.size * itemsize < max(parts * LEAST_PART_BYTES, SMALL_BYTES + 1):
        return [box]
    return list(grid(box, steps))


def sharding_json(sharding: Sharding, *, process_count: int) -> str | None:
    """The text that Orbax keeps in `_sharding`, or None for kinds that it has no form for (and for process-local arrays)."""
    if is_process_local(sharding, process_count):
        return None  # differs between processes, and means nothing to a reader
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        raw: dict[str, Any] = {
            "sharding_type": "NamedSharding",
            "shape": list(mesh.shape.values()),
            "axis_names": list(mesh.axis_names),
            "axis_types": [str(kind) for kind in mesh.axis_types],
            "partition_spec": [_spec_entry(entry) for entry in sharding.spec],
            "device_mesh": {"mesh": _device_ids(np.asarray(mesh.devices).tolist())},
        }
        return json.dumps(raw)
    if isinstance(sharding, SingleDeviceSharding):
        return json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": str(next(iter(sharding.device_set)))})
    return None


def _spec_entry(entry: Any) -> Any:
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, tuple):
        return list(entry)
    return None  # UNCONSTRAINED: cannot occur in the sharding of an array, only in an annotation


def _device_ids(devices: Any) -> Any:
    return [_device_ids(part) for part in devices] if isinstance(devices, list) else {"id": devices.id}
