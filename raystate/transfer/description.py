"""What formats without trees lack, written beside the arrays: paths, texts, empty nodes, kinds of PRNG keys and strange dtypes.

A leaf's name is its path joined by dots, as in Orbax's files. Our export adds the description below, and our import builds the same tree
of it. Without one, names are taken apart at the dots again.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np

from raystate.arrays.checks import MOST_LEVELS
from raystate.arrays.names import check_names
from raystate.arrays.tree import STORABLE
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.core.formats.tree import ArraySpec, LeafSpec, PathKey, TreeSpec

VERSION = 1
KEY = "raystate"  # of the description, in safetensors' metadata
MOST_DESCRIPTION_BYTES = 32 << 20
MOST_DIMENSIONS = 32  # TensorStore's
MOST_ARRAY_BYTES = 1 << 60
ROOT = "value"  # the name of a tree that is one array

_OURS = re.compile(r'\s*\{\s*"version"\s*:')
_KINDS = ("array", "scalar", "string", "none", "dict", "list")
_SCALARS = {"bool": bool, "int64": int, "float64": float}


@dataclass(frozen=True, kw_only=True)
class KeptAs:
    """How an array lies in a file.

    Attributes:
        dtype: numpy's name of what the file says it is.
        shape: of that.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Of its elements."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def check_shape(shape: tuple[int, ...], itemsize: int) -> None:
    """Refuse a shape that no array has that could be kept: an empty one may claim any size without a byte behind it.

    Raises:
        ValueError: says why.
    """
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"no shape of {len(shape)} dimensions can be kept, at most {MOST_DIMENSIONS}")
    if math.prod(size for size in shape if size) * itemsize > MOST_ARRAY_BYTES:
        raise ValueError(f"the shape {shape} is too large to be one")


def stored_as(array: ArraySpec, has: frozenset[str]) -> KeptAs:
    """How an array is kept in a format that has these dtypes.

    What it lacks lies there as its bits: complex128 as float64 with a last dimension of 2 where there is float64, all else as unsigned
    integers of the same width.
    """
    if array.dtype in has:
        return KeptAs(dtype=array.dtype, shape=array.shape)
    if array.dtype == "complex128":
        return KeptAs(dtype="float64", shape=(*array.shape, 2))
    return KeptAs(dtype=f"uint{8 * np.dtype(array.dtype).itemsize}", shape=array.shape)


def leaf_name(leaf: LeafSpec) -> str:
    """What a leaf is called in a file."""
    return leaf.name or ROOT


def scalar_array(value: Any) -> np.ndarray:
    """A Python number as the array of shape () that stands for it."""
    array = np.asarray(value)
    if array.dtype.name not in _SCALARS:
        raise ConfigError(f"{value!r} is no number that can be kept", got=repr(value))
    return array


def with_scalars(tree: TreeSpec) -> TreeSpec:
    """The tree with its numbers as arrays, which is how files have them."""
    leaves = [
        LeafSpec(path=leaf.path, kind="array", array=ArraySpec(shape=(), dtype=scalar_array(leaf.value).dtype.name, chunk=()))
        if leaf.kind == "scalar"
        else leaf
        for leaf in tree.leaves
    ]
    return TreeSpec(item=tree.item, leaves=tuple(leaves))


def describe_tree(tree: TreeSpec, step: int) -> str:
    """The description, as JSON."""
    nodes: list[list[Any]] = []
    for leaf in tree.leaves:
        extra: Any = None
        if leaf.array is not None:
            extra = {"dtype": leaf.array.dtype, "shape": leaf.array.shape, "numpy": leaf.array.typestr == "np.ndarray"}
            if leaf.array.key_impl is not None:
                extra["key_impl"] = leaf.array.key_impl
        elif leaf.kind == "string":
            extra = leaf.value
        elif leaf.kind == "scalar":
            extra = scalar_array(leaf.value).dtype.name
        nodes.append([leaf.path, leaf.kind, extra])
    return json.dumps({"version": VERSION, "step": step, "item": tree.item, "nodes": nodes}, separators=(",", ":"))


def is_description(text: str) -> bool:
    """Whether a text may be ours, by how it begins: other tools may have written anything under our name."""
    return _OURS.match(text) is not None


@dataclass(frozen=True, kw_only=True)
class DescribedTree:
    """A tree as a file describes it, whose numbers are still arrays.

    Attributes:
        tree: kind "scalar" has no value yet; arrays have a chunk of their own size.
        step: number of completed steps; None: the file doesn't say.
    """

    tree: TreeSpec
    step: int | None


def parse_description(text: str | bytes, found: Mapping[str, KeptAs], has: frozenset[str], what: str) -> DescribedTree:
    """The tree that a description and the arrays of a file make together.

    Args:
        text: from `describe_tree`.
        found: name -> what lies in the file.
        has: the dtypes that the format has.
        what: begins the error's message.

    Raises:
        ConfigError: a newer raystate wrote it.
        CorruptCheckpointError: it is no description, or not of these arrays.
    """
    try:
        raw = json.loads(text)
        version = raw["version"]
        if isinstance(version, int) and version > VERSION:
            raise ConfigError(
                f"{what} was written by a newer raystate (description {version}, this one knows {VERSION})", field="src"
            )
        leaves = tuple(_leaf(*node) for node in raw["nodes"])
        step, item = raw["step"], raw["item"]
        if not isinstance(item, str) or not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 2**63:
            raise ValueError("its step or item is none")
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise CorruptCheckpointError(f"{what}: its description by raystate can't be read: {error!r}", path=what) from error
    wanted: dict[str, KeptAs] = {}
    for leaf in leaves:
        if leaf.array is not None:
            wanted[leaf_name(leaf)] = stored_as(leaf.array, has)
        elif leaf.kind == "scalar":
            wanted[leaf_name(leaf)] = KeptAs(dtype=str(leaf.value), shape=())
    if wanted != dict(found):
        unlike = sorted(name for name in {*wanted, *found} if wanted.get(name) != found.get(name))
        more = f" and {len(unlike) - 5} more" if len(unlike) > 5 else ""
        message = f"{what}: its arrays are not those that its description names: {', '.join(map(repr, unlike[:5]))}{more}"
        raise CorruptCheckpointError(message, path=what)
    return DescribedTree(tree=TreeSpec(item=item, leaves=leaves), step=step)


def tree_of_names(found: Mapping[str, KeptAs], *, flat: bool, what: str) -> DescribedTree:
    """The tree that a file without description stands for.

    Args:
        found: name -> what lies in the file.
        flat: the names are the keys of one dict. False: dots make nested dicts.
        what: begins the error's message.

    Raises:
        ConfigError: a name and its beginning are both arrays, so that dots can't make dicts; or a name or a dtype can't be kept.
    """
    leaves: list[LeafSpec] = []
    inner: set[tuple[str, ...]] = set()
    for name, stored in sorted(found.items()):
        path = (name,) if flat else tuple(name.split("."))
        inner.update(path[:depth] for depth in range(1, len(path)))
        leaves.append(LeafSpec(path=path, kind="array", array=_array(stored.dtype, stored.shape, name)))
    for leaf in leaves:
        if leaf.path in inner:
            raise ConfigError(
                f"{what}: {leaf.name!r} is an array, and the beginning of another one's name; --flat keeps the names as they are",
                field="src", path=leaf.name,
            )  # fmt: skip
    return DescribedTree(tree=TreeSpec(item="state", leaves=tuple(leaves)), step=None)


def check_tree(tree: TreeSpec) -> None:
    """Refuse what can't be kept as an item of a step: names that lead elsewhere, and what `check_names` says.

    Raises:
        ConfigError: names the path.
    """
    for leaf in tree.leaves:
        if not is_plain_name(leaf.name) and leaf.path:
            raise ConfigError(
                f"item {tree.item!r}: {leaf.name[:200]!r} is no name that a checkpoint can have", field="src", path=leaf.name
            )
    check_names(tree.item, tree.leaves)
    if not any(leaf.kind in ("array", "scalar") for leaf in tree.leaves):
        raise ConfigError(f"item {tree.item!r} has neither an array nor a number", field="src", item=tree.item)


def is_plain_name(name: str) -> bool:
    """Whether a name, taken for a path, stays where it is put."""
    return not (name.startswith("/") or "\0" in name or ".." in name.split("/"))


def _leaf(path: Any, kind: Any, extra: Any) -> LeafSpec:
    if not isinstance(path, list) or len(path) > MOST_LEVELS or kind not in _KINDS:
        raise ValueError(f"no leaf: {str(path)[:200]}")
    keys: list[PathKey] = []
    for key in cast("list[Any]", path):
        if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, int) and key < 0):
            raise ValueError(f"no path: {str(path)[:200]}")
        keys.append(key)
    where = tuple(keys)
    kind = cast(Literal["array", "scalar", "string", "none", "dict", "list"], kind)
    if kind == "array":
        key_impl = extra.get("key_impl")
        if key_impl is not None and not isinstance(key_impl, str):
            raise ValueError("no kind of keys")
        numpy = bool(extra.get("numpy"))
        return LeafSpec(
            path=where, kind=kind, array=_array(extra["dtype"], extra["shape"], str(where), key_impl=key_impl, numpy=numpy)
        )
    if kind == "scalar" and extra not in _SCALARS:
        raise ValueError(f"no kind of number: {extra!r}")
    if kind == "string" and not isinstance(extra, str):
        raise ValueError("no text")
    return LeafSpec(path=where, kind=kind, value=extra if kind in ("scalar", "string") else None)


def _array(dtype: Any, shape: Any, name: str, *, key_impl: str | None = None, numpy: bool = False) -> ArraySpec:
    if dtype not in STORABLE:
        raise ConfigError(f"{name!r}: dtype {dtype} has no form in a checkpoint", field="src", path=name)
    sizes = tuple(shape)
    if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
        raise ValueError(f"no shape: {shape!r}")
    check_shape(sizes, np.dtype(dtype).itemsize)
    chunk = tuple(max(1, size) for size in sizes)
    return ArraySpec(shape=sizes, dtype=dtype, chunk=chunk, key_impl=key_impl, typestr="np.ndarray" if numpy else "jax.Array")
