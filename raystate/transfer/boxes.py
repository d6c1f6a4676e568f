"""Arrays in boxes: what is read and written at a time, in the order in which a flat file has the bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "int4", "float8_…"
import numpy as np

from raystate.core.formats.boxes import Box, grid, in_batches
from raystate.core.formats.tree import ArraySpec, TreeSpec
from raystate.orbax.array_reads import Request

BATCH_BYTES = 64 << 20  # read and written at a time; two batches are in memory, one that is read and one that is written
_MOST_BYTES = 512 << 20  # of a box that is larger than a batch because the chunks of the source are

Read = Callable[[Sequence[Request]], list[np.ndarray]]
"""Boxes of the arrays of one tree, in order: (leaf index, start, shape) each, in elements of the global array."""

Given = TypeVar("Given")


def boxes(array: ArraySpec) -> Iterator[Box]:
    """Boxes that make up an array, in row-major order: their elements follow one another in a flat file.

    Each has at most BATCH_BYTES, unless the chunks of the source are larger, which have to be read as a whole anyway.
    """
    shape, itemsize = array.shape, np.dtype(array.dtype).itemsize
    whole = Box((0,) * len(shape), shape)
    if not shape or 0 in shape:
        return iter([whole])
    axis = _axis(shape, itemsize)
    row = math.prod(shape[axis + 1 :]) * itemsize  # bytes of one index along the axis
    count, chunk = max(1, BATCH_BYTES // row), array.chunk[axis]
    if count >= chunk:
        count -= count % chunk
    elif chunk * row <= _MOST_BYTES:
        count = chunk
    return grid(whole, (*(1,) * axis, count, *shape[axis + 1 :]))


def row_major_chunk(chunk: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """A chunk for an array that is written in `boxes`: this one, made smaller until each box is a union of whole chunks."""
    if not shape or 0 in shape:
        return chunk
    axis = _axis(shape, itemsize)
    most = max(1, BATCH_BYTES // (math.prod(shape[axis + 1 :]) * itemsize))
    return (*(1,) * axis, min(chunk[axis], most), *chunk[axis + 1 :])


def batches(tree: TreeSpec, leaves: Iterable[int], most_bytes: int = 0) -> Iterator[list[Request]]:
    """The boxes of these leaves, in order, as many at a time as have at most `most_bytes` (0: BATCH_BYTES) together."""
    arrays = {leaf: array for leaf in leaves if (array := tree.leaves[leaf].array) is not None}
    requests: Iterator[Request] = ((leaf, box.start, box.shape) for leaf, array in arrays.items() for box in boxes(array))
    sizes = {leaf: np.dtype(array.dtype).itemsize for leaf, array in arrays.items()}
    return in_batches(requests, lambda one: math.prod(one[2]) * sizes[one[0]], most_bytes or BATCH_BYTES)


def read_ahead(read: Callable[[Given], list[np.ndarray]], wanted: Iterable[Given]) -> Iterator[tuple[Given, list[np.ndarray]]]:
    """Each with what was read for it; the next one is being read meanwhile."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="raystate-read-ahead") as pool:
        before = None
        for one in wanted:
            now = (one, pool.submit(read, one))
            if before is not None:
                yield before[0], before[1].result()
            before = now
        if before is not None:
            yield before[0], before[1].result()


def raw(part: np.ndarray) -> np.ndarray:
    """The bytes of a box, uint8, in row-major order and little-endian; a copy only if they don't lie so."""
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def _axis(shape: tuple[int, ...], itemsize: int) -> int:
    """The first axis along which a batch holds at least one index."""
    return next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) * itemsize <= BATCH_BYTES)
