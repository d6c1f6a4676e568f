"""Device -> host memory without stopping the training.

`hold` runs on the training thread and only enqueues: the next step may donate the very arrays that are being saved, so it asks the
runtime for a copy of this process's shards (on accelerators into pinned host memory, so that it costs no device memory) and returns
while the step that computes them still runs. `copy` runs behind it, waits, and moves the bytes into a slot.

benchmarks/hold.py measures what the alternatives cost the training.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from raystate import checksum
from raystate.arrays.tree import Described, Plan
from raystate.core.errors import CapacityError
from raystate.core.tree import Piece

_MAX_COPY_THREADS = 8
_BYTES_PER_COPY_THREAD = 16 << 20


class Held:
    """One step's bytes, safe from donation. Give it to `copy`, or `release` it."""

    def __init__(self, plan: Plan, parts: list[Any]):
        self.plan = plan
        self._parts = parts  # per piece: a single-device jax.Array, (array, position) in one that was held whole, or numpy

    def separate(self) -> None:
        """Replace arrays that were held whole by their shards. Not from several threads: jax takes an array apart when it is first
        asked for a shard, and another thread that asks meanwhile misses some."""
        self._parts = [part[0].addressable_data(part[1]) if isinstance(part, tuple) else part for part in self._parts]

    def take(self, piece: int) -> Any:
        """The array of a piece; this drops it from here."""
        part, self._parts[piece] = self._parts[piece], None
        return part

    def release(self) -> None:
        self._parts = [None] * len(self._parts)


def hold(described: Described) -> Held:
    """Keep this step's bytes although the next step may donate or overwrite them.

    Returns without waiting for a computation. numpy leaves can be changed in place at any time, so they are copied here and now.
    """
    arrays: list[jax.Array] = []
    slots: list[list[tuple[int, int]]] = []  # per array to copy: (piece, addressable position in it)
    parts: list[Any] = []
    for leaf in described.plan.arrays:
        value = described.leaves[leaf.position]
        if leaf.numpy:
            parts.append(np.array(value))
            continue
        if leaf.key:
            value = jax.random.key_data(value)
        if leaf.whole:
            arrays.append(value)
            slots.append([(len(parts) + i, shard.position) for i, shard in enumerate(leaf.shards)])
        else:  # replicas: copy each box once
            for i, shard in enumerate(leaf.shards):
                arrays.append(value.addressable_data(shard.position))
                slots.append([(len(parts) + i, 0)])
        parts.extend([None] * len(leaf.shards))
    if arrays:
        copies = jax.device_put(arrays, [_copy_target(array) for array in arrays], may_alias=False)
        for copied, places in zip(copies, slots, strict=True):
            for piece, position in places:
                parts[piece] = (copied, position)
    return Held(described.plan, parts)


def _copy_target(array: jax.Array) -> Any:
    sharding = array.sharding
    device = next(iter(sharding.device_set))
    if device.platform == "cpu" or not _has_pinned_host(device):
        return sharding
    return sharding.with_memory_kind("pinned_host")


_pinned_host: dict[str, bool] = {}  # by device kind


def _has_pinned_host(device: Any) -> bool:
    if device.device_kind not in _pinned_host:
        _pinned_host[device.device_kind] = any(memory.kind == "pinned_host" for memory in device.addressable_memories())
    return _pinned_host[device.device_kind]


def copy(held: Held, data: np.ndarray) -> tuple[int, ...]:
    """Move the held bytes into a slot. For a background thread: waits for the computation; releases `held` piece by piece.

    Args:
        held: from `hold`.
        data: uint8, writable, at least `layout.data_bytes` long.

    Returns:
        The crc32c of each piece of the layout, computed from what was copied, not from the slot.

    Raises:
        CapacityError: `data` is too small. Whatever the computation itself raised.
    """
    layout = held.plan.layout
    if data.nbytes < layout.data_bytes:
        text = f"the state needs {layout.data_bytes} bytes on this process, the slot has {data.nbytes}"
        raise CapacityError(text, needed_bytes=layout.data_bytes, slot_bytes=data.nbytes)
    pieces = layout.pieces
    threads = min(_copy_threads(), len(pieces), max(1, layout.data_bytes // _BYTES_PER_COPY_THREAD))

    def one(index: int) -> int:
        return _copy_piece(held.take(index), pieces[index], data)

    try:
        held.separate()
        if threads <= 1:
            return tuple(map(one, range(len(pieces))))
        with ThreadPoolExecutor(threads, thread_name_prefix="raystate-copy") as pool:
            return tuple(pool.map(one, range(len(pieces))))
    finally:
        held.release()


def _copy_threads() -> int:
    """Half the cores: the others compute the next step."""
    return max(1, min(_MAX_COPY_THREADS, len(os.sched_getaffinity(0)) // 2))


def _copy_piece(array: Any, piece: Piece, data: np.ndarray) -> int:
    source = _bytes_of(np.asarray(array))
    checksum.copy(data[piece.offset : piece.offset + piece.nbytes], source)
    return checksum.crc32c(source)


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """A flat uint8 view in C order and native byte order (a copy only where the array is laid out otherwise)."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
