"""What an item of a step is stored as."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from raystate.orbax.step_metadata import STATEFUL_HANDLER

ItemKind = Literal["arrays", "json", "iterator", "files", "other"]

ITERATOR_FILE = re.compile(r"process_(\d+)-of-(\d+)\.json")
JSON_FILES = ("metadata", "data.json")  # Orbax v0's and v1's names


def item_kind(handler: str | None, has: Callable[[str], bool], names: Callable[[str], list[str]]) -> ItemKind:
    """What the item is, by what lies in its folder.

    Args:
        handler: what the step's metadata say wrote it.
        has: whether there is a file of this name.
        names: the files whose names begin so.
    """
    if handler == STATEFUL_HANDLER:  # it may hold anything; `partial.save` calls itself so, and writes arrays
        return "arrays" if has("_METADATA") and has("manifest.ocdbt") else "files"
    if has("_METADATA"):
        return "arrays"
    if any(has(name) for name in JSON_FILES):
        return "json"
    return "iterator" if any(ITERATOR_FILE.fullmatch(name.split("/")[-1]) for name in names("process_")) else "other"
