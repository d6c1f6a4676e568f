"""Layouts are big and nearly always the same, so slots name them by their hash and the arena keeps each once.

A layout is kept while a slot names it in its table, and while a trainer is attached that has put
it. The trainer marks the layout in its own set before it puts it, because its slot names it only
later. A shared lock around both keeps `prune_layouts` from looking in between.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from raystate.arena.files import LAYOUTS, create_file, read_bytes, remove_entry, replace_file
from raystate.arena.locks import FileLock
from raystate.arena.slot import Slot
from raystate.arena.slot_set import SlotSet, release_all, seize
from raystate.core.formats.errors import CapacityError, CorruptCheckpointError, RaystateError
from raystate.core.formats.tree import SlotTable
from raystate.waits import FILE_S

MARK_PREFIX = "layout."  # in a set: its trainer has put that layout


def layout_name(data: bytes) -> str:
    """The name of a layout: a hash of its bytes."""
    return hashlib.sha256(data).hexdigest()[:32]


def put_layout(arena: Path, data: bytes, *, slot_set: Path | None = None) -> str:
    """Keep `data` in the arena at that path; returns its name, which is the same for the same bytes.

    Args:
        slot_set: the set of the trainer that puts it; kept while that trainer is attached.

    Raises:
        RaystateError: the arena is gone, or its layouts were locked for `FILE_S` seconds.
    """
    ref = layout_name(data)
    folder = arena / LAYOUTS
    try:
        lock = FileLock.take(folder, shared=True, directory=True, timeout_s=FILE_S)
        if lock is None:
            raise RaystateError(f"{folder} was locked by another process for {FILE_S:g} s", path=str(folder), waited_s=FILE_S)
        with lock:
            if slot_set is not None:
                _mark(slot_set, ref)
            if not (folder / ref).exists():
                replace_file(folder / ref, data)
    except FileNotFoundError:
        raise RaystateError(f"the arena {arena} is gone: its run has ended", path=str(arena)) from None
    except OSError as error:
        raise CapacityError(f"a layout of {len(data)} bytes could not be kept in {folder}: {error}", path=str(folder)) from error
    return ref


def has_layout(arena: Path, ref: str) -> bool:
    """Whether it lies in the arena."""
    return (arena / LAYOUTS / ref).is_file()


def get_layout(arena: Path, ref: str) -> bytes:
    """The bytes behind a name.

    Raises:
        CorruptCheckpointError: the arena does not have them, or they are not what was put.
    """
    path = arena / LAYOUTS / ref
    data = read_bytes(path)
    if data is None:
        raise CorruptCheckpointError(f"layout {ref} is not in the arena {arena}", path=str(path))
    if layout_name(data) != ref:
        raise CorruptCheckpointError(f"layout {ref} in the arena {arena} is damaged", path=str(path))
    return data


def marked(slot_set: Path) -> set[str]:
    """The layouts that the set's trainer has put."""
    return {path.name.removeprefix(MARK_PREFIX) for path in slot_set.glob(f"{MARK_PREFIX}*")}


def unmark(slot_set: Path, ref: str) -> None:
    """The set's trainer needs this layout only while a slot names it."""
    remove_entry(slot_set / f"{MARK_PREFIX}{ref}")


def unmark_all(slot_set: Path) -> None:
    """The set's trainer is gone: only what its slots name is needed from now on. For who holds all locks of the set."""
    for ref in marked(slot_set):
        unmark(slot_set, ref)


def prune_layouts(arena: Path, sets: Iterable[SlotSet], keep: Collection[str] = ()) -> list[str]:
    """Remove every layout that no slot names and that no attached trainer has put, and what an interrupted `put_layout` left.

    Does nothing while somebody is putting one: there will be another time.

    Args:
        sets: all sets of the arena. No other thread may hand one on or remove one meanwhile.
        keep: never these.

    Returns:
        The removed layouts.
    """
    lock = FileLock.take(arena / LAYOUTS, shared=False, directory=True)
    if lock is None:
        return []
    with lock:
        needed = set(keep)
        for held in sets:
            locks = seize(held.path)
            try:
                # With all its locks in hand no trainer is attached, and what the last one did is finished: its slots say it all.
                if locks is None:
                    needed |= marked(held.path)
                else:
                    unmark_all(held.path)
                needed |= {ref for slot in held.slots if (ref := named_by(slot)) is not None}
            finally:
                release_all(locks or [])
        removed = [name for name in sorted(os.listdir(arena / LAYOUTS)) if name not in needed]
        for name in removed:
            remove_entry(arena / LAYOUTS / name)
    return [name for name in removed if not name.startswith(".")]


def named_by(slot: Slot) -> str | None:
    """The layout that a slot's table names; None: it holds nothing whole."""
    content = slot.read()
    try:
        return SlotTable.from_bytes(content.table).layout_ref if content else None
    except (ValueError, TypeError, KeyError, AttributeError):  # such a table leads to no layout
        return None


def _mark(slot_set: Path, ref: str) -> None:
    try:
        os.close(create_file(slot_set / f"{MARK_PREFIX}{ref}"))
    except FileExistsError:
        pass
