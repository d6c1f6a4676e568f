"""Pieces of snapshots for others: for a trainer on another node that restores, and for another host that keeps copies."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from raystate.arena import HostArena, SlotContent, SlotSet
from raystate.core.formats.boxes import Box, Index, slices
from raystate.core.formats.errors import StepNotFoundError
from raystate.core.formats.host_messages import HoldAsked, HoldEnded, HostEvent, SlotAddress
from raystate.core.formats.messages import HostId, SnapshotId
from raystate.core.formats.tree import Layout, SlotTable
from raystate.machine.checksum import crc32c
from raystate.runtime.host.slot_store import SlotStore
from raystate.runtime.parts import PieceBoxes, PieceHead

REMEMBERED = 16  # pieces of snapshots: their layouts, and which of their arrays are intact


class _Parts:
    """The arrays in one rank's piece of a snapshot."""

    def __init__(self, layout: Layout, checksums: tuple[int, ...]):
        self._pieces = layout.pieces
        self._checksums = checksums
        self._intact: dict[int, bool] = {}

    def box(self, data: np.ndarray, index: int, box: Box) -> np.ndarray | None:
        """uint8, of one dimension; None: the array is damaged."""
        piece = self._pieces[index]
        whole = data[piece.offset : piece.offset + piece.nbytes]
        if index not in self._intact:  # a reader of a part of it can't tell
            self._intact[index] = whole.nbytes == piece.nbytes and crc32c(whole) == self._checksums[index]
        if not self._intact[index]:
            return None
        itemsize = piece.nbytes // math.prod(piece.shape)
        return whole.reshape(*piece.shape, itemsize)[slices(box, (0,) * len(box.start))].reshape(-1)


class Serving:
    """Reads slots of one host, each held for as long as it is read: for one call.

    Args:
        host: this one.
        arena, store: its slots.
        lock: that of the machine.
        feed: hands the machine an event, under the lock.

    Attributes:
        addresses: the machine's answer to the question at hand.
    """

    def __init__(self, host: HostId, arena: HostArena, store: SlotStore, lock: threading.RLock, feed: Callable[[HostEvent], None]):
        self._host = host
        self._arena = arena
        self._store = store
        self._lock = lock
        self._feed = feed
        self.addresses: tuple[SlotAddress, ...] = ()
        self._parts: dict[tuple[SnapshotId, int], _Parts] = {}  # of what was asked for last

    @contextlib.contextmanager
    def _holding(self, *, lineage: str, step: int, rank: int) -> Iterator[tuple[SlotSet, SlotContent]]:
        """The slot with one rank's piece of a snapshot. StepNotFoundError if it isn't here."""
        reader = secrets.token_hex(8)
        with self._lock:
            self._feed(HoldAsked(reader=reader, snapshot=SnapshotId(lineage, step), ranks=(rank,)))
            found = [(self._store.slot(address), self._store.set_of(address)) for address in self.addresses]
        try:
            content = found[0][0].read() if found else None
            if content is None:
                raise StepNotFoundError(
                    f"host {self._host[:8]} does not hold rank {rank} of step {step}", step=step, host=self._host, rank=rank
                )
            yield found[0][1], content
        finally:
            with self._lock:
                self._feed(HoldEnded(reader=reader))

    def piece_head(self, **piece: Any) -> PieceHead:
        """All of a piece but its array bytes, for another host that copies it."""
        with self._holding(**piece) as (held, content):
            return PieceHead(content=content.header, layout=self._layout(content), table=content.table, held=held.info)

    def piece_chunk(self, *, start: int, size: int, **piece: Any) -> np.ndarray:
        """Some of a piece's array bytes: uint8."""
        with self._holding(**piece) as (_, content):
            return np.array(content.data[start : start + size])

    def piece_boxes(self, *, boxes: Sequence[tuple[int, Index, Index]], **piece: Any) -> PieceBoxes:
        """Boxes out of a piece, for a trainer. The arrays they are of are checked before the first box of them is given.

        Args:
            boxes: each (index into the layout's pieces, start, shape), in elements, relative to the piece of the layout.
        """
        with self._holding(**piece) as (_, content):
            parts = self._parts_of(content)
            found = [parts.box(content.data, index, Box(start, shape)) for index, start, shape in boxes]
            there = [one for one in found if one is not None]
            data = np.concatenate(there) if there else np.empty(0, np.uint8)
        ends = itertools.accumulate(0 if one is None else one.size for one in found)
        # Of the copy: on the way nothing else tells that it is the same.
        checksums = tuple(
            crc32c(data[end - one.size : end]) if one is not None else None for one, end in zip(found, ends, strict=True)
        )
        return PieceBoxes(data=data, crc32c=checksums)

    def _parts_of(self, content: SlotContent) -> _Parts:
        key = (content.header.id, content.header.rank)
        parts = self._parts.get(key)
        if parts is None:
            while len(self._parts) >= REMEMBERED:
                self._parts.pop(next(iter(self._parts)), None)
            table = SlotTable.from_bytes(content.table)
            layout = Layout.from_bytes(self._arena.get_layout(table.layout_ref))
            parts = self._parts[key] = _Parts(layout, table.crc32c)
        return parts

    def _layout(self, content: SlotContent) -> bytes:
        return self._arena.get_layout(SlotTable.from_bytes(content.table).layout_ref)
