"""The slots of one trainer, as large as what it saves."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from raystate.arrays.tree import Described
from raystate.core.trainer.machine import Trainer
from raystate.manager.session import Session, Slots
from raystate.manager.staging import SaveArguments, table_bytes_of

LEAST_TABLE_BYTES = 64 << 10  # for items, metrics and custom


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotNeed:
    """What each slot has to hold, and what writing one of them takes beside it."""

    data_bytes: int
    table_bytes: int
    buffer_bytes: int


class Room:
    """Of one trainer.

    Args:
        session, machine: the trainer's.
        lock: under which the machine is used.
    """

    def __init__(self, session: Session, machine: Trainer, lock: threading.RLock):
        self._session = session
        self._machine = machine
        self._lock = lock
        self._buffer_bytes = 0

    def need(self, described: Described, given: SaveArguments, *, known: bool) -> SlotNeed | None:
        """What this step needs and the slots lack; None: it fits.

        Args:
            known: the state is like the one before.
        """
        arena, layout = self._session.arena, described.layout
        if again := self.again():
            return again
        table_bytes = table_bytes_of(described, given)
        if arena is not None and known and table_bytes <= arena.table_capacity_bytes:
            return None
        data_bytes, buffer_bytes = layout.data_bytes, max(self._buffer_bytes, layout.write_buffer_bytes)
        if arena is not None:
            fits = data_bytes <= arena.data_capacity_bytes and table_bytes <= arena.table_capacity_bytes
            if fits and buffer_bytes <= self._buffer_bytes:
                return None
            # Room to grow: the next bit more must not need other slots again.
            table_bytes = max(table_bytes, arena.table_capacity_bytes)
        if arena is None or table_bytes > arena.table_capacity_bytes:
            table_bytes = max(LEAST_TABLE_BYTES, 2 * table_bytes)
        return SlotNeed(data_bytes=data_bytes, table_bytes=table_bytes, buffer_bytes=buffer_bytes)

    def again(self) -> SlotNeed | None:
        """As much as now, where somebody has removed the slots' files; None: they are there, or there are none yet."""
        arena = self._session.arena
        if arena is None or not self._session.must_move():
            return None
        data_bytes, table_bytes = arena.data_capacity_bytes, arena.table_capacity_bytes
        return SlotNeed(data_bytes=data_bytes, table_bytes=table_bytes, buffer_bytes=self._buffer_bytes)

    def take(self, need: SlotNeed) -> None:
        """Get such slots. Nothing is copied into those before meanwhile. Those whose files were
        removed go first.

        Raises:
            CapacityError: they don't fit; the slots before stay.
        """
        number, slots = self._session.config.snapshot_slots, None
        if self._session.must_move():
            self._session.move_out()
        try:
            slots = self._session.allot(
                data_bytes=need.data_bytes, table_bytes=need.table_bytes, buffer_bytes=need.buffer_bytes, slots=number
            )
            self._move_in(need, slots, number)
        except BaseException:
            if slots is not None:  # Ctrl-C: half moved in, no slot would ever be granted
                self._move_in(need, slots, number)
            raise

    def _move_in(self, need: SlotNeed, slots: Slots | None, number: int) -> None:
        with self._lock:
            self._buffer_bytes = need.buffer_bytes
            if slots is not None:
                self._session.use(slots)
                self._machine.new_slots(number)
                self._session.write_word(self._machine.word())
