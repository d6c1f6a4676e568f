"""Pieces of snapshots for others: for a trainer on another node that restores, and for another host that keeps copies."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raystate.arena import HostArena, Slot, SlotContent, SlotSet
from raystate.core.errors import StepNotFoundError
from raystate.core.host_messages import HoldAsked, HoldEnded, HostEvent, Place
from raystate.core.messages import HostId, SnapshotId
from raystate.core.tree import SlotTable
from raystate.runtime.parts import PieceHead, RankData
from raystate.runtime.slot_store import SlotStore, staged_in


class Serving:
    """Reads slots of one host, each held for as long as it is read: for one call.

    Args:
        host: this one.
        arena, store: its slots.
        lock: that of the machine.
        feed: hands the machine an event, under the lock.

    Attributes:
        places: the machine's answer to the question at hand.
    """

    def __init__(self, host: HostId, arena: HostArena, store: SlotStore, lock: threading.RLock, feed: Callable[[HostEvent], None]):
        self._host = host
        self._arena = arena
        self._store = store
        self._lock = lock
        self._feed = feed
        self.places: tuple[Place, ...] = ()

    @contextlib.contextmanager
    def _holding(self, *, lineage: str, step: int, again: int, rank: int) -> Iterator[tuple[Slot, SlotSet, SlotContent]]:
        """The slot with one rank's piece of a snapshot. StepNotFoundError if it isn't here."""
        reader = secrets.token_hex(8)
        with self._lock:
            self._feed(HoldAsked(reader=reader, snapshot=SnapshotId(lineage, step, again), ranks=(rank,)))
            found = [(self._store.slot(place), self._store.set_of(place)) for place in self.places]
        try:
            content = found[0][0].read() if found else None
            if content is None:
                raise StepNotFoundError(
                    f"host {self._host[:8]} does not hold rank {rank} of step {step}", step=step, host=self._host, rank=rank
                )
            yield *found[0], content
        finally:
            with self._lock:
                self._feed(HoldEnded(reader=reader))

    def fetch(self, *, with_data: bool, **piece: Any) -> RankData:
        """One rank's piece of a snapshot, for a trainer."""
        with self._holding(**piece) as (_, _, content):
            data = np.array(content.data) if with_data else None
            return RankData(layout=self._layout(content), table=content.table, data=data)

    def piece_head(self, **piece: Any) -> PieceHead:
        """All of a piece but its array bytes, for another host that copies it."""
        with self._holding(**piece) as (slot, held, content):
            staged = staged_in(slot)
            assert staged is not None, "it is held"
            return PieceHead(
                content=staged,
                layout=self._layout(content),
                table=content.table,
                data_bytes=content.header.data_bytes,
                slot_data_bytes=held.info.data_bytes,
                slot_table_bytes=held.info.table_bytes,
                buffer_bytes=held.info.buffer_bytes,
                slots=held.info.slots,
            )

    def piece_chunk(self, *, start: int, size: int, **piece: Any) -> np.ndarray:
        """Some of a piece's array bytes: uint8."""
        with self._holding(**piece) as (_, _, content):
            return np.array(content.data[start : start + size])

    def _layout(self, content: SlotContent) -> bytes:
        return self._arena.get_layout(SlotTable.from_bytes(content.table).layout_ref)
