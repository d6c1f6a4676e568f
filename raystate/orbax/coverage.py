"""Whether what all writers wrote covers every chunk of every array exactly once. Pure.

Orbax commits a step whose chunks are half missing, so this check is ours, before the commit.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from raystate.core.formats.tree import ArraySpec, TreeSpec
from raystate.orbax.writer import misfit

Box = tuple[int, tuple[int, ...], tuple[int, ...]]  # leaf index, start, shape, in elements of the global array


def chunk_grid(array: ArraySpec) -> tuple[int, ...]:
    """How many chunks there are along each dimension; () for a scalar, a 0 where the array has no elements."""
    return tuple(-(-size // chunk) for size, chunk in zip(array.shape, array.chunk, strict=True))


def coverage_gaps(tree: TreeSpec, written: Iterable[Box], *, limit: int = 20) -> list[str]:
    """Describe every chunk that is missing or written more than once, and every box that is not made of whole chunks.

    One byte per chunk and two slices per box: a million chunks take milliseconds.

    Args:
        tree: the item.
        written: the boxes of all writers together. An array without elements needs one box without elements.
        limit: at most so many descriptions; the last one says how many more there are.

    Returns:
        Descriptions, one per array and kind of problem; empty if the coverage is exact.
    """
    counts = {index: np.zeros(chunk_grid(leaf.array), np.uint8) for index, leaf in enumerate(tree.leaves) if leaf.array is not None}
    seen: set[int] = set()
    gaps: list[str] = []
    for leaf, start, shape in written:
        array = tree.leaves[leaf].array if 0 <= leaf < len(tree.leaves) else None
        if array is None:
            gaps.append(f"{tree.item}: a box was written for leaf {leaf}, which is no array")
            continue
        seen.add(leaf)
        if problem := misfit(array, start, shape):
            gaps.append(f"{tree.item}/{tree.leaves[leaf].name}: the box at {start} of shape {shape} {problem}")
            continue
        box = tuple(
            slice(begin // chunk, -(-(begin + length) // chunk) if length else begin // chunk)
            for begin, length, chunk in zip(start, shape, array.chunk, strict=True)
        )
        part = counts[leaf][(*box, ...)]
        np.minimum(part, 1, out=part)  # 2 stands for "more than once": no overflow however often
        part += 1
    for leaf, count in counts.items():
        array = tree.leaves[leaf].array
        assert array is not None
        name = f"{tree.item}/{tree.leaves[leaf].name}"
        if not count.size and leaf not in seen:
            gaps.append(f"{name}: no writer created this array of shape {array.shape}")
        for word, wrong in (("missing", count == 0), ("written more than once", count > 1)):
            if how_many := int(np.count_nonzero(wrong)):
                first = tuple(int(i) * c for i, c in zip(np.argwhere(wrong)[0], array.chunk, strict=True))
                chunk = f"{how_many} of {count.size} chunks of shape {array.chunk}"
                gaps.append(f"{name}: {chunk} {word}, the first at {first}")
    return gaps if len(gaps) <= limit else [*gaps[: limit - 1], f"and {len(gaps) - limit + 1} more"]
