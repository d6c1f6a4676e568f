"""Slot sets for copies of other hosts' snapshots: one for each rank whose pieces are copied here."""

from __future__ import annotations

from collections.abc import Sequence

from raystate.arena.capacity import Need
from raystate.arena.slot import slot_file_bytes
from raystate.arena.slot_set import SlotSet


def find_copies(sets: Sequence[SlotSet], rank: int, *, data_bytes: int, table_bytes: int) -> SlotSet | None:
    """The newest set for copies of that rank's pieces that has room for such ones."""
    fits = [
        held
        for held in sets
        if held.info.copies_of == rank and held.info.data_bytes >= data_bytes and held.info.table_bytes >= table_bytes
    ]
    return max(fits, key=lambda held: held.index, default=None)


def copies_bytes(sets: Sequence[SlotSet], need: Need, copies: int) -> int:
    """What copies of other hosts' snapshots may still take, if these are as large as those of the trainers here.

    Args:
        sets: all of this host.
        need: of one more trainer.
        copies: how many other hosts' snapshots this host has copies of, for each of its own.
    """
    own = sum(_slots_bytes(held) for held in sets if held.info.copies_of < 0)
    there = sum(_slots_bytes(held) for held in sets if held.info.copies_of >= 0)
    return max(0, copies * (own + need.slot_bytes * need.slots) - there)


def _slots_bytes(held: SlotSet) -> int:
    return slot_file_bytes(held.info.table_bytes, held.info.data_bytes) * held.info.slots
