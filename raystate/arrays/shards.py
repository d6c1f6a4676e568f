"""Who holds what of a jax.Array: boxes of its sharding, and the sharding as Orbax writes it down."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding, SingleDeviceSharding

Index = tuple[int, ...]


class Shard(NamedTuple):
    """One distinct box of an array on this process. `position` is into `array.addressable_shards`."""

    position: int
    start: Index
    shape: Index
    owned: bool


class Box(NamedTuple):
    start: Index
    shape: Index


def box_of(index: tuple[slice, ...], shape: Index) -> Box:
    """A jax index (slices with step 1) as start and shape, in elements of the global array."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return Box(tuple(low for low, _, _ in bounds), tuple(high - low for low, high, _ in bounds))


def local_shards(array: jax.Array, *, process_index: int) -> list[Shard]:
    """The distinct boxes of `array` on this process, first holder first.

    `owned` is set on exactly one process per box: the holder of replica 0. An array that only this process can see, in a run of
    several, is taken as this process's copy of a value that all have: process 0 owns it.
    """
    local = is_process_local(array.sharding)
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


def is_process_local(sharding: Sharding) -> bool:
    return jax.process_count() > 1 and sharding.is_fully_addressable


def chunk_shape(sharding: Sharding, shape: Index) -> Index:
    return tuple(max(1, size) for size in sharding.shard_shape(shape))


def sharding_json(sharding: Sharding) -> str | None:
    """The text that Orbax keeps in `_sharding`, or None for kinds that it has no form for (and for process-local arrays)."""
    if is_process_local(sharding):
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
