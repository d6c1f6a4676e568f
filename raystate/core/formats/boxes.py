"""Boxes of arrays: which elements two have in common, what is left of one without the other, and how a large one is cut."""

from __future__ import annotations

import math
from typing import NamedTuple

Index = tuple[int, ...]


class Box(NamedTuple):
    """A block of an array; `start` and `shape` in elements. Boxes of a 0-d array are always the same."""

    start: Index
    shape: Index

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)


def intersection(a: Box, b: Box) -> Box | None:
    """The common elements; None: there are none."""
    if a == b:
        return a if a.size else None
    start = tuple(map(max, a.start, b.start))
    stop = tuple(min(i + n, j + m) for i, n, j, m in zip(a.start, a.shape, b.start, b.shape, strict=True))
    shape = tuple(high - low for low, high in zip(start, stop, strict=True))
    return Box(start, shape) if all(n > 0 for n in shape) else None


def difference(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, which lies inside it, as at most two boxes per dimension that don't overlap."""
    rest: list[Box] = []
    start, shape = list(box.start), list(box.shape)
    for axis, (low, size) in enumerate(zip(hole.start, hole.shape, strict=True)):
        before = low - start[axis]
        after = start[axis] + shape[axis] - (low + size)
        if before:
            rest.append(Box(tuple(start), (*shape[:axis], before, *shape[axis + 1 :])))
        if after:
            rest.append(Box((*start[:axis], low + size, *start[axis + 1 :]), (*shape[:axis], after, *shape[axis + 1 :])))
        start[axis], shape[axis] = low, size
    return rest


def cut(box: Box, most: int) -> list[Box]:
    """`box` in parts of at most `most` elements each (at least one), cut along its first dimensions."""
    if box.size <= max(1, most):
        return [box]
    axis = next(axis for axis, length in enumerate(box.shape) if length > 1)
    length = box.shape[axis]
    rows = min(length - 1, max(1, most * length // box.size))
    parts: list[Box] = []
    for low in range(0, length, rows):
        start = (*box.start[:axis], box.start[axis] + low, *box.start[axis + 1 :])
        part = Box(start, (*box.shape[:axis], min(rows, length - low), *box.shape[axis + 1 :]))
        parts += cut(part, most)
    return parts


def slices(box: Box, origin: Index) -> tuple[slice, ...]:
    """Where `box` is in an array whose first element is at `origin`."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(box.start, box.shape, origin, strict=True))
