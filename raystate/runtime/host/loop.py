"""A HostActor without Ray: feeds its machine with what the arena and the doorbell say, and does at once what it asks for.

One thread looks at the doorbell and the words; calls come in on other threads. The arena's lock guards machine and bookkeeping; array bytes
are moved outside it, from slots that the machine holds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, assert_never

from raystate.arena import HostArena
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
    Speak,
)
from raystate.core.formats.messages import EndTrainers, Event, HostId, HostOrder, Staged, Tick, Write
from raystate.core.host.machine import Host
from raystate.observe.progress import Share
from raystate.orbax.kv import bytes_written
from raystate.runtime.host import stacks
from raystate.runtime.host.allotting import Allotting
from raystate.runtime.host.callers import Callers
from raystate.runtime.host.copying import Copier, Peers
from raystate.runtime.host.counting import Counting
from raystate.runtime.host.doorbell import Hello
from raystate.runtime.host.serving import Serving
from raystate.runtime.host.slot_store import SlotStore
from raystate.runtime.host.upkeep import Upkeep
from raystate.runtime.host.writes import Writes
from raystate.runtime.link import Unreachable
from raystate.runtime.parts import HostPart
from raystate.storage import Storage
from raystate.waits import WORDS_EVERY_S

logger = logging.getLogger("raystate.host")


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
        machine: name of its machine, for people.
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
        machine: str = "",
        writers: Executor | None = None,
        kill: Callable[[int, int], None] | None = None,
        vanished: Callable[[Path], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.arena = arena
        self._tell = tell
        self._kill = kill or stacks.kill
        self._clock = clock
        self._lock = arena.guard
        self._store = SlotStore(arena)
        self._machine = Host(host, incarnation, self._store.recall(), domain=domain, machine=machine)
        self._copier = Copier(arena, peers, self._order, self._store.found, self._lock)
        self._allotting = Allotting(arena, self._store, self._machine, self._feed, self._lock)
        self.serving = Serving(host, arena, self._store, self._lock, self._feed)
        self._share = Share(host, tell, bytes_written, clock)
        self._writes = Writes(storage, arena, self._store, self._machine, self._order, self._share, writers, self._lock)
        self._callers = Callers(arena.path, self.meet, self.part)
        self._upkeep = Upkeep(arena, self._store, self._callers.door, vanished, clock)
        self._counting = Counting(arena, clock)
        self._stopping = False
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
        ready = self._callers.wait(wait_s)
        with self._lock:
            if self._stopping:
                return
            self._callers.serve(ready)
            self._look()

    # ------------------------------------------------------------ looking

    def has_vanished(self) -> bool:
        """Whether files of the arena have been removed: then this loop serves no trainer any
        more."""
        with self._lock:
            return self._upkeep.has_vanished()

    def _look(self) -> None:
        if self._upkeep.finds_vanished():
            return
        for event in self._store.changes():
            self._feed(event)
        for index in self._machine.suspects:
            unlocked = self._store.unlocked(index)
            if unlocked is not None:
                self._feed(unlocked)
        self._upkeep.tidy()
        self._feed(Tick(counts=self._counting.news()))
        self._share.turn()

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
            self.arena.prune_layouts()

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
            case Hold(order=None, addresses=addresses):
                self.serving.addresses = addresses
            case Hold():
                self._writes.decided(command)
            case FetchCopy() | FillCopy() | EndCopy():
                self._copier.carry_out(command)
            case RemoveSet(index=index, trainer=trainer):
                self._upkeep.remove(index, trainer)
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
            if isinstance(event, HoldEnded):
                self._feed(Tick(counts=self._counting.news(at_once=True)))  # what a save took: a run may end with it
            self._feed(event)
        self._callers.wake()

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
                self._callers.hear_ends()  # of one that was dead already, of itself
                for event in self._store.changes():  # one that has said that it leaves is left alone
                    self._feed(event)
        self._order(order)

    def trainers(self) -> int:
        """How many are connected at this moment."""
        with self._lock:
            self._callers.hear_ends()
            return len(self._callers)

    def write(self, order: Write) -> Future[HostPart]:
        """Write this host's owned shards of a snapshot under the save's unique names, once per save id."""
        return self._writes.write(order)

    # ------------------------------------------------------------ end

    def close(self, *, remove_arena: bool) -> None:
        with self._lock:
            self._stopping = True
        self._callers.wake()
        if self._thread is not None:
            self._thread.join(timeout=10.0)
        self._writes.close()
        self._copier.close()
        with self._lock:
            self._callers.close()
            self.arena.close(remove=remove_arena)
