"""Names that a step can be written under. A name that stock Orbax can't read back is refused when
it is saved, not when it is needed.

tests/orbax/test_names.py asks stock Orbax, v0 and v1, about each rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax

from raystate.arrays.checks import MOST_LEVELS, lone_surrogate
from raystate.arrays.paths import Path, cannot_flatten, shown
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.texts import printable
from raystate.core.formats.tree import LeafSpec

MOST_NAME_BYTES = 60_000  # OCDBT's keys have at most 65,535, and the chunk's indices follow the name
MOST_ITEM_CHARACTERS = 200  # a folder's name has at most 255, and Orbax adds to it while it writes
_LONE_TILDE = re.compile("~(?![01])")


def argument_of(item: str) -> str:
    """Which argument of `save` an array item came in."""
    return "state" if item == "state" else "items"


def mistake(item: str, path: Path, why: str, **facts: Any) -> ConfigError:
    """A caller's mistake in one leaf; an empty path means the whole tree."""
    where = printable(shown(path))
    text = printable(f"item {item!r}{f', {where}' if path else ''}: {why}")
    return ConfigError(text, field=argument_of(item), item=item, path=where, **facts)


def flatten_trees(trees: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a save's trees, and their structure.

    Args:
        trees: item -> tree.

    Raises:
        ConfigError: jax can't flatten one: names the dict whose keys can't be sorted.
    """
    try:
        return jax.tree_util.tree_flatten(dict(trees))
    except (ValueError, TypeError, SystemError) as error:  # keys that can't be sorted; containers without end
        for item, tree in trees.items():
            try:
                jax.tree_util.tree_flatten(tree)
            except (ValueError, TypeError, SystemError):
                raise mistake(item, _unsortable(tree, ()) or (), cannot_flatten(error)) from error
        raise


def _unsortable(tree: Any, path: Path) -> Path | None:
    """Where the first dict is whose keys can't be sorted, as far as plain containers lead to it."""
    children: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        have = cast("dict[Any, Any]", tree)
        try:
            children = [(str(key), have[key]) for key in sorted(have)]
        except TypeError:
            return path
    elif isinstance(tree, list | tuple):
        children = list(enumerate(cast("Sequence[Any]", tree)))
    found = (_unsortable(child, (*path, key)) for key, child in children if len(path) < MOST_LEVELS)
    return next((one for one in found if one is not None), None)


def check_names(item: str, leaves: Sequence[LeafSpec]) -> None:
    """Refuse names that can't be written, or that stock Orbax could not read back.

    Args:
        item: the tree's.
        leaves: all of the tree's, in order.

    Raises:
        ConfigError: names the path.
    """
    _check_containers(item, leaves)
    seen: dict[str, LeafSpec] = {}
    for leaf in leaves:
        _check_keys(item, leaf)
        name = leaf.name  # put together anew each time
        other = seen.setdefault(name, leaf)
        if other is not leaf:
            raise mistake(item, leaf.path, f"it and {shown(other.path)} would have the same name {name!r} in storage: rename one")
        if leaf.kind in ("array", "scalar"):
            _check_array_name(item, leaf, name)
    _check_string_names(item, [leaf for leaf in leaves if leaf.kind == "string"])


def _check_keys(item: str, leaf: LeafSpec) -> None:
    if len(leaf.path) > MOST_LEVELS:
        raise mistake(item, leaf.path[:3], f"a leaf is nested {len(leaf.path)} levels deep, at most {MOST_LEVELS} can be kept")
    for depth, key in enumerate(leaf.path):
        if key == "":
            raise mistake(item, leaf.path[:depth], "it has an empty key below it, which has no name in storage: rename it")
        if isinstance(key, str) and (lone := lone_surrogate(key)):
            text = f"the key {key!r} below it has the lone surrogate {lone}, which no file can hold: it is no character. Rename it"
            raise mistake(item, leaf.path[:depth], text)


def _check_array_name(item: str, leaf: LeafSpec, name: str) -> None:
    """TensorStore takes a name that ends in "/" for the one without it."""
    if name.endswith("/"):
        raise mistake(item, leaf.path, "the name of an array or number can't end with '/': Orbax would not find it. Rename the key")
    length = len(name.encode())
    if length > MOST_NAME_BYTES:
        text = f"a name of {length} bytes (its keys joined by dots) can't be kept, at most {MOST_NAME_BYTES}: shorten the keys"
        raise mistake(item, leaf.path[:0], f"{name[:60]}…: {text}")


def _check_string_names(item: str, leaves: Sequence[LeafSpec]) -> None:
    """Orbax keeps strings in one JSON file, and takes their names for JSON pointers into it."""
    pointers: dict[tuple[str, ...], LeafSpec] = {}
    for leaf in leaves:
        if _LONE_TILDE.search(leaf.name):
            text = (
                "the name of a string can't have a '~' (Orbax takes it for a JSON pointer): rename the key, or give it as an item"
            )
            raise mistake(item, leaf.path, text)
        pointers[tuple(leaf.name.split("/"))] = leaf
    for pointer, leaf in pointers.items():
        for length in range(1, len(pointer)):
            if other := pointers.get(pointer[:length]):
                text = f"it and the string {shown(other.path)} can't both be kept: Orbax takes '/' in their names for levels. Rename one"
                raise mistake(item, leaf.path, text)


def _check_containers(item: str, leaves: Sequence[LeafSpec]) -> None:
    """Orbax rebuilds a container from the kind of its keys; one with both indices and names (an nnx.List module) it can't read."""
    kinds: dict[Path, type] = {}
    for leaf in leaves:
        for depth, key in enumerate(leaf.path):
            kind = kinds.setdefault(leaf.path[:depth], type(key))
            if kind is not type(key):
                text = "it has both indices and names below it; of an nnx module, save nnx.state(module)"
                raise mistake(item, leaf.path[:depth], text)
