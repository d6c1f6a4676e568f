"""The slots of one trainer, as large as what it saves."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from raystate.arena import TrainerArena
from raystate.arrays.tree import Described
from raystate.arrays.ways import Ways
from raystate.core.formats.errors import CapacityError
from raystate.core.trainer.machine import Trainer
from raystate.manager.session import Session, Slots
from raystate.manager.staging import LATER_BYTES, SaveArguments, said_bytes, table_bytes_of

LEAST_TABLE_BYTES = 64 << 10  # for items, metrics and custom
LEAST_ROOM_BYTES = 1 << 20  # to grow


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
        ways: how bytes will come into the slots.
    """

    def __init__(self, session: Session, machine: Trainer, lock: threading.RLock, ways: Ways):
        self._session = session
        self._machine = machine
        self._lock = lock
        self._ways = ways
        self._buffer_bytes = 0
        self._later_bytes = 0  # there is room for so much beside the newest capture

    def need(self, described: Described, given: SaveArguments, *, known: bool) -> SlotNeed | None:
        """What this step needs and the slots lack; None: it fits.

        Args:
            known: the state is like the one before.
        """
        arena, layout = self._session.words.arena, described.layout
        self._later_bytes = LATER_BYTES + said_bytes(given)
        if again := self.again():
            return again
        table_bytes = table_bytes_of(described, given)
        if arena is None:
            table_bytes = max(LEAST_TABLE_BYTES, 2 * table_bytes)
            return SlotNeed(data_bytes=layout.data_bytes, table_bytes=table_bytes, buffer_bytes=layout.write_buffer_bytes)
        if known and table_bytes <= arena.table_capacity_bytes:
            return None
        has = self._has(arena)
        need = SlotNeed(
            data_bytes=max(layout.data_bytes, has.data_bytes),
            table_bytes=max(table_bytes, has.table_bytes),
            buffer_bytes=max(layout.write_buffer_bytes, has.buffer_bytes),
        )
        return None if need == has else need

    def check_later(self, given: SaveArguments) -> None:
        """Raises CapacityError: the metrics and custom values of a later promise have no room beside those of the capture."""
        if (needed := said_bytes(given)) > self._later_bytes:
            raise CapacityError(
                f"save of step {given.step}: metrics and custom values have {needed} bytes, and there is room for {self._later_bytes}: "
                f"the step is captured already. Give custom values of that size with its first save(), or save them as an item",
                step=given.step,
                rank=self._session.rank,
                needed_bytes=needed,
                available_bytes=self._later_bytes,
                limit="table",
            )

    def _has(self, arena: TrainerArena) -> SlotNeed:
        """What the slots are good for."""
        data_bytes, table_bytes = arena.data_capacity_bytes, arena.table_capacity_bytes
        return SlotNeed(data_bytes=data_bytes, table_bytes=table_bytes, buffer_bytes=self._buffer_bytes)

    def again(self) -> SlotNeed | None:
        """As much as now, where somebody has removed the slots' files; None: they are there, or there are none yet."""
        arena = self._session.words.arena
        if arena is None or not self._session.must_move():
            return None
        return self._has(arena)

    def take(self, need: SlotNeed) -> None:
        """Get such slots, with room to grow where they have to be larger than those before: the next
        bit more must not need others again. Nothing is copied into those before meanwhile. Those
        whose files were removed go first.

        Raises:
            CapacityError: they don't fit; the slots before stay.
        """
        arena = self._session.words.arena
        roomy = need if arena is None else _with_room(need, self._has(arena))
        if self._session.must_move():
            self._session.move_out()
        try:
            self._allot(roomy)
        except CapacityError:
            if roomy == need:
                raise
            self._allot(need)

    def _allot(self, need: SlotNeed) -> None:
        number, slots = self._session.config.snapshot_slots, None
        try:
            slots = self._session.allot(
                data_bytes=need.data_bytes, table_bytes=need.table_bytes, buffer_bytes=need.buffer_bytes, slots=number
            )
            if slots is not None:
                slots.arena.before_close(self._ways.attach([slot.pages for slot in slots.arena.slots]))
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


def _with_room(need: SlotNeed, has: SlotNeed) -> SlotNeed:
    def roomy(needed: int, had: int) -> int:
        return needed if needed <= had else needed + max(needed // 2, LEAST_ROOM_BYTES)

    return SlotNeed(
        data_bytes=roomy(need.data_bytes, has.data_bytes),
        table_bytes=roomy(need.table_bytes, has.table_bytes),
        buffer_bytes=roomy(need.buffer_bytes, has.buffer_bytes),
    )
