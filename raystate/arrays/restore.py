"""From pieces, wherever they are, to the tree that a reference asks for.

Each process reads only the boxes that its own devices need, each box once, and no process waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from raystate.arrays.reference import Device, Given, Keep, Numpy, Plain, ShapeRule, Want, match_reference
from raystate.arrays.shards import Box, box_of
from raystate.core.tree import TreeSpec, nest

BATCH_BYTES = 1 << 30  # read so much, place it on the devices, go on: host memory stays bounded
_ALIGNMENT_BYTES = 64  # below it XLA's CPU client copies once more


class ReadRequest(NamedTuple):
    """A box of one array: `leaf` is an index into the TreeSpec's leaves; start and shape in elements of the global array."""

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


class PieceSource(Protocol):
    """The arrays of one tree, in any tier."""

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        """The boxes, in order, with the dtype of the TreeSpec. They may be views of memory that is reused later."""
        ...


def restore_tree(
    reference: Any,
    spec: TreeSpec,
    source: PieceSource,
    *,
    partial: bool = False,
    cast: bool = False,
    shapes: ShapeRule = "match",
) -> Any:
    """Build the tree that the reference asks for.

    Args:
        reference: any pytree; leaves ShapeDtypeStruct or jax.Array (gives a jax.Array with that sharding; without one, on the default
            device and free to move), np.ndarray, Python or numpy scalars, str, a Sharding (shape and dtype from the checkpoint), or
            `...` (skipped, stays `...`). None: the raw tree, nested dicts and lists of numpy arrays and values.
        spec: what the checkpoint holds, with the values of its scalars (`TreeSpec.with_values`).
        source: where its bytes are. None of its memory is kept: everything that is returned is a copy.
        partial: paths that only the reference has keep its value instead of being an error.
        cast: convert dtypes instead of refusing.
        shapes: "checkpoint" takes the checkpoint's shape where the reference has another.

    Raises:
        ReferenceMismatchError: all differences in one. CorruptCheckpointError: from the source.
    """
    if reference is None:
        return _raw_tree(spec, source)
    wants, structure = match_reference(reference, spec, partial=partial, cast=cast, shapes=shapes)
    return jax.tree_util.tree_unflatten(structure, _gather(wants, spec, source))


def _raw_tree(spec: TreeSpec, source: PieceSource) -> Any:
    wants: list[Want] = []
    for index, leaf in enumerate(spec.leaves):
        if leaf.array is not None:
            wants.append(Numpy(leaf=index, dtype=np.dtype(leaf.array.dtype)))
        else:
            wants.append(Plain(value={"dict": {}, "list": []}.get(leaf.kind, leaf.value)))
    return nest(spec.leaves, _gather(wants, spec, source))


def _gather(wants: list[Want], spec: TreeSpec, source: PieceSource) -> list[Any]:
    results: list[Any] = [want.value if isinstance(want, Keep | Plain) else None for want in wants]
    for position, want in enumerate(wants):
        if isinstance(want, Given):
            device = Device(leaf=-1, shape=(), dtype=want.value.dtype, sharding=want.sharding)
            results[position] = _as_device(device, {Box((), ()): want.value})
    for batch in _batches([(i, w) for i, w in enumerate(wants) if isinstance(w, Numpy | Device)], spec):
        _fill(results, batch, source)
    return results


class _Part(NamedTuple):
    """One leaf to read: where it goes, and the boxes it is made of."""

    position: int
    want: Numpy | Device
    boxes: list[Box]


def _batches(wanted: list[tuple[int, Numpy | Device]], spec: TreeSpec) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    batch_bytes = 0
    for position, want in wanted:
        array = spec.leaves[want.leaf].array
        assert array is not None
        boxes = _boxes(want, array.shape)
        size = sum(int(np.prod(box.shape, dtype=np.int64)) for box in boxes) * np.dtype(array.dtype).itemsize
        if batch and batch_bytes + size > BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(_Part(position, want, boxes))
        batch_bytes += size
    if batch:
        yield batch


def _boxes(want: Numpy | Device, shape: tuple[int, ...]) -> list[Box]:
    """The distinct boxes that this process needs."""
    if isinstance(want, Numpy) or want.sharding is None:
        return [Box((0,) * len(shape), shape)]
    indices = want.sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(box_of(index or (), shape) for index in indices))


def _fill(results: list[Any], batch: list[_Part], source: PieceSource) -> None:
    # Two leaves of a reference may ask for the same box only if they have the same path, which a pytree can't: no need to merge.
    requests = [ReadRequest(part.want.leaf, box.start, box.shape) for part in batch for box in part.boxes]
    arrays = iter(source.read(requests))
    placed: list[jax.Array] = []
    for part in batch:
        boxes = {box: next(arrays) for box in part.boxes}
        if isinstance(part.want, Numpy):
            results[part.position] = _as_numpy(part.want, next(iter(boxes.values())))
        else:
            results[part.position] = _as_device(part.want, boxes)
            placed.append(results[part.position])
    # The source's memory may be reused as soon as this returns, and transfers to devices run behind.
    jax.block_until_ready(placed)


def _as_numpy(want: Numpy, box: np.ndarray) -> Any:
    array = np.array(box, dtype=want.dtype)
    if want.scalar is None:
        return array
    if issubclass(want.scalar, np.generic):
        return array[()]
    return want.scalar(array.item())


def _as_device(want: Device, boxes: dict[Box, np.ndarray]) -> jax.Array:
    if want.sharding is None:
        (box,) = boxes.values()
        array = jax.device_put(_private(box, want.dtype))
    else:
        memory = want.sharding.memory_kind
        hosts: dict[Box, np.ndarray] = {}
        sources: list[np.ndarray] = []
        targets: list[SingleDeviceSharding] = []
        for device, index in want.sharding.addressable_devices_indices_map(want.shape).items():
            box = box_of(index or (), want.shape)
            if box not in hosts:
                on_cpu = device.platform == "cpu"
                hosts[box] = _private(boxes[box], want.dtype) if on_cpu else boxes[box].astype(want.dtype, copy=False)
            sources.append(hosts[box])
            targets.append(SingleDeviceSharding(device, memory_kind=memory))
        parts = jax.device_put(sources, targets)
        array = jax.make_array_from_single_device_arrays(want.shape, want.sharding, parts, dtype=want.dtype)
    return array if want.key_impl is None else jax.random.wrap_key_data(array, impl=want.key_impl)


def _private(box: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An aligned copy. XLA's CPU client makes an array of host memory without copying it, even when asked not to (may_alias=False),
    so it must never see a slot's memory. It never writes to such memory either, so that replicas can share the copy."""
    nbytes = box.size * dtype.itemsize
    raw = np.empty(nbytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % _ALIGNMENT_BYTES
    copy = raw[offset : offset + nbytes].view(dtype).reshape(box.shape)
    np.copyto(copy, box, casting="unsafe")
    return copy
