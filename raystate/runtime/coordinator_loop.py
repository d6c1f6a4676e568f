"""The Coordinator without Ray: feeds its machine with events, and carries out what it asks for.

One thread owns the machine. Slow commands run on worker threads and come back as events. Nothing here decides.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, assert_never

from raystate import fault_points
from raystate.core.coordinator import Coordinator
from raystate.core.errors import ConfigError, CorruptCheckpointError, StaleAttemptError, StorageError
from raystate.core.log import claim_entry
from raystate.core.messages import (
    Advice,
    Advise,
    Answer,
    Append,
    Appended,
    AttemptDead,
    BuildPackage,
    Claimed,
    Command,
    Discard,
    EndTrainers,
    Event,
    Failure,
    Finish,
    HostDown,
    HostId,
    Invalidate,
    Joined,
    LiveStep,
    Log,
    LogEntry,
    Packaged,
    Publish,
    PublishDone,
    Reply,
    Retire,
    RetireDone,
    Settings,
    Superseded,
    Tick,
    Write,
    Written,
)
from raystate.core.retention import Keep
from raystate.core.tree import Package
from raystate.orbax.scratch import load_orbax
from raystate.runtime.ledger import Ledger
from raystate.runtime.packaging import build_package
from raystate.runtime.priority import give_way
from raystate.storage import RunLog, StepFolder, Storage, assumed_dead, collect_garbage, foreign_steps, pinned_steps

logger = logging.getLogger("raystate.coordinator")

TICK_S = 0.1
LOOK_FOR_DEAD_S = 15.0
REMEMBERED_ASKS = 4096


class Hosts(Protocol):
    """How the loop reaches the HostActors. All calls return at once."""

    def ensure(self, host: HostId, on_error: Callable[[str], None]) -> None: ...
    def advise(self, host: HostId, advice: Advice) -> None: ...
    def invalidate(self, order: Invalidate) -> None: ...
    def end_trainers(self, order: EndTrainers) -> None: ...
    def write(self, order: Write) -> Future[Any]: ...
    def close_all(self, *, remove_arena: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What runs the slow commands.

    Attributes:
        build: packages and publications.
        clean: removals, apart, so that a save never waits for a deletion.
        log: entries of the log, one at a time.
    """

    build: Executor
    clean: Executor
    log: Executor

    @classmethod
    def threads(cls) -> Workers:
        return cls(
            build=ThreadPoolExecutor(max_workers=8, thread_name_prefix="raystate-work", initializer=give_way),
            clean=ThreadPoolExecutor(max_workers=2, thread_name_prefix="raystate-clean", initializer=give_way),
            log=ThreadPoolExecutor(max_workers=1, thread_name_prefix="raystate-log"),
        )

    def shutdown(self) -> None:
        """Wait for what is under way."""
        for executor in (self.log, self.build, self.clean):
            executor.shutdown(wait=True)


class CoordinatorLoop:
    """See the module.

    Args:
        settings: what the decisions depend on.
        keep: the retention policy; called on a worker thread, since it may be slow or a user's.
        storage: where the run's log and steps are.
        hosts: the HostActors.
        known_hosts: those that exist already.
        writer: random id of this process, for the log.
        is_dead: tells whether the process behind a log writer id is known to be dead.
        on_end: called once from the loop's thread when the run is released or superseded.
        workers: None: threads of its own.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        keep: Keep,
        storage: Storage,
        hosts: Hosts,
        known_hosts: tuple[HostId, ...],
        writer: str,
        is_dead: Callable[[str], bool],
        on_end: Callable[[str], None],
        workers: Workers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._settings = settings
        self._keep = keep
        self._clock = clock
        self._known_hosts = known_hosts
        self._storage = storage
        self._hosts = hosts
        self._log = RunLog(storage)
        self._machine = Coordinator(settings)
        self._writer = writer
        self._is_dead = is_dead
        self._on_end = on_end
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._asks: dict[str, Future[Reply]] = {}
        self._asks_lock = threading.Lock()
        self._parts: dict[str, dict[HostId, Any]] = {}
        self._packages: dict[str, Package] = {}
        self._workers = workers or Workers.threads()
        self._ended = threading.Event()
        self._next_tick_s = float("-inf")
        self._look_s = 0.0  # monotonic: when to look next for attempts that are assumed dead
        self.ledger = Ledger(storage)
        self.attempt = -1
        self.failed: Failure | None = None

    def start(self) -> None:
        """Claim the run and go on, on a thread."""
        threading.Thread(target=self._run, name="raystate-coordinator", daemon=True).start()

    @property
    def ended(self) -> bool:
        """The run is released, or this attempt is over."""
        return self._ended.is_set()

    # ------------------------------------------------------------ from other threads

    def post(self, event: Event) -> None:
        self._events.put(event)

    def ask(self, event: Any) -> Future[Reply]:
        """Post an event that is answered; the same ask posted twice gets the same answer."""
        with self._asks_lock:
            future = self._asks.get(event.ask)
            if future is None:
                self._forget_answered()
                future = self._asks[event.ask] = Future()
                if self.failed is not None:
                    future.set_result(self.failed)
        if isinstance(event, Joined):
            self._hosts.ensure(event.host, functools.partial(self._host_failed, event.host))
        self.post(event)
        return future

    def _forget_answered(self) -> None:
        """Whoever asked has read its answer long ago."""
        if len(self._asks) >= 2 * REMEMBERED_ASKS:
            answered = [ask for ask, future in self._asks.items() if future.done()]
            for ask in answered[:-REMEMBERED_ASKS]:
                del self._asks[ask]

    def _host_failed(self, host: HostId, reason: str) -> None:
        # A HostActor is restarted for ever while its node lives: one that can't be made has lost its node.
        self.post(HostDown(host=host, reason=reason, gone=True))

    # ------------------------------------------------------------ the machine's thread

    def _run(self) -> None:
        try:
            self.claim()
            while not self._ended.is_set():
                self.turn(TICK_S)
        except Exception as error:
            logger.exception("the coordinator stopped")
            self._fail_all(
                Failure(error="RaystateError", message=f"the coordinator of run {self._settings.run!r} stopped: {error}")
            )
            self._on_end(f"stopped: {error}")

    def turn(self, timeout_s: float = 0.0) -> bool:
        """Handle the next event, if one comes within `timeout_s`; and a Tick when it is time, however many events there are.

        Returns:
            False: there was nothing to do.
        """
        busy = False
        if self._clock() >= self._next_tick_s:
            self._next_tick_s = self._clock() + TICK_S
            self._handle(Tick())
            busy = True
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
        except queue.Empty:
            return busy
        if event is not None and not self._ended.is_set():
            self._handle(event)
        return True

    def claim(self) -> None:
        """Become the newest attempt. Storage that is unusable now is a StorageError for whoever joins."""
        try:
            self._storage.self_test()
            dead: list[int] = []

            def entry_after(tail: LogEntry | None) -> LogEntry:
                gone = {tail.attempt} if tail is not None and self._is_dead(tail.writer) else set[int]()
                dead[:] = sorted(gone | set(assumed_dead(self._storage)))
                live = () if tail is None else tuple(step.step for step in tail.live)
                return claim_entry(tail, self._writer, self._settings.run, foreign_steps(self._storage, live), dead=dead)

            entry = self._log.claim(entry_after)
        except (StorageError, CorruptCheckpointError, ConfigError) as error:  # the last two: a log that can't be read
            self._fail_all(Failure(error=type(error).__name__, message=error.message, details=error.details))
            self._on_end(error.message)
            self._ended.set()
            return
        self.attempt = entry.attempt
        logger.info("attempt %d of run %r on %s", entry.attempt, self._settings.run, self._storage.url)
        self.ledger.begin(entry.attempt)
        self._handle(Claimed(entry=entry, hosts=self._known_hosts, dead=tuple(dead)))
        self._workers.clean.submit(self._collect_garbage, entry)
        # Now, while the trainers start, and not at the first save: the import of Orbax and JAX stalls all other threads for moments.
        self._workers.build.submit(load_orbax)

    def _collect_garbage(self, entry: LogEntry) -> None:
        try:
            collect_garbage(self._storage, {s.save for s in entry.live if s.save} | {i.save for i in entry.intents if i.save})
        except StorageError as error:
            logger.warning("left-overs of earlier attempts stay for now: %s", error)

    def _look_for_dead(self) -> None:
        """Somebody may have said meanwhile that the process of an older attempt is gone."""
        try:
            for attempt in assumed_dead(self._storage):
                self.post(AttemptDead(attempt=attempt))
        except StorageError as error:
            logger.debug("attempts assumed dead could not be listed: %s", error)

    def _handle(self, event: Event) -> None:
        now_s = self._clock()
        if self._machine.held_by and now_s >= self._look_s:
            self._look_s = now_s + LOOK_FOR_DEAD_S
            self._workers.build.submit(self._look_for_dead)
        self.ledger.observe(event, now_s)
        for command in self._machine.handle(event, now_s):
            self.ledger.observe(command, now_s)
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Answer(ask=ask, reply=reply):
                with self._asks_lock:
                    future = self._asks.setdefault(ask, Future())
                if not future.done():
                    future.set_result(reply)
            case Advise(host=host, advice=advice):
                self._hosts.advise(host, advice)
            case Invalidate():
                self._hosts.invalidate(command)
            case EndTrainers():
                self._hosts.end_trainers(command)
            case Write(save=save):
                self._parts.setdefault(save, {})
                self._hosts.write(command).add_done_callback(functools.partial(self._on_written, command))
            case BuildPackage():
                self._workers.build.submit(self._build, command)
            case Append(entry=entry):
                self._workers.log.submit(self._append, entry)
            case Publish(step=step, save=save):
                self._workers.build.submit(self._publish, step, save)
            case Retire():
                self._workers.clean.submit(self._retire, command)
            case Discard(step=step, save=save):
                self._parts.pop(save, None)
                self._packages.pop(save, None)
                self._workers.clean.submit(self._discard, step, save)
            case Log(level=level, text=text):
                logger.log(getattr(logging, level.upper()), "%s", text)
            case Finish(reason=reason):
                self._finish(reason)
            case Superseded(by_attempt=by_attempt, reason=reason):
                self._superseded(by_attempt, reason)
            case _:
                assert_never(command)

    # ------------------------------------------------------------ slow commands, on worker threads

    def _on_written(self, command: Write, future: Future[Any]) -> None:
        error = future.exception()
        parts = self._parts.get(command.save)
        if error is None and parts is not None:  # else the save was given up meanwhile
            parts[command.host] = future.result()
        self.post(Written(host=command.host, save=command.save, error=_one_line(error)))

    def _build(self, command: BuildPackage) -> None:
        error = ""
        hopeless = False
        metrics: dict[str, float] = {}
        kept: tuple[int, ...] = ()
        now_s = time.time()
        try:
            parts = [self._parts[command.save][host] for host in command.hosts]
            package = build_package(self._storage, self._settings.run, command.step, command.save, parts)
            folder = StepFolder(self._storage, command.step, command.save)
            folder.assemble(package)
            folder.put_package(package)
            self._packages[command.save] = package
            metrics = min(((rank, t) for p in parts for rank, t in p.tables.items()), key=lambda pair: pair[0])[1].metrics
            new = LiveStep(step=command.step, save=command.save, metrics=dict(metrics), time_s=now_s)
            kept = tuple(self._keep(sorted((*command.live, new), key=lambda one: one.step)))
        except Exception as caught:
            logger.debug("building step %d failed", command.step, exc_info=True)
            hopeless = isinstance(caught, ConfigError)  # values that differ between ranks will differ the next time
            error = str(caught) if hopeless else _one_line(caught)
        self._parts.pop(command.save, None)
        self.post(Packaged(save=command.save, metrics=metrics, time_s=now_s, kept=kept, error=error, hopeless=hopeless))

    def _append(self, entry: LogEntry) -> None:
        entry = dataclasses.replace(entry, writer=self._writer)
        try:
            outcome = self._log.append(entry)
        except Exception as error:
            outcome = Appended(seq=entry.seq, outcome="failed", error=_one_line(error))
        self.post(outcome)

    def _publish(self, step: int, save: str) -> None:
        error = ""
        try:
            folder = StepFolder(self._storage, step, save)
            package = self._packages.get(save) or folder.read_package()
            fault_points.reached("publishing")
            folder.publish(package)
            self._packages.pop(save, None)
        except Exception as caught:
            logger.debug("publishing step %d failed", step, exc_info=True)
            error = _one_line(caught)
        self.post(PublishDone(step=step, save=save, error=error))

    def _retire(self, command: Retire) -> None:
        error = pinned = ""
        try:
            # After the retirement is in the log: whoever pins the step from now on finds it there. A damaged step is only moved.
            pinned = "" if command.aside else pinned_steps(self._storage).get(command.step, "")
            if not pinned:
                StepFolder(self._storage, command.step, command.save).retire(aside=command.aside)
        except Exception as caught:
            error = _one_line(caught)
        self.post(RetireDone(step=command.step, error=error, pinned=pinned))

    def _discard(self, step: int, save: str) -> None:
        try:
            StepFolder(self._storage, step, save).discard()
        except Exception as error:
            logger.warning("left-overs of save %s stay for the next start or gc: %s", save, error)

    # ------------------------------------------------------------ ends

    def _finish(self, reason: str) -> None:
        logger.debug("run %r released: %s", self._settings.run, reason)
        self._ended.set()
        self._workers.shutdown()
        self._hosts.close_all(remove_arena=True)
        self._on_end(reason)

    def _superseded(self, by_attempt: int, reason: str) -> None:
        self._fail_all(
            Failure(
                error=StaleAttemptError.__name__,
                message=f"attempt {self.attempt} of {self._storage.url} was superseded by attempt {by_attempt}: {reason}",
                details={"attempt": self.attempt, "by_attempt": by_attempt},
            )
        )

    def _fail_all(self, failure: Failure) -> None:
        with self._asks_lock:
            self.failed = failure
            waiting = [future for future in self._asks.values() if not future.done()]
        for future in waiting:
            future.set_result(failure)


def _one_line(error: BaseException | None) -> str:
    if error is None:
        return ""
    cause = getattr(error, "cause", None) or error  # Ray wraps the HostActor's exception
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[-1] if text else ''}"
