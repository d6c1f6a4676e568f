"""What an item of a step is stored as."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Literal

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.orbax.step_metadata import STATEFUL_HANDLER

ItemKind = Literal["arrays", "json", "iterator", "files", "other"]

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
