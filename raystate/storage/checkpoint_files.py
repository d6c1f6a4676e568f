"""Which files of a folder belong to the one checkpoint that it is: replacing it must take nothing
else away."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, cast

from raystate.storage.names import MANIFEST, METADATA, STATE, TREE_METADATA

_ITEM = "state"  # that every checkpoint of ours has
# Orbax's files of one tree, and of a step beside them; ours are the same.
_SAYS = r"_METADATA|_sharding|_strings\.json|commit_success\.txt|checkpoint|array_metadatas/process_\d+"
_TREE = re.compile(rf"{_SAYS}|(ocdbt\.process_[^/]+/)?(manifest\.ocdbt|d/[^/]+)")
_STEP = re.compile(r"_CHECKPOINT_METADATA|commit_success\.txt|orbax\.checkpoint|descriptor/descriptor\.pbtxt")
_CHUNK = re.compile(r"\.zarray|zarr\.json|\d+(\.\d+)*|c(/\d+)*")  # of an array without OCDBT
_SMALL = re.compile(r"metadata|metrics|commit_success\.txt|process_\d+-of-\d+\.json")  # of an item of JSON or of iterators
_FIXED = re.compile(rf"({_STEP.pattern})|([^/]+/)?({_SAYS}|manifest\.ocdbt|{_SMALL.pattern})")

# Data of a save that may not have come to the files with fixed names: of an item, or of a tree without one, as flax_checkpoints writes it.
_DATA = re.compile(r"(?:([^/]+)/)?(?:ocdbt\.process_|d/)(s[0-9a-f]{16})h")


def is_unfinished(names: Iterable[str]) -> bool:
    """Whether a folder on an object store is one save of ours that died: with nothing else, or in the place of an older checkpoint.

    A folder of many checkpoints, some of them unfinished, is none. What lies beside the item that every save of ours has, or beside a
    tree without items, must be of the same saves.

    Args:
        names: see `not_of_one`.
    """
    names = list(names)
    saves: dict[str, set[str]] = {}  # of each item; "": of a tree without one
    for name in names:
        if found := _DATA.match(name):
            saves.setdefault(found[1] or "", set()).add(found[2])
    if not saves:
        return False
    every = set[str]().union(*saves.values())
    if len(every) == 1 and all(_DATA.match(name) for name in names):  # it had written nothing else yet
        return True
    own = saves.get("", set()) | saves.get(_ITEM, set())
    trees = {name.rpartition("/")[0] for name in names if name.rpartition("/")[2] in (TREE_METADATA, MANIFEST)}
    others = {tree for tree in trees if tree and "/" not in tree and tree != _ITEM} - set(saves)
    return bool(own) and not others and every <= own


def says_what_is_there(name: str) -> bool:
    """Whether the file describes a checkpoint. Such files are small, and each save gives them the same names.

    Args:
        name: relative to the checkpoint's folder; the whole name of a checkpoint that is a single object.
    """
    return "/" not in name or _FIXED.fullmatch(name) is not None


def items_of(metadata: bytes) -> frozenset[str] | None:
    """The items that a checkpoint's `_CHECKPOINT_METADATA` names; None if it doesn't say, as early Orbax's."""
    try:
        found: Any = json.loads(metadata)
        handlers = found["item_handlers"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if isinstance(handlers, str):  # a bare tree
        return frozenset()
    return frozenset(cast("dict[str, Any]", handlers)) if isinstance(handlers, dict) else None


def not_of_one(names: Iterable[str], items: frozenset[str] | None) -> list[str]:
    """Those of a folder's files that no checkpoint of ours or of Orbax's has there, in the order given.

    Args:
        names: of all files below the folder, relative to it.
        items: see `items_of`.
    """
    names = list(names)
    there = set(names)
    by_item: dict[str, set[str]] = {}
    for name in names:
        item, slash, rest = name.partition("/")
        if slash:
            by_item.setdefault(item, set()).add(rest)

    def belongs(name: str) -> bool:
        if _STEP.fullmatch(name) or _of_a_tree(name, there):
            return True
        item, slash, rest = name.partition("/")
        if not slash or {STATE, METADATA} & set(rest.split("/")):  # another checkpoint, or a run
            return False
        if _DATA.match(name) and by_item[item].isdisjoint(
            (TREE_METADATA, MANIFEST)
        ):  # a replaced save's, which has died at its end
            return True
        if items is None:
            return _SMALL.fullmatch(rest) is not None or _of_a_tree(rest, by_item[item])
        # Only its handler knows which files an item has that is no tree.
        return item in items and (TREE_METADATA not in by_item[item] or _of_a_tree(rest, by_item[item]))

    return [name for name in names if not belongs(name)]


def _of_a_tree(name: str, there: set[str]) -> bool:
    """Whether a file belongs to a tree. `there`: all files of the folder that may be one's."""
    if _TREE.fullmatch(name):
        return True
    array, slash, rest = name.partition("/")
    if not slash or MANIFEST in there or TREE_METADATA not in there:
        return False
    return bool(there & {f"{array}/.zarray", f"{array}/zarr.json"}) and _CHUNK.fullmatch(rest) is not None
