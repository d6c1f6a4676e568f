"""A part of a tree, or the tree in another dtype."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from raystate.arrays.converting import converted
from raystate.arrays.mismatch import DifferenceError
from raystate.arrays.tree import STORABLE
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.tree import LeafSpec, PathKey, TreeSpec
from raystate.orbax.array_reads import Request
from raystate.transfer.boxes import Read


@dataclass(frozen=True, kw_only=True)
class Picked:
    """A tree, and how its boxes are read."""

    tree: TreeSpec
    read: Read


def pick(tree: TreeSpec, read: Read, *, match: str | None = None, dtype: str | None = None) -> Picked:
    """What is left of a tree.

    Args:
        tree: of a step.
        read: its boxes.
        match: a regular expression that is searched in the dotted name of each leaf; None: all leaves. Where items of a list are left
            out, the others keep their numbers, as keys of a dict.
        dtype: floating-point arrays are rounded to it; None: they stay.

    Raises:
        ConfigError: the expression is none or matches nothing, or the dtype is none of numbers with a point. `read` raises it for a value
            that the dtype can't hold.
    """
    kept = _kept(tree, match)
    leaves = [tree.leaves[index] for index in kept]
    if dtype is not None:
        _check_dtype(dtype)
        leaves = [_cast(leaf, dtype) for leaf in leaves]
    if len(kept) != len(tree.leaves):
        leaves = _without_broken_lists(leaves)
    picked = TreeSpec(item=tree.item, leaves=tuple(leaves))

    def read_picked(requests: Sequence[Request]) -> list[np.ndarray]:
        parts = read([(kept[leaf], start, shape) for leaf, start, shape in requests])
        return [_as(leaves[leaf], part, start) for part, (leaf, start, _) in zip(parts, requests, strict=True)]

    return Picked(tree=picked, read=read_picked)


def _as(leaf: LeafSpec, part: np.ndarray, start: tuple[int, ...]) -> np.ndarray:
    dtype = _dtype_of(leaf)
    try:
        return part if part.dtype == dtype else converted(part, dtype, start)
    except DifferenceError as error:
        raise ConfigError(f"dtype: {leaf.name}: {error}", field="dtype", got=dtype.name) from error


def _kept(tree: TreeSpec, match: str | None) -> list[int]:
    if match is None:
        return list(range(len(tree.leaves)))
    try:
        pattern = re.compile(match)
    except re.error as error:
        raise ConfigError(f"match: {match!r} is no regular expression: {error}", field="match", got=match) from error
    kept = [index for index, leaf in enumerate(tree.leaves) if pattern.search(leaf.name)]
    if not any(tree.leaves[index].kind in ("array", "scalar") for index in kept):
        shown = ", ".join(leaf.name for leaf in tree.leaves[:5])
        more = f" and {len(tree.leaves) - 5} more" if len(tree.leaves) > 5 else ""
        raise ConfigError(f"match: {match!r} is in the name of no array; there are {shown}{more}", field="match", got=match)
    return kept


def _check_dtype(dtype: str) -> None:
    try:
        fits = dtype in STORABLE and np.dtype(dtype).kind != "c" and ml_dtypes.finfo(np.dtype(dtype)) is not None
    except (TypeError, ValueError):
        fits = False
    if not fits:
        message = f"dtype: {dtype!r} is no dtype of numbers with a point, such as float32, bfloat16 or float8_e4m3fn"
        raise ConfigError(message, field="dtype", got=dtype)


def _cast(leaf: LeafSpec, dtype: str) -> LeafSpec:
    if leaf.array is None or leaf.array.key_impl is not None or not _has_point(leaf.array.dtype):
        return leaf
    return dataclasses.replace(leaf, array=dataclasses.replace(leaf.array, dtype=dtype))


def _has_point(dtype: str) -> bool:
    return "float" in dtype  # bfloat16 and float8_… are of numpy's kind "V"


def _dtype_of(leaf: LeafSpec) -> np.dtype:
    assert leaf.array is not None
    return np.dtype(leaf.array.dtype)


def _without_broken_lists(leaves: list[LeafSpec]) -> list[LeafSpec]:
    """Lists of which items are missing, as dicts."""
    numbers: dict[tuple[PathKey, ...], set[int]] = {}
    for leaf in leaves:
        for depth, key in enumerate(leaf.path):
            if isinstance(key, int):
                numbers.setdefault(leaf.path[:depth], set()).add(key)
    broken = {path for path, found in numbers.items() if found != set(range(len(found)))}
    return [
        dataclasses.replace(
            leaf, path=tuple(str(key) if leaf.path[:depth] in broken else key for depth, key in enumerate(leaf.path))
        )
        for leaf in leaves
    ]
