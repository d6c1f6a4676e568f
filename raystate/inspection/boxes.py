"""An array cut into boxes that can be read one after the other in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "int4", "float8_…"
import numpy as np

from raystate.core.formats.boxes import Box, grid
from raystate.core.formats.tree import ArraySpec, TreeSpec

BOX_BYTES = 64 << 20


def nbytes_of(array: ArraySpec) -> int:
    """Bytes of the whole array in memory."""
    return math.prod(array.shape) * np.dtype(array.dtype).itemsize


def total_bytes(tree: TreeSpec) -> int:
    """Bytes of all arrays of a tree in memory."""
    return sum(nbytes_of(leaf.array) for leaf in tree.leaves if leaf.array is not None)


def boxes_of(array: ArraySpec, *, box_bytes: int = BOX_BYTES) -> Iterator[Box]:
    """Boxes of whole chunks, in order, that make up the array; of about `box_bytes` at most, or one chunk if that is larger."""
    size = [max(1, min(chunk, whole)) for chunk, whole in zip(array.chunk, array.shape, strict=True)]
    for axis in reversed(range(len(size))):  # the last dimension first: what lies together is read together
        room = box_bytes // (math.prod(size) * np.dtype(array.dtype).itemsize)
        chunks = max(1, min(room, -(-array.shape[axis] // size[axis])))
        size[axis] *= chunks
    return grid(Box((0,) * len(size), array.shape), size)
