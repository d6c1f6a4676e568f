"""A HostActor without Ray: feeds its machine with what the arena and the doorbell say, and does at once what it asks for.

One thread looks at the doorbell and the words; calls come in on other threads. The arena's lock guards machine and bookkeeping; array bytes
are moved outside it, from slots that the machine holds.
"""

from __future__ import annotations

import logging
import selectors
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, assert_never

from raystate.arena import HostArena
from raystate.core.formats.errors import StorageError, error_from_name
from raystate.core.formats.host_messages import (
    Connected,
    Disconnected,
    Empty,
    EndCopy,
    Examined,
    FetchCopy,
    FillCopy,
    Hold,
    HoldEnded,
    HostCommand,
    HostEvent,
    Kill,
    Remember,
    RemoveSet,
    SlotAddress,
    Speak,
)
from raystate.core.formats.messages import (
    EndTrainers,
    Event,
    Failure,
    HostId,
    HostOrder,
    Staged,
    Tick,
    Write,
)
from raystate.core.host.machine import Host
from raystate.machine.priority import give_way
from raystate.observe.progress import Share
from raystate.orbax.kv import bytes_written
from raystate.runtime.host import stacks
from raystate.runtime.host.allotting import Allotting
from raystate.runtime.host.copying import Copier, Peers
from raystate.runtime.host.doorbell import Caller, Door, Hello, Waker
from raystate.runtime.host.serving import Serving
from raystate.runtime.host.slot_store import SlotStore
from raystate.runtime.host.writing import write_slots
from raystate.runtime.link import Unreachable
from raystate.runtime.parts import HostPart
from raystate.storage import Storage
from raystate.storage.names import GUARD
from raystate.waits import LOOK_EVERY_S, PRUNE_EVERY_S, WORDS_EVERY_S

logger = logging.getLogger("raystate.host")

WRITERS = 2  # saves at once: one is the rule, a second when the Coordinator has given the first up


class HostLoop:
    """Carries out what one HostActor's machine decides.

    Args:
        arena: this node's shared memory; the loop closes it.
        storage: where shards are written.
        host: the node.
        incarnation: of this process, unique.
        tell: hands an event to the Coordinator: it must not block and may lose it (reports are repeated).
        writers: what runs the writes; None: threads of its own, which give way to training.
        peers: the other HostActors; None: copies can't be made.
        domain: what the host is lost together with; "": nothing else.
        kill: ends a trainer, called with (pid, rank); None: SIGKILL.
        vanished: somebody has removed that file of the arena: begin anew, with another loop. Called once; it must not block.
        clock: monotonic seconds.

    Attributes:
        serving: pieces of snapshots for others.
    """

    def __init__(
        self,
        *,
        arena: HostArena,
        storage: Storage,
        host: HostId,
        incarnation: str,
        tell: Callable[[Event], None],
        peers: Peers | None = None,
        domain: str = "",
        writers: Executor | None = None,
        kill: Callable[[int, int], None] | None = None,
        vanished: Callable[[Path], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.arena = arena
        self._storage = storage
        self._host = host
        self._tell = tell
        self._kill = kill or stacks.kill
        self._clock = clock
        self._lock = arena.guard
        self._store = SlotStore(arena)
        self._machine = Host(host, incarnation, self._store.recall(), domain=domain)
        self._copier = Copier(arena, peers, self._order, self._store.found, self._lock)
        self._allotting = Allotting(arena, self._store, self._machine, self._feed, self._lock)
        self.serving = Serving(host, arena, self._store, self._lock, self._feed)
        self._share = Share(host, tell, bytes_written, clock)
        self._callers: dict[int, Caller] = {}  # by file descriptor
        self._saves: dict[str, Future[HostPart]] = {}
        self._answer: Future[HostPart] | Exception | None = None  # of the order at hand
        self._to_remove: set[tuple[int, str]] = set()
        self._prune_s = clock() + PRUNE_EVERY_S
        self._vanished = vanished
        self._files_s = clock()
        self._has_vanished = False
        self._stopping = False
        self._writers = writers or ThreadPoolExecutor(WRITERS, thread_name_prefix="raystate-write", initializer=give_way)
        self._door = Door(arena.path)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread: threading.Thread | None = None
        for held in arena.sets:
            self._feed(self._store.found(held))

    def start(self) -> None:
        """Look by itself from now on, on a thread."""
        self._thread = threading.Thread(target=self._run, name="raystate-host", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self.turn(WORDS_EVERY_S)
            except Exception:
                logger.exception("looking at trainers and words failed; trying again")
                time.sleep(WORDS_EVERY_S)

    def turn(self, timeout_s: float = 0.0) -> None:
        """Look once, after at most `timeout_s` without a ring."""
        with self._lock:
            wait_s = min(timeout_s, max(0.0, self._machine.next_report_s - self._clock()))
        ready = self._selector.select(wait_s)
        with self._lock:
            if self._stopping:
                return
            for key, _ in ready:
                self._on_ready(key.fileobj)
            self._look()

    # ------------------------------------------------------------ looking

    def has_vanished(self) -> bool:
        """Whether files of the arena have been removed: then this loop serves no trainer any
        more."""
        with self._lock:
            self._files_s = self._clock() + LOOK_EVERY_S
            if not self._has_vanished and (gone := self.arena.missing(self._door.path)) is not None:
                self._has_vanished = True
                self._vanished(gone)
            return self._has_vanished

    def _look(self) -> None:
        if self._clock() >= self._files_s and self.has_vanished():
            return
        for event in self._store.changes():
            self._feed(event)
        for index in self._machine.suspects:
            unlocked = self._store.unlocked(index)
            if unlocked is not None:
                self._feed(unlocked)
        self._to_remove = {one for one in self._to_remove if not self._store.remove(*one)}
        self._feed(Tick())
        self._share.turn()
        if self._clock() >= self._prune_s:  # a state whose tree changes leaves a layout behind each time
            self._prune_s = self._clock() + PRUNE_EVERY_S
            self.arena.prune_layouts()
            stacks.sweep(self.arena.path)

    def _on_ready(self, source: Any) -> None:
        if source is self._waker:
            self._waker.clear()
        elif source is self._door:
            if (caller := self._door.accept()) is not None:
                self._callers[caller.fileno()] = caller
                self._selector.register(caller, selectors.EVENT_READ)
        else:
            self._on_caller(source)

    def _on_caller(self, caller: Caller) -> None:
        before = caller.hello
        number = caller.fileno()
        if number not in self._callers:
            return  # it has ended since it was ready
        goes_on = caller.read()
        if caller.hello is not None and caller.hello is not before:
            self.meet(number, caller.pid, caller.hello)
        if goes_on:
            return
        if caller.trouble:
            logger.warning("%s", caller.trouble)
        self._selector.unregister(caller)
        del self._callers[number]
        self.part(number, caller.hello, said_bye=caller.said_bye)
        caller.close()
        self.arena.prune_layouts()

    # ------------------------------------------------------------ trainers: by the doorbell, or by a test

    def meet(self, connection: int, pid: int, hello: Hello) -> None:
        """A trainer says who it is, perhaps once more."""
        with self._lock:
            self._feed(
                Connected(
                    connection=connection,
                    pid=pid,
                    rank=hello.rank,
                    world=hello.world,
                    lineage=hello.lineage,
                    trainer=hello.incarnation,
                    set_index=hello.set_index,
                )
            )

    def part(self, connection: int, hello: Hello | None, *, said_bye: bool = False) -> None:
        """Its connection has ended. `said_bye`: it has detached on purpose."""
        with self._lock:
            for event in self._store.changes():  # its last word
                self._feed(event)
            alive = hello is not None and self._store.is_attached(hello.set_index)
            self._feed(Disconnected(connection=connection, said_bye=said_bye, alive=alive))

    # ------------------------------------------------------------ the machine

    def _feed(self, event: HostEvent) -> None:
        for command in self._machine.handle(event, self._clock()):
            self._carry_out(command)

    def _carry_out(self, command: HostCommand) -> None:
        match command:
            case Event():
                self._tell(command)
            case Speak():
                self._store.speak(command)
            case Empty():
                self._store.empty(command)
            case Remember():
                self._store.remember(command)
            case Kill(examine=None):
                self._end(command)
            case Kill():
                threading.Thread(target=self._end, args=(command,), name="raystate-stacks", daemon=True).start()
            case Hold(order=Write(), refused=Failure(error=error, message=message, details=details)):
                self._answer = error_from_name(error, message, details)
            case Hold(addresses=addresses, order=order):
                if order is None:
                    self.serving.addresses = addresses
                else:
                    self._answer = self._saves[order.save] = self._writers.submit(self._write, order, addresses)
            case FetchCopy() | FillCopy() | EndCopy():
                self._copier.carry_out(command)
            case RemoveSet(index=index, trainer=trainer):
                if not self._store.remove(index, trainer):
                    self._to_remove.add((index, trainer))
            case _:
                assert_never(command)

    def _end(self, command: Kill) -> None:
        if command.examine is not None:
            self._order(Examined(connection=command.examine, stack=stacks.take(self.arena.path, command.pid)))
            with self._lock:
                if not self._machine.is_connected(command.examine):
                    return  # it has left meanwhile, and its number may be another process's
        logger.debug("ending trainer rank %d (pid %d): %s", command.rank, command.pid, command.reason)
        self._kill(command.pid, command.rank)

    def _order(self, event: HostEvent) -> None:
        with self._lock:
            self._feed(event)
        self._waker.wake()

    # ------------------------------------------------------------ calls of trainers

    def allot(self, **request: Any) -> tuple[str, int]:
        """See `Allotting.allot`. Raises Unreachable: the arena begins anew."""
        if self.has_vanished():
            raise Unreachable("the files of its arena were removed, and it begins anew")
        return self._allotting.allot(**request)

    def contents(self) -> list[tuple[str, int, Staged]]:
        """What is held here: (set path, slot index, what)."""
        with self._lock:
            return [(self._store.path(address), address.slot, content) for address, content in self._machine.contents()]

    # ------------------------------------------------------------ calls of the Coordinator

    def order(self, order: HostOrder) -> None:
        """Do what it orders."""
        if isinstance(order, EndTrainers):
            with self._lock:
                self._hear_ends()  # of one that was dead already, of itself
                for event in self._store.changes():  # one that has said that it leaves is left alone
                    self._feed(event)
        self._order(order)

    def trainers(self) -> int:
        """How many are connected at this moment."""
        with self._lock:
            self._hear_ends()
            return len(self._callers)

    def _hear_ends(self) -> None:
        """Hear of the callers whose end the kernel knows, before anything is decided."""
        for caller in list(self._callers.values()):
            while caller.fileno() in self._callers and caller.has_hung_up():
                self._on_caller(caller)

    def write(self, order: Write) -> Future[HostPart]:
        """Write this host's owned shards of a snapshot under the save's unique names, once per save id."""
        with self._lock:
            self._answer = None
            self._feed(order)
            answer, self._answer = self._answer, None
            if answer is None:
                answer = self._saves[order.save]  # it was given before
            self._saves = {save: one for save, one in self._saves.items() if self._machine.remembers(save)}
        if isinstance(answer, Future):
            return answer
        refused: Future[HostPart] = Future()
        refused.set_exception(answer)
        return refused

    def _write(self, order: Write, addresses: tuple[SlotAddress, ...]) -> HostPart:
        try:
            with self._lock:
                slots = {address.rank: self._store.slot(address) for address in addresses}
            if self._storage.is_directory and not self._storage.exists(GUARD):  # TensorStore would make the folder anew
                text = f"{self._storage.url} is gone: the folder has been moved or removed, or is not mounted"
                raise StorageError(text, operation="write", path=self._storage.url)
            return write_slots(self._storage, self._host, order, slots, self.arena.get_layout, self._share.began)
        finally:
            self._share.ended(order.save)
            self._order(HoldEnded(reader=order.save))

    # ------------------------------------------------------------ end

    def close(self, *, remove_arena: bool) -> None:
        with self._lock:
            self._stopping = True
        self._waker.wake()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self._writers.shutdown(wait=False, cancel_futures=True)
        self._copier.close()
        with self._lock:
            for caller in self._callers.values():
                caller.close()
            self._selector.close()
            self._door.close()
            self._waker.close()
            self.arena.close(remove=remove_arena)
