"""Slots for the trainers of one host, while its machine goes on looking."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from raystate.arena import HostArena, SlotSet
from raystate.core.formats.errors import CapacityError
from raystate.core.formats.host_messages import HostEvent, SetRemoved
from raystate.core.host.machine import Host
from raystate.runtime.host.slot_store import SlotStore


class Allotting:
    """A part of `HostLoop`.

    Args:
        feed: hands an event to the machine, under the lock.
    """

    def __init__(self, arena: HostArena, store: SlotStore, machine: Host, feed: Callable[[HostEvent], None], lock: threading.RLock):
        self.arena = arena
        self._store = store
        self._machine = machine
        self._feed = feed
        self._lock = lock

    def allot(
        self,
        *,
        incarnation: str,
        rank: int,
        pid: int,
        data_bytes: int,
        table_bytes: int,
        buffer_bytes: int,
        slots: int,
        copies: int = 0,
    ) -> tuple[str, int]:
        """Slots for a trainer: (path of the set, its index). Its set of before stays until its
        contents aren't needed.

        Raises:
            CapacityError: they don't fit; nothing has changed.
        """

        def given(held: SlotSet) -> None:
            for event in self._store.changes():  # the trainer's set before this one: its last word
                self._feed(event)
            self._feed(self._store.found(held))
            self._drop_unneeded()

        allot = functools.partial(
            self.arena.allot, trainer=incarnation, rank=rank, pid=pid, data_bytes=data_bytes, table_bytes=table_bytes,
            buffer_bytes=buffer_bytes, slots=slots, copies=copies, given=given,
        )  # fmt: skip
        # Without the lock: each GiB takes half a second, and a host that says nothing for so long would count as down.
        with self.arena.allotting:
            try:
                held = allot()
            except CapacityError:
                with self._lock:
                    self._drop_unneeded()
                try:
                    held = allot()
                except CapacityError:
                    held = allot(replaced=True)
            return str(held.path), held.index

    def _drop_unneeded(self) -> None:
        """Give back the sets of trainers that are gone, unless a recovery or a running save may still need them."""
        for held in list(self.arena.sets):
            gone = self.arena.trainer_state(held) == "gone"
            if gone and not self._machine.is_needed(held.index) and self._store.remove(held.index, held.trainer):
                self._feed(SetRemoved(index=held.index))
