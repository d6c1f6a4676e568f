"""A host's share of a save: from its slots to unique names in storage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from raystate.arena import Slot, crc32c
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.local_values import local_checksums
from raystate.core.formats.messages import HostId, Write
from raystate.core.formats.tree import DataObject, Layout, Piece, SlotTable, TreeSpec
from raystate.machine import fault_points
from raystate.runtime.host.share import write_share
from raystate.runtime.parts import HostPart
from raystate.storage import StepFolder, Storage


class _Kept(NamedTuple):
    """A piece in a slot, and its checksum when it was staged."""

    data: np.ndarray
    expected: int
    name: str
    rank: int


def write_slots(
    storage: Storage,
    host: HostId,
    order: Write,
    slots: Mapping[int, Slot],
    get_layout: Callable[[str], bytes],
    on_begin: Callable[[str, int], None] = lambda *_: None,
) -> HostPart:
    """Write the owned pieces of these ranks' slots under the save's unique names. The slots must not change meanwhile.

    Args:
        slots: by rank.
        get_layout: a layout's bytes by its name (`SlotTable.layout_ref`).
        on_begin: called with the save and the bytes of arrays that will be written.

    Raises:
        CorruptCheckpointError: a piece in memory is not what was staged. StorageError.
    """
    writer = f"{order.save}h{host[:12]}"
    folder = StepFolder(storage, order.step, order.save)
    trees: tuple[TreeSpec, ...] = ()
    tables: dict[int, SlotTable] = {}
    local: dict[int, dict[str, int]] = {}
    pieces: dict[int, list[tuple[int, tuple[int, ...], np.ndarray]]] = {}
    kept: list[_Kept] = []
    for rank, slot in sorted(slots.items()):
        content = slot.read()
        if content is None:
            raise CorruptCheckpointError(
                f"step {order.step}: the slot of rank {rank} in the memory of host {host[:8]} is damaged",
                step=order.step,
                rank=rank,
            )
        table = tables[rank] = SlotTable.from_bytes(content.table)
        layout = Layout.from_bytes(get_layout(table.layout_ref))
        trees = trees or layout.trees
        local[rank] = local_checksums(layout, table)
        for piece, expected in zip(layout.pieces, table.crc32c, strict=True):
            if not piece.owned:
                continue
            data = content.data[piece.offset : piece.offset + piece.nbytes]
            kept.append(_Kept(data, expected, layout.trees[piece.tree].leaves[piece.leaf].name, rank))
            if data.nbytes != piece.nbytes:
                raise _damaged(order, host, kept[-1])
            pieces.setdefault(piece.tree, []).append((piece.leaf, piece.start, as_array(data, layout, piece)))
    on_begin(order.save, sum(one.data.nbytes for one in kept))
    objects: dict[str, list[DataObject]] = {}
    claims: dict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = {}
    for index, tree in enumerate(trees):
        mine = pieces.get(index, [])
        claims[tree.item] = [(leaf, start, array.shape) for leaf, start, array in mine]
        if mine:
            objects[tree.item] = write_share(storage, folder.write_prefix, writer, tree, mine)
    # Afterwards: what was damaged before it was written still is, and storage has a valid checksum of it.
    for one in kept:
        if crc32c(one.data) != one.expected:
            raise _damaged(order, host, one)
    fault_points.reached("writing")
    return HostPart(host=host, writer=writer, trees=trees, objects=objects, claims=claims, tables=tables, local=local)


def _damaged(order: Write, host: HostId, kept: _Kept) -> CorruptCheckpointError:
    text = f"step {order.step}: {kept.name!r} of rank {kept.rank} was damaged in the memory of host {host[:8]}"
    return CorruptCheckpointError(text, step=order.step, rank=kept.rank, path=kept.name, host=host)


def as_array(data: np.ndarray, layout: Layout, piece: Piece) -> np.ndarray:
    """The piece's bytes as an array of its dtype and shape, without a copy."""
    import ml_dtypes  # noqa: F401 - registers bfloat16 and friends with numpy

    spec = layout.trees[piece.tree].leaves[piece.leaf].array
    assert spec is not None
    return data.view(np.dtype(spec.dtype)).reshape(piece.shape)
