"""A pytree as a flat list with Orbax's names, without importing orbax (that costs seconds at the start of every trainer).

tests/arrays/test_paths.py proves the equality with `orbax.checkpoint.tree` for the containers that people train with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.tree import PathKey

Path = tuple[PathKey, ...]

_LEAVES = frozenset({np.ndarray, bool, int, float, str})


class TreeNode(NamedTuple):
    """A leaf of the serialized tree: a pytree leaf, or a container without children (`empty`)."""

    path: Path
    value: Any
    empty: bool


def flatten(tree: Any) -> list[TreeNode]:
    """Leaves and empty containers in the order of `jax.tree_util.tree_flatten`. None counts as an empty container, as in jax."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)
    return [TreeNode(tuple(map(path_key, keys)), value, is_empty(value)) for keys, value in flat]


def cannot_flatten(error: BaseException) -> str:
    """What is wrong with a tree at which jax raised this."""
    reason = error.__cause__ or error
    return f"jax can't flatten it: {reason}. The keys of a dict must be of one sortable type, and no container may hold itself"


def is_empty(value: Any) -> bool:
    """True for None and for a container without children."""
    if type(value) in _LEAVES or isinstance(value, jax.Array):
        return False  # what nearly all are: asking jax takes 10 µs
    structure = jax.tree_util.tree_structure(value)
    return structure.num_leaves == 0 and structure.num_nodes == 1


def empty_kind(value: Any) -> str:
    """How Orbax stores an empty container: as itself if it is a dict or a sequence, otherwise as None."""
    if isinstance(value, Mapping):
        return "dict"
    if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        return "list"
    return "none"


def path_key(key: Any) -> PathKey:
    """Orbax's name of one level: an index stays a number, everything else becomes a string."""
    match key:
        case SequenceKey(idx=index):
            return index
        case DictKey(key=name):
            made = type(name)
            if made.__str__ is object.__str__ and made.__repr__ is object.__repr__:
                text = f"a dict key of type {made.__qualname__} has no name in a checkpoint: its text differs in each process"
                raise ConfigError(f"{text}. Use a str or an int, or give the class a __str__", got=made.__qualname__)
            return str(name)
        case GetAttrKey(name=name):
            return name
        case FlattenedIndexKey(key=index):
            return index
        case _:
            raise ConfigError(f"a pytree key of type {type(key).__name__} has no name in a checkpoint: {key!r}", got=repr(key))


def shown(path: Path) -> str:
    """A path for people: `opt_state/0/mu/kernel`."""
    return "/".join(map(str, path)) or "(the tree itself)"


def names(path: Path) -> tuple[str, ...]:
    """What paths are matched by: a list index and a dict key "0" are the same place (flax stores optimizer tuples as dicts)."""
    return tuple(map(str, path))
