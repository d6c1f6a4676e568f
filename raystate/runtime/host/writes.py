"""Orders to write, each carried out once, on threads that give way to training."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor

from raystate.arena import HostArena
from raystate.core.formats.errors import StorageError, error_from_name
from raystate.core.formats.host_messages import Hold, HoldEnded, HostEvent, SlotAddress
from raystate.core.formats.messages import Write
from raystate.core.host.machine import Host
from raystate.machine.priority import give_way
from raystate.observe.progress import Share
from raystate.runtime.host.slot_store import SlotStore
from raystate.runtime.host.writing import write_slots
from raystate.runtime.parts import HostPart
from raystate.storage import Storage
from raystate.storage.names import GUARD

WRITERS = 2  # saves at once: one is the rule, a second when the Coordinator has given the first up


class Writes:
    """A part of `HostLoop`.

    Args:
        storage: where it writes to.
        arena, store: the slots.
        machine: decides on each order.
        feed: hands the machine an event, and carries out at once what it asks for; it takes the lock.
        share: is told of the bytes.
        writers: what runs the writes; None: threads of its own.
        lock: that of the machine.
    """

    def __init__(
        self,
        storage: Storage,
        arena: HostArena,
        store: SlotStore,
        machine: Host,
        feed: Callable[[HostEvent], None],
        share: Share,
        writers: Executor | None,
        lock: threading.RLock,
    ):
        self._storage = storage
        self._arena = arena
        self._store = store
        self._machine = machine
        self._feed = feed
        self._share = share
        self._lock = lock
        self._writers = writers or ThreadPoolExecutor(WRITERS, thread_name_prefix="raystate-write", initializer=give_way)
        self._saves: dict[str, Future[HostPart]] = {}
        self._answer: Future[HostPart] | None = None  # of the order at hand

    def write(self, order: Write) -> Future[HostPart]:
        """Write the owned pieces of a snapshot under the save's unique names, once per save id."""
        with self._lock:
            self._answer = None
            self._feed(order)
            answer = self._answer or self._saves[order.save]  # it was given before
            self._saves = {save: one for save, one in self._saves.items() if self._machine.remembers(save)}
        return answer

    def decided(self, hold: Hold) -> None:
        """The machine's answer to the order at hand."""
        order = hold.order
        assert order is not None
        if hold.refused is None:
            self._answer = self._saves[order.save] = self._writers.submit(self.carry_out, order, hold.addresses)
        else:
            self._answer = Future()
            self._answer.set_exception(error_from_name(hold.refused.error, hold.refused.message, hold.refused.details))

    def carry_out(self, order: Write, addresses: tuple[SlotAddress, ...]) -> HostPart:
        """Write what lies there, and let it go."""
        try:
            with self._lock:
                slots = {address.rank: self._store.slot(address) for address in addresses}
            if self._storage.is_directory and not self._storage.exists(GUARD):  # TensorStore would make the folder anew
                text = f"{self._storage.url} is gone: the folder has been moved or removed, or is not mounted"
                raise StorageError(text, operation="write", path=self._storage.url)
            return write_slots(self._storage, self._machine.host, order, slots, self._arena.get_layout, self._share.began)
        finally:
            self._share.ended(order.save)
            self._feed(HoldEnded(reader=order.save))

    def close(self) -> None:
        self._writers.shutdown(wait=False, cancel_futures=True)
