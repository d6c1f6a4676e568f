"""What an item of a step is stored as, and which of them is the state where the caller names none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from raystate.core.formats.errors import CorruptCheckpointError, ReferenceMismatchError
from raystate.orbax.step_metadata import STATEFUL_HANDLER

ItemKind = Literal["arrays", "json", "iterator", "files", "other"]

METRICS = "metrics"  # Orbax v0's item of them; a tree of arrays may be called so, too
STATE_ITEMS = ("state", "default")  # raystate's and Orbax v1's name, Orbax v0's
ITERATOR_FILE = re.compile(r"process_(\d+)-of-(\d+)\.json")
_SHOWN = 20
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


def iterator_files(names: Iterable[str]) -> dict[str, re.Match[str]]:
    """Of an item's files those that hold an iterator's state: the name's groups are the process and how many there are."""
    return {name: match for name in names if (match := ITERATOR_FILE.fullmatch(name.split("/")[-1]))}


def iterator_states(
    names: Iterable[str], read: Callable[[str], bytes | None], *, step: int | str, item: str
) -> tuple[dict[int, bytes], int]:
    """(process -> state, process count) of an item with these files. Raises CorruptCheckpointError: not every process is there."""
    found = iterator_files(names)
    counts = {int(match[2]) for match in found.values()}
    if len(counts) != 1:
        message = f"item {item!r} of step {step} has iterator states of {sorted(counts) or 'no'} processes"
        raise CorruptCheckpointError(message, step=step, item=item)
    states = {int(match[1]): read(name) for name, match in found.items()}
    world = counts.pop()
    missing = (process for process in range(world) if states.get(process) is None)
    if lacking := list(itertools.islice(missing, _SHOWN)):  # the names of files may announce any number
        message = f"item {item!r} of step {step} lacks the iterator states of processes {lacking} of {world}"
        raise CorruptCheckpointError(message, step=step, item=item)
    return {process: data for process, data in sorted(states.items()) if data is not None}, world


def choose_state(
    step: int | str, kinds: Mapping[str, ItemKind], *, has_lost_its_tree: Callable[[str], bool], has_arrays: Callable[[str], bool]
) -> str:
    """The item "state" or "default", else the only one with arrays, else the only tree; "metrics" only if there is no other.

    Args:
        step: for errors.
        kinds: item -> what it is stored as (`ItemKind`).
        has_lost_its_tree: of an item of kind "other": whether it was a tree of arrays once.
        has_arrays: of a tree: whether there is an array among its leaves.

    Raises:
        ReferenceMismatchError: the step was written with other items, and there are several with arrays, or none; says which.
            Nothing is wrong with it.
        CorruptCheckpointError: an item has lost the file that describes its tree: it may be the one that is meant.
    """
    for name in STATE_ITEMS:
        if kinds.get(name) == "arrays":
            return name
    lost = [item for item, kind in kinds.items() if kind == "other" and (item in STATE_ITEMS or has_lost_its_tree(item))]
    if lost:
        message = f"step {step} has lost the metadata of its item {lost[0]!r}, of {list(kinds)}"
        raise CorruptCheckpointError(message, step=step, item=lost[0])
    trees = [item for item, kind in kinds.items() if kind == "arrays"]
    arrays = [item for item in trees if has_arrays(item)] or trees
    arrays = [item for item in arrays if item != METRICS] or arrays
    if len(arrays) == 1:
        return arrays[0]
    message = f"step {step} has no item 'state' or 'default'"
    if arrays:
        named = ", ".join(repr(item) for item in arrays)
        message += f": its arrays are in {named}. raystate.load(…, item={arrays[0]!r}) reads one item, and a "
        message += "new run begins with it by restore_or_init(…, "
        message += f"source='SRC/{step}/{arrays[0]}'), with several by source={{'{arrays[0]}': 'SRC/{step}/{arrays[0]}', …}}"
    else:
        there = ", ".join(f"{item!r} ({kind})" for item, kind in kinds.items() if "/" not in item)
        message += f" and no other item of arrays; there is {there or 'no item at all'}"
    raise ReferenceMismatchError(message, step=step, expected=STATE_ITEMS, got=arrays)
