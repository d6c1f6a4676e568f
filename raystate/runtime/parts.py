"""What HostActors hand to others: their part of a save, and pieces of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raystate.arena.slot_set import SetInfo
from raystate.core.formats.messages import HostId, Staged
from raystate.core.formats.tree import DataObject, SlotTable, TreeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPart:
    """What a HostActor wrote for a save: everything the Coordinator needs to merge, without the array bytes."""

    host: HostId
    writer: str
    trees: tuple[TreeSpec, ...]
    objects: dict[str, list[DataObject]]  # item -> data objects, named relative to the item's folder
    claims: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]  # item -> (leaf, start, shape) written
    tables: dict[int, SlotTable]  # rank -> items, metrics, values
    local: dict[int, dict[str, int]]  # rank -> core.formats.local_values.local_checksums, to be equal on all


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceBoxes:
    """Boxes out of one rank's piece of a snapshot, for a trainer on another node.

    Attributes:
        data: uint8, the boxes' bytes one after the other, each in row-major order; those of damaged arrays are left out.
        crc32c: of each box; None: the array it is of doesn't match its checksum here.
    """

    data: np.ndarray
    crc32c: tuple[int | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceHead:
    """All of one rank's piece but its array bytes, and the set of slots it lies in: what another host needs to begin a copy."""

    content: Staged
    layout: bytes
    table: bytes
    held: SetInfo
