"""A cluster in one process, without Ray: real managers, hosts, Coordinator, shared memory and storage, in an order that a seed draws.

Each rank's scripts run on threads of their own, but only one thread runs at a time, and only until it waits for something: then the
world picks who goes on. So a sequence that failed fails again. Seconds are virtual: a turn takes two milliseconds, or ten while all
wait.
"""

from __future__ import annotations

import bisect
import functools
import operator
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from raystate.arena import HostArena, arena_path, default_root
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import RaystateError, StorageError
from raystate.core.formats.messages import (
    CarriedOut,
    HostId,
    HostOrder,
    Joined,
    Reply,
    Staged,
    TrainerExited,
    Write,
)
from raystate.machine.own_time import OwnTime
from raystate.manager import StateManager
from raystate.observe.ledger.ledger import Ledger
from raystate.observe.progress import Progress
from raystate.runtime.coordinator.loop import CoordinatorLoop, Workers
from raystate.runtime.coordinator.retention import orbax_keep
from raystate.runtime.host.doorbell import Hello
from raystate.runtime.host.loop import HostLoop
from raystate.runtime.link import Gone, HostCall, Link, Unreachable
from raystate.runtime.parts import PieceBoxes
from raystate.storage import Storage, StorageWrapper, open_storage, run_hash
from tests.folders import MODEL_NAME, hold

TURN_S = 0.002
WAITING_TURNS = 20  # so long nothing was ordered and nothing has arrived: all wait for something slow, and time goes faster
WAITING_TURN_S = 0.01
NEVER_S = 1e9
STUCK_S = 15.0  # storage that neither answers nor fails
MOST_TURNS = 150_000
CAP_BYTES = 64 << 20

_when = operator.itemgetter(0)


def _remove(folder: Path, held: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if held is not None:
        os.close(held)


def state(step: int) -> dict[str, Any]:
    """What a step's bytes are, where nothing else is of interest."""
    return {"w": np.full(8, step, np.float32)}


class Violation(AssertionError):  # noqa: N818 - it is a finding
    """Something that the contract promises did not hold."""


class Killed(BaseException):
    """This rank's process is gone: not an Exception, so that nothing goes on after its own death."""


class Ended(RaystateError):  # noqa: N818 - it is an end, not an error
    """A script that has ended with an error that was its right to raise."""


class Weather(StorageWrapper):
    """Storage that can be out of service."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.out = False

    def before(self, operation: str, name: str) -> None:
        if self.out:
            raise StorageError(f"{operation} {name} failed: out of service", operation=operation, path=name)

    def kvstore(self, prefix: str) -> dict[str, Any]:
        self.before("kvstore", prefix)
        return self.inner.kvstore(prefix)


class Queue(Executor):
    """Runs what it is given when the world gets round to it."""

    def __init__(self, world: World):
        self.world = world
        self.dead = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        due_s = self.world.now_s + self.world.storage_delay()

        def run() -> None:
            if self.dead:
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        bisect.insort(self.world.tasks, (due_s, run), key=_when)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        del wait, cancel_futures  # an ended loop is not asked for anything any more


class Host:
    """One node: its arena, and the HostLoop of the present incarnation."""

    def __init__(self, world: World, number: int):
        self.world = world
        self.id = HostId(f"node{number:08d}")
        self.incarnations = 0
        self.loop: HostLoop | None = None
        self.writers = Queue(world)
        self.callers: dict[int, ModelBell] = {}
        self.start()

    def begin_anew(self) -> None:
        """Somebody has removed the arena's files."""
        if self.loop is not None and self.loop.has_vanished():
            first_index = 1 + max((held.index for held in self.loop.arena.sets), default=-1)
            self.crash()
            self.start(first_index)

    def start(self, first_index: int = 0) -> None:
        """Unless it is there already."""
        if self.loop is not None:
            return
        world = self.world
        self.incarnations += 1
        config = world.config
        arena = HostArena.open(
            arena_path(default_root(config.arena_dir), run_hash(config.storage, config.run), self.id),
            run=config.run,
            storage=config.storage,
            node_id=self.id,
            cap_bytes=CAP_BYTES,
            memory_threshold=None,
        )
        arena.first_index = first_index
        self.writers = Queue(world)
        self.loop = HostLoop(
            arena=arena,
            storage=world.storage,
            host=self.id,
            incarnation=f"{self.id}i{self.incarnations}",
            tell=world.tell,
            writers=self.writers,
            kill=self.end_trainer,
            vanished=lambda _: world.at(0.0, self.begin_anew),
            clock=world.clock,
        )
        for bell in list(self.callers.values()):
            self.loop.meet(bell.connection, bell.connection, bell.hello)

    def end_trainer(self, connection: int, _rank: int) -> None:
        """What the HostLoop asks for."""
        bell, world = self.callers.get(connection), self.world
        if bell is None:
            return
        if not world.crashed and not any(rank.finished or rank.failed for rank in world.playing):
            world.found.append(f"rank {bell.rank.number} is ended by its host, although nobody has died or failed")
        world.at(0.0, lambda: world.end(bell.rank))

    def crash(self) -> None:
        """SIGKILL: the kernel closes what it had, and its arena stays."""
        loop, self.loop = self.loop, None
        if loop is not None:
            self.writers.dead = True
            loop.close(remove_arena=False)

    def lose(self) -> None:
        """The node is gone with its memory, and another one comes in its place."""
        if self.loop is not None:
            self.loop.close(remove_arena=True)
            self.loop = None
        self.start()

    def turn(self) -> None:
        if self.loop is not None:
            self.loop.turn()


class ModelBell:
    """See `runtime.link.Ringer`: what is said is heard at once, by a host that is there."""

    def __init__(self, rank: Rank, host: Host, hello: Hello):
        self.rank = rank
        self.host = host
        self.hello = hello
        self.connection = host.world.number()

    def connect(self, timeout_s: float) -> None:
        del timeout_s
        self.host.callers[self.connection] = self
        self.introduce(self.hello)

    @property
    def is_open(self) -> bool:
        return self.connection in self.host.callers

    def introduce(self, hello: Hello) -> None:
        self.hello = hello
        if self.is_open and self.host.loop is not None:
            self.host.loop.meet(self.connection, self.connection, hello)

    def ring(self) -> None:
        """The host looks at every turn of its own."""

    def close(self, *, said_bye: bool = True) -> None:
        if self.host.callers.pop(self.connection, None) is None or self.host.loop is None:
            return
        self.host.loop.part(self.connection, self.hello, said_bye=said_bye)


class ModelLink:
    """See `runtime.link.Link`."""

    def __init__(self, world: World, rank: Rank, host: Host):
        self.world = world
        self.rank = rank
        self.host = host.id
        self._host = host
        self.bells: list[ModelBell] = []

    def _alive(self) -> None:
        if self.rank.dead:
            raise Killed

    def check(self) -> None:
        self._alive()

    def enter(self, *, takeover: bool) -> None:
        del takeover
        self._alive()
        self.world.ensure_coordinator(join=True)

    def ask(self, event: Any, timeout_s: float) -> Reply:
        self._alive()
        world = self.world
        if isinstance(event, Joined):
            world.ensure_coordinator(join=True)
        loop = world.coordinator
        if loop is None:
            raise Unreachable("no Coordinator")
        future = loop.ask(event)
        if loop.ended and not future.done():  # an answer that was not read yet is still there
            raise Gone("the run is over")
        deadline_s = world.now_s + timeout_s
        while not future.done():
            if world.coordinator is not loop or loop.ended:
                raise Unreachable("the Coordinator is gone")
            if world.now_s > deadline_s:
                raise Unreachable("no answer in time")
            self.rest()
        return future.result()

    def failed(self, event: TrainerExited, error: BaseException) -> None:
        del error
        self._alive()
        self.rank.failed = True
        self.world.tell(event)

    def tell(self, progress: Progress) -> None:
        self._alive()
        self.world.tell(progress)

    def call_host(self, host: HostId, method: str, timeout_s: float, kwargs: dict[str, Any]) -> Any:
        del timeout_s
        self._alive()
        self.rest()
        loop = self.world.hosts[host].loop
        if loop is None:
            raise Unreachable("no HostActor")
        return getattr(loop, method)(**kwargs)

    def call_hosts(self, calls: Sequence[HostCall], timeout_s: float) -> Iterator[tuple[int, Any]]:
        del timeout_s
        self.world.called()
        for index in self.world.rng.sample(range(len(calls)), len(calls)):
            self._alive()
            self.rest()
            loop = self.world.hosts[calls[index].host].loop
            if loop is None:
                yield index, Unreachable("no HostActor")
                continue
            try:
                answer = getattr(loop.serving, calls[index].method)(**calls[index].kwargs)
            except RaystateError as error:
                answer = error
            nbytes = answer.data.nbytes if isinstance(answer, PieceBoxes) else 0
            self.world.served.append((calls[index].host, calls[index].kwargs["rank"], nbytes))
            yield index, answer

    def bell(self, arena_path: Path, hello: Hello) -> ModelBell:
        del arena_path
        self._alive()
        self.bells.append(ModelBell(self.rank, self._host, hello))
        return self.bells[-1]

    def left(self, rank: int, world: int) -> None:
        del rank, world

    def clock(self) -> float:
        return self.world.clock()

    def node_clock(self) -> float:
        return self.world.clock()

    def rest(self, condition: threading.Condition | None = None, seconds: float = 0.002) -> None:
        del condition
        self._alive()
        self.rank.rest(seconds * self.world.paces[self.rank.number])
        self._alive()

    def spawn(
        self, turn: Callable[[], bool], condition: threading.Condition, name: str, pause_s: float = 0.0
    ) -> Callable[[], None]:
        del condition, name, pause_s
        self.world.turns[self.rank.number, id(turn)] = turn
        key = (self.rank.number, id(turn))
        return lambda: self.world.turns.pop(key, None) and None


def open_over(link: Link, config: StateConfig, *, rank: int, world: int, group: str, launched: bool = True) -> StateManager:
    """A manager over another link than the one that StateManager() makes."""
    manager = StateManager.__new__(StateManager)
    manager._open(config, link, rank, world, group, launched=launched, takeover=False)
    return manager


class Script:
    """A thread of a rank's process. It runs when it is picked, until it rests."""

    def __init__(self, rank: Rank, call: Callable[[Rank], None]):
        self.rank = rank
        self.error: BaseException | None = None
        self.finished = False
        self.wake_s = 0.0
        self._go = threading.Lock()
        self._back = threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, args=(call,), name=f"rank-{rank.number}", daemon=True)
        self._thread.start()

    @property
    def is_this(self) -> bool:
        return self._thread is threading.current_thread()

    def _run(self, call: Callable[[Rank], None]) -> None:
        self._go.acquire()
        try:
            call(self.rank)
        except Killed:
            pass
        except Ended:
            self.rank.world.end_all()
        except BaseException as error:
            self.error = error
        self.finished = True
        self._back.release()

    def step(self) -> None:
        """Let it run until it rests."""
        self._go.release()
        self._back.acquire()

    def rest(self, seconds: float) -> None:
        """Called on its own thread."""
        self.wake_s = self.rank.world.now_s + (NEVER_S if self.rank.hangs else seconds)
        self._back.release()
        self._go.acquire()
        if self.rank.dead:
            raise Killed


class Rank:
    """One rank's process: its script, and what other threads that starts."""

    def __init__(self, world: World, number: int, script: Callable[[Rank], None]):
        self.world = world
        self.number = number
        self.host = list(world.hosts.values())[number % len(world.hosts)]
        self.link: ModelLink | None = None
        self.manager: StateManager | None = None
        self.dead = False
        self.failed = False  # and has said so
        self.hangs = False  # it comes back from no wait
        self.scripts = [Script(self, script)]

    def beside(self, call: Callable[[Rank], None]) -> Script:
        """Another thread of the process."""
        self.scripts.append(Script(self, call))
        return self.scripts[-1]

    @property
    def finished(self) -> bool:
        return all(script.finished for script in self.scripts)

    @property
    def error(self) -> BaseException | None:
        return next((script.error for script in self.scripts if script.error is not None), None)

    def rest(self, seconds: float) -> None:
        """Let others go on. Called on a thread of the process."""
        next(script for script in self.scripts if script.is_this).rest(seconds)

    def rest_until(self, done: Callable[[], bool], most_s: float = 60.0) -> None:
        """Raises Violation after `most_s`."""
        give_up_s = self.world.now_s + most_s
        while not done():
            if self.world.now_s > give_up_s:
                raise Violation(f"rank {self.number} has waited for {most_s:.0f} s")
            self.rest(0.01)

    def open(self, group: str, *, launched: bool = True) -> StateManager:
        """A StateManager of this rank. `launched`: somebody starts the script again."""
        if self.dead:
            raise Killed
        self.world.ensure_coordinator(join=True)
        self.link = ModelLink(self.world, self, self.host)
        self.manager = open_over(
            self.link, self.world.config, rank=self.number, world=self.world.ranks, group=group, launched=launched
        )
        return self.manager

    def begin(self, reference: Any = None, group: str = "first", *, launched: bool = True) -> StateManager:
        """The same, which has restored what there is."""
        manager = self.open(group, launched=launched)
        manager.restore(reference)
        return manager

    def kill(self) -> None:
        """SIGKILL: nothing that it holds is given back by itself."""
        link, manager = self.link, self.manager
        self.dead = True
        if link is not None:
            for bell in link.bells:
                bell.close(said_bye=False)
        for key in [key for key in self.world.turns if key[0] == self.number]:
            del self.world.turns[key]
        if manager is not None:
            manager._session.words.close()
        if link is not None and link.bells:
            for bell in link.bells:  # the lock is free only now
                if bell.host.loop is not None:
                    bell.host.loop.turn()
        for script in self.scripts:
            while not script.finished:
                script.step()


class World:
    """Everything of one sequence.

    Args:
        seed: draws the order of all turns.
        ranks: of the worker group.
        nodes: ranks are dealt out to them.
        paces: how much longer each rank takes for everything.
        config: fields of the StateConfig.
    """

    def __init__(self, seed: int = 1, *, ranks: int = 1, nodes: int = 1, paces: Sequence[float] = (), **config: Any):
        self.rng = Random(seed)
        self.ranks = ranks
        self.paces = tuple(paces) or (1.0,) * ranks
        self.now_s = 0.0
        self._own_time = OwnTime(lambda: self.now_s)
        self.slow = self.stuck = False
        self.finished = False
        self.tasks: list[tuple[float, Callable[[], None]]] = []  # by their time; of one time, as they came
        self._waiting = 0  # turns since something was ordered or has arrived
        self.turns: dict[tuple[int, int], Callable[[], bool]] = {}
        self.events: list[tuple[float, Callable[[], None]]] = []  # of the world's own, such as a crash
        self.playing: list[Rank] = []
        self.found: list[str] = []  # what nobody may do
        self.called: Callable[[], None] = lambda: None  # before a rank calls hosts for pieces of snapshots
        self.served: list[tuple[HostId, int, int]] = []  # (host, rank, array bytes) of each call for a piece of a snapshot
        self.crashed = False  # a rank was killed: its launcher starts the group again
        self.published: Callable[[int], None] = lambda step: None
        self._number = 0
        self._folder = Path(tempfile.mkdtemp(prefix=MODEL_NAME, dir="/dev/shm"))
        # Whoever forgets to close it, a script that tries something out for one, leaves nothing in shared memory. What a killed process
        # leaves, the next run of tests removes.
        self._remove = weakref.finalize(self, _remove, self._folder, hold(self._folder))
        self._ledgers: list[Ledger] = []
        self.arenas = self._folder / "arenas"
        self.arenas.mkdir()
        self.config = StateConfig(
            storage=str(self._folder / "run"),
            run="model",
            arena_dir=str(self.arenas),
            **{
                "start_timeout_s": 30.0,
                "barrier_timeout_s": 20.0,
                "save_timeout_s": 20.0,
                "restore_timeout_s": 30.0,
                "host_timeout_s": 4.0,
                "idle_timeout_s": 10_000.0,
                "replicas": 0,  # transfers have threads of their own
                "snapshot_every_steps": 1,
                **config,
            },
        )
        self.storage = Weather(open_storage(self.config.storage))
        self.coordinator: CoordinatorLoop | None = None
        self._workers: tuple[Queue, ...] = ()
        self._coordinators = 0
        self.hosts: dict[HostId, Host] = {}
        for number in range(nodes):
            host = Host(self, number)
            self.hosts[host.id] = host

    def number(self) -> int:
        self._number += 1
        return self._number

    def clock(self) -> float:
        """Of each process: all run, and stand still, together."""
        return self._own_time()

    def stand_still(self, seconds: float) -> None:
        """All processes at once: a frozen cgroup, a moved machine. What others do for them goes on."""
        self.now_s += seconds

    def storage_delay(self) -> float:
        if self.stuck:
            return STUCK_S
        return self.rng.random() * (3.0 if self.slow else 0.02)

    # ------------------------------------------------------------ the Coordinator, and how it reaches the hosts

    def ensure_coordinator(self, *, join: bool = False, restarted: bool = False) -> None:
        if self.coordinator is not None and not self.coordinator.ended:
            return
        if join:
            self.storage.out = False  # a run that begins in an outage is refused, which is no sequence of calls
        self._coordinators += 1
        queues = (Queue(self), Queue(self), Queue(self))
        self._workers = queues
        self.finished = False
        loop = CoordinatorLoop(
            settings=self.config.core_settings(),
            keep=orbax_keep(self.config),
            storage=self.storage,
            hosts=self,
            known_hosts=tuple(self.hosts),
            writer=f"w{self._coordinators}",
            is_dead=lambda _: True,
            on_end=self._ended,
            restarted=restarted,
            run_metadata=self.config.run_metadata,
            workers=Workers(build=queues[0], clean=queues[1], log=queues[2]),
            clock=self.clock,
        )
        real = loop.post

        def post(event: Any) -> None:
            if isinstance(event, CarriedOut) and event.intent.kind == "commit" and not event.error:
                try:
                    self.published(event.intent.step)
                except Violation as error:  # raised here, it would be taken for a failure of storage
                    self.found.append(str(error))
            real(event)

        loop.post = post
        self.coordinator = loop
        self._ledgers.append(loop.ledger)

    def _ended(self, _reason: str) -> None:
        self.finished = True

    def kill_coordinator(self, away_s: float = 0.2) -> None:
        for queue in self._workers:
            queue.dead = True
        if self.coordinator is not None and not self.coordinator.ended:
            self.coordinator = None
            self.at(away_s, lambda: self.ensure_coordinator(restarted=True))

    def tell(self, event: Any) -> None:
        loop = self.coordinator
        if loop is not None and not loop.ended:
            delay_s = 0.01 * self.rng.random()
            self.at(delay_s, lambda: loop.post(event))

    def _loop(self, host: HostId) -> HostLoop | None:
        return self.hosts[host].loop

    def ensure(self, host: HostId, on_error: Callable[[str], None]) -> None:
        del host, on_error

    def order(self, order: HostOrder) -> None:
        def arrive() -> None:
            loop = self._loop(order.host)
            if loop is not None:
                loop.order(order)

        self.at(0.01 * self.rng.random(), arrive)

    def write(self, order: Write) -> Future[Any]:
        future: Future[Any] = Future()

        def copy(done: Future[Any]) -> None:
            error = done.exception()
            future.set_exception(error) if error is not None else future.set_result(done.result())

        def arrive() -> None:
            loop = self._loop(order.host)
            if loop is None:
                future.set_exception(Unreachable("no HostActor"))
            else:
                loop.write(order).add_done_callback(copy)

        self.at(0.01 * self.rng.random(), arrive)
        return future

    def lose_memory(self) -> None:
        """All nodes are lost, and others come: only storage is left."""
        self.kill_coordinator(0.0)
        for host in self.hosts.values():
            host.lose()

    def held(self) -> list[Staged]:
        """What all hosts hold; nothing if one of them is away, or its files are gone."""
        loops = [host.loop for host in self.hosts.values()]
        if any(loop is None or loop.has_vanished() for loop in loops):
            return []
        return [staged for loop in loops if loop is not None for _, _, staged in loop.contents()]

    def close_empty(self) -> None:
        self.close_all(remove_arena=True, only_empty=True)

    def close_all(self, *, remove_arena: bool, only_empty: bool = False) -> None:
        for host in self.hosts.values():
            if host.loop is not None and not (only_empty and host.loop.arena.sets):
                host.loop.close(remove_arena=remove_arena)
                host.loop = None
                self.at(0.05, host.start)

    # ------------------------------------------------------------ time

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        """Later."""
        bisect.insort(self.events, (self.now_s + delay_s, call), key=_when)

    def kill_rank(self, number: int) -> None:
        """SIGKILL of one rank. Its launcher notices, and ends the others if raystate has not done it before."""
        if not self.playing[number].finished:
            self.playing[number].kill()
            self.end_all()

    def end_all(self) -> None:
        """The launcher has noticed that a rank is gone."""
        self.crashed = True
        for rank in self.playing:
            self.at(2.0 + self.rng.random(), lambda rank=rank: self.end(rank))

    def end(self, rank: Rank) -> None:
        """SIGKILL, from outside."""
        if not rank.finished:
            self.crashed = True
            rank.kill()

    def run(self, ranks: list[Rank]) -> None:
        """Until all scripts have ended."""
        self.playing, self.crashed = ranks, False
        for _ in range(MOST_TURNS):
            if all(rank.finished for rank in ranks):
                break
            self._turn(ranks)
        else:
            raise Violation(f"no end after {MOST_TURNS} turns, {self.now_s:.0f} s")
        if self.found:
            raise Violation(self.found[0])
        for rank in ranks:
            if rank.error is not None and not (self.crashed and isinstance(rank.error, RaystateError)):
                raise rank.error

    def play(self, script: Callable[[Rank], None], ranks: int | None = None) -> None:
        """One worker group, each rank with this script, to its end. Every error counts.

        Args:
            ranks: None: those of the world.
        """
        group = [Rank(self, number, script) for number in range(self.ranks if ranks is None else ranks)]
        try:
            self.run(group)
            for rank in group:
                if rank.error is not None:
                    raise rank.error
        finally:
            for rank in group:
                rank.kill()

    def play_all(self, *scripts: Callable[[Rank], None]) -> None:
        """One worker group after the other; then the world closes."""
        with self:
            for script in scripts:
                self.play(script)

    def _turn(self, ranks: list[Rank]) -> None:
        outstanding = (len(self.tasks), len(self.events))
        self.now_s += TURN_S if self._waiting < WAITING_TURNS else WAITING_TURN_S
        now_s = self.now_s
        self._own_time()
        scripts = [script for rank in ranks for script in rank.scripts]
        choices: list[Callable[[], Any]] = [one.step for one in scripts if not one.finished and one.wake_s <= now_s]
        choices += self.turns.values()
        choices += [host.turn for host in self.hosts.values() if host.loop is not None]
        if self.coordinator is not None and not self.coordinator.ended:
            choices.append(self.coordinator.turn)
        for waiting in (self.tasks, self.events):
            if waiting and waiting[0][0] <= now_s:
                choices += [functools.partial(self._take, waiting)] * 3
        if choices:
            self.rng.choice(choices)()
        self._waiting = self._waiting + 1 if outstanding == (len(self.tasks), len(self.events)) else 0

    @staticmethod
    def _take(waiting: list[tuple[float, Callable[[], None]]]) -> None:
        """What is due first. Nothing comes between since it was chosen."""
        waiting.pop(0)[1]()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.storage.out = self.stuck = False
        self.close()

    def close(self) -> None:
        for queue in self._workers:
            queue.dead = True
        for host in self.hosts.values():
            if host.loop is not None:
                host.loop.close(remove_arena=True)
        for ledger in self._ledgers:  # it writes on threads of its own, and would make the folder again
            ledger.close()
        self._remove()
