"""From a live state to a step in storage, as one trainer's save goes: described, held, copied into a slot, written, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raystate.arrays.restore import ReadRequest
from raystate.arrays.spare import Spare
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.tree import Layout, SlotTable
from raystate.orbax.merge import build_files
from raystate.orbax.step_reader import StepReader
from raystate.orbax.writer import write_item
from raystate.storage import open_storage
from tests.orbax.published import kv_base

STEP = 5


class Source:
    """A PieceSource over a StepReader."""

    def __init__(self, reader: StepReader, item: str):
        self._reader, self._item = reader, item

    lends = False

    def read(self, requests: Any) -> list[np.ndarray]:
        assert all(isinstance(request, ReadRequest) for request in requests)
        return self._reader.read(self._item, [(r.leaf, r.start, r.shape) for r in requests])


def staged(trees: dict[str, Any], *, times: int = 1) -> tuple[Layout, SlotTable, np.ndarray]:
    """What a slot holds after the state was saved `times` times, from the second on into memory that is used again.

    Returns:
        layout and table as they come out of shared memory, and the data region, uint8.
    """
    spare, plan = Spare(), None
    while True:
        described = describe(trees, process_index=0, previous=plan)
        plan = described.plan
        slot = np.full(described.layout.data_bytes, 0xAB, np.uint8)
        crc32c = copy(hold(described, spare), slot)
        spare.prepare()
        times -= 1
        if times <= 0:
            break
    table = SlotTable(layout_ref="", crc32c=crc32c, values=described.values)
    return Layout.from_bytes(described.layout_bytes), SlotTable.from_bytes(table.to_bytes()), slot


def publish(root: Path, trees: dict[str, Any], *, step: int = STEP, **rest: Any) -> Layout:
    """Publish a step; `rest` is for build_files."""
    layout, table, slot = staged(trees)
    folder = root / str(step)
    for number, spec in enumerate(layout.trees):
        pieces = []
        for piece in layout.pieces:
            array = spec.leaves[piece.leaf].array if piece.tree == number else None
            if array is not None and piece.owned:
                data = slot[piece.offset : piece.offset + piece.nbytes].view(np.dtype(array.dtype)).reshape(piece.shape)
                pieces.append((piece.leaf, piece.start, data))
        write_item(kv_base(folder / spec.item), "a1k1h0", spec, pieces)
    writers = {spec.item: ["a1k1h0"] for spec in layout.trees}
    if not any(leaf.array for spec in layout.trees for leaf in spec.leaves):
        writers = {}
    files = build_files(step, "a1k1", layout.trees, table.values, writers, lambda item: kv_base(folder / item), **rest)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return layout


def reader_of(root: Path, step: int = STEP) -> StepReader:
    return StepReader(open_storage(root), str(step))
