"""Boxes of arrays: which elements two have in common, what is left of one without the other, and how a large one is cut."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

_Part = TypeVar("_Part")

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
    """`box` in parts of at most `most` elements each (at least one), cut along its first dimensions; see `grid`."""
    rows = [math.prod(box.shape[axis + 1 :]) for axis in range(len(box.shape))]
    return list(grid(box, [max(1, min(length, most // max(1, row))) for length, row in zip(box.shape, rows, strict=True)]))


def grid(box: Box, steps: Sequence[int]) -> Iterator[Box]:
    """`box` in parts of this shape, in row-major order; the last ones may be smaller, and one without elements is one part."""
    ranges = (range(low, low + max(1, length), step) for low, length, step in zip(*box, steps, strict=True))
    for start in itertools.product(*ranges):
        yield Box(start, tuple(min(step, low + length - at) for at, low, length, step in zip(start, *box, steps, strict=True)))


def slices(box: Box, origin: Index) -> tuple[slice, ...]:
    """Where `box` is in an array whose first element is at `origin`."""
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(box.start, box.shape, origin, strict=True))


def in_batches(parts: Iterable[_Part], nbytes: Callable[[_Part], int], most_bytes: int) -> Iterator[list[_Part]]:
    """The parts in order, as many at a time as have at most `most_bytes` together; a larger one goes alone."""
    batch: list[_Part] = []
    size = 0
    for part in parts:
        if batch and size + nbytes(part) > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append(part)
        size += nbytes(part)
    if batch:
        yield batch
