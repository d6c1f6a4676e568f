"""The Coordinator without Ray: feeds its machine with events, and carries out what it asks for.

One thread owns the machine. Slow commands run on worker threads and come back as events. Nothing here decides.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, assert_never

from raystate.core.coordinator.machine import Coordinator
from raystate.core.coordinator.retention import Keep
from raystate.core.formats.errors import StaleAttemptError
from raystate.core.formats.messages import (
    Answer,
    Append,
    BuildPackage,
    CarryOut,
    Claimed,
    Command,
    Discard,
    Event,
    Failure,
    Finish,
    GivenUp,
    HostDown,
    HostId,
    HostOrder,
    Joined,
    Log,
    Reply,
    Settings,
    Tick,
    Write,
)
from raystate.machine.counts import counts
from raystate.machine.own_time import own_time, wall_clock
from raystate.observe.ledger.ledger import Ledger
from raystate.observe.observers import Observers
from raystate.observe.progress import Going
from raystate.observe.record import Recorder
from raystate.observe.status import RunStatus
from raystate.runtime.asks import Asks, Look, Looks
from raystate.runtime.coordinator.claiming import Claiming
from raystate.runtime.coordinator.one_storage import Claim
from raystate.runtime.coordinator.packaging import OrbaxPackager, Packager
from raystate.runtime.coordinator.storing import Storing, Workers
from raystate.storage import Storage
from raystate.waits import AGAIN_S, ANSWER_S, AT_ONCE_S, CRASHED_AGAIN_S

logger = logging.getLogger("raystate.coordinator")


class Hosts(Protocol):
    """How the loop reaches the HostActors. All calls return at once."""

    def ensure(self, host: HostId, on_error: Callable[[str], None]) -> None: ...
    def order(self, order: HostOrder) -> None: ...
    def write(self, order: Write) -> Future[Any]: ...
    def close_empty(self) -> None: ...
    def close_all(self, *, remove_arena: bool) -> None: ...


class CoordinatorLoop:
    """Carries out what one Coordinator decides.

    Args:
        settings: what the decisions depend on.
        keep: the retention policy; called by a worker, since it may be slow or a user's.
        storage: where the run's log and steps are.
        hosts, known_hosts: the HostActors, and those that exist already.
        writer: random id of this process, for the log.
        is_dead: tells whether the process behind a log writer id is known to be dead.
        on_end: called once from the loop's thread when the run is released, can't be claimed, was taken by another cluster, or the loop
            has failed for good.
        on_crash: called instead when it has failed, which a new attempt may mend: it begins with what storage and the hosts say; or when
            this run's next Coordinator is there already, and has the trainers and the hosts.
        known_attempt: an attempt of this run that has claimed on this cluster: a log without it is not the run's. 0: none is known.
        on_claim: called with the attempt when the run is claimed.
        run_metadata: see `Storing`.
        restarted: it follows a Coordinator that was killed: while storage is out, trainers go on,
            and are kept waiting.
        workers: who carries out the slow commands; None: threads of its own.
        packager: makes a step's package of what the hosts have written.
        recorder: writes down each event and what it led to; None: no record is kept.
        clock: monotonic seconds.
        wall_clock: seconds since 1970: when a step was saved.

    Attributes:
        machine: decides; to look at.
        observers: what is written down of it.
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
        on_crash: Callable[[], None] | None = None,
        known_attempt: int = 0,
        on_claim: Callable[[int], object] = lambda _: None,
        restarted: bool = False,
        run_metadata: Mapping[str, Any] | None = None,
        workers: Workers | None = None,
        packager: Packager | None = None,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = own_time,
        wall_clock: Callable[[], float] = wall_clock,
    ):
        self._settings = settings
        self._clock = clock
        self._known_hosts = known_hosts
        self._storage = storage
        self._hosts = hosts
        self.machine = Coordinator(settings)
        self._on_end = on_end
        self._on_crash = on_crash
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._looks = Looks()
        self._asks = Asks()
        self._workers = workers or Workers.threads()
        self._storing = Storing(
            run=settings.run,
            storage=storage,
            writer=writer,
            keep=keep,
            packager=packager or OrbaxPackager(),
            workers=self._workers,
            post=lambda event: self.post(event),
            wall_clock=wall_clock,
            run_metadata=run_metadata,
        )
        self._ended = threading.Event()
        self._next_tick_s = float("-inf")
        self._claiming = Claiming(self._storing, is_dead, known_attempt, on_claim, clock, restarted=restarted)
        self.observers = Observers(storage, self.machine, recorder)

    def start(self) -> None:
        """Claim the run and go on, on a thread."""
        threading.Thread(target=self._run, name="raystate-coordinator", daemon=True).start()

    @property
    def attempt(self) -> int:
        """Which attempt this is; -1 before the claim."""
        return self._claiming.attempt

    @property
    def claimed(self) -> Claim | None:
        """What it has written to storage first; None before the claim."""
        return self._claiming.claimed

    @property
    def ledger(self) -> Ledger:
        """What outlives the run."""
        return self.observers.ledger

    @property
    def failed(self) -> Failure | None:
        """What everybody who asks is told: this attempt can't go on."""
        return self._asks.failed

    @property
    def ended(self) -> bool:
        """The run is released, or this attempt is over."""
        return self._ended.is_set()

    # ------------------------------------------------------------ from other threads

    def post(self, event: Event) -> None:
        self._events.put(event)

    def ask(self, event: Any) -> Future[Reply]:
        """Post an event that is answered; the same ask posted twice gets the same answer."""
        future = self._asks.future(event.ask)
        if isinstance(event, Joined) and self.failed is None:
            self._hosts.ensure(event.host, functools.partial(self._host_failed, event.host))
        self.post(event)
        return future

    def expect(self, host: HostId) -> None:
        """A trainer is about to start there: its HostActor starts meanwhile. Should that fail, the trainer's own start says why."""
        self._hosts.ensure(host, lambda reason: logger.debug("no HostActor yet on host %s: %s", host[:8], reason))

    def look(self, view: Callable[[Coordinator, float], Look]) -> Future[Look]:
        """What `view(machine, now_s)` finds, between two events. It must change nothing. Before the claim and after the end, too."""
        found = self._looks.ask(lambda: view(self.machine, self._clock()))
        if self._ended.is_set():  # nothing moves any more, and no turn comes
            self._looks.answer_all()
        return found

    def told(self) -> Future[tuple[RunStatus, tuple[Going, ...]]]:
        """The run as it is now, without its goodput; and the saves and restores under way."""
        return self.look(lambda _, now_s: (self.observers.status(now_s), self.observers.going(now_s)))

    def status_to_export(self) -> RunStatus:
        """With its goodput, for a thread that may wait and compute. TimeoutError: the machine's thread does not answer."""
        status, _ = self.told().result(ANSWER_S)
        return self.observers.with_goodput(status)

    def _host_failed(self, host: HostId, reason: str) -> None:
        # A HostActor is restarted for ever while its node lives: one that can't be made has lost its node.
        self.post(HostDown(host=host, reason=reason))

    # ------------------------------------------------------------ the machine's thread

    def _run(self) -> None:
        began_s = self._clock()
        try:
            while not self._ended.is_set():
                self.turn(AGAIN_S)
        except Exception as error:
            logger.exception("the coordinator stopped")
            again_at_once = self._claiming.restarted and self._clock() - began_s < CRASHED_AGAIN_S
            if self._on_crash is not None and not again_at_once:
                self._crash(self._on_crash)
                return
            text = f"the coordinator of run {self._settings.run!r} stopped: {error}"
            self._ended.set()
            self._asks.fail_all(Failure(error="RaystateError", message=text))
            self._end(f"stopped: {error}")
        finally:
            self._looks.answer_all()  # of those who asked before they could know that it has ended

    def turn(self, timeout_s: float = 0.0) -> bool:
        """Handle the next event, if one comes within `timeout_s`; and a Tick when it is time, however many events there are.

        The first thing to do is to claim the run: until then events wait.

        Returns:
            False: there was nothing to do.
        """
        self._looks.answer_all()
        if self._ended.is_set():
            return False
        if self.attempt < 0:
            return self._claim_or_rest(timeout_s)
        if busy := self._clock() >= self._next_tick_s:
            self._handle(Tick(storage_error=counts.storage_error))
            self._next_tick_s = self._clock() + AGAIN_S  # from its end: else slow ones would leave no time for events
        try:
            event = self._events.get(timeout=timeout_s) if timeout_s else self._events.get_nowait()
        except queue.Empty:
            return busy
        if event is not None and not self._ended.is_set():
            self._handle(event, more=not self._events.empty())
        return True

    def _claim_or_rest(self, timeout_s: float) -> bool:
        if self._claiming.is_due:
            self.claim()
            return True
        time.sleep(timeout_s)
        return False

    def claim(self) -> None:
        """Become the newest attempt. If storage can't be used now, joining trainers get a
        StorageError, or it is tried again."""
        outcome = self._claiming.claim()
        if isinstance(outcome, Failure):
            self._refuse(outcome)
        if outcome is None or isinstance(outcome, Failure):
            return
        entry, dead = outcome
        logger.debug("attempt %d on %s", entry.attempt, self._storage.url)
        self.observers.begin(entry.attempt, self._clock())
        if self._claiming.restarted:
            counts.add("recoveries/coordinator/kept")
        self._handle(Claimed(entry=entry, hosts=self._known_hosts, dead=dead))
        self._storing.prepare(entry)

    def _handle(self, event: Event, *, more: bool = False) -> None:
        now_s = self._clock()
        if self.machine.held_by:
            self._claiming.look_for_dead()
        commands: Sequence[Command] = ()
        try:
            commands = self.machine.handle(event, now_s, more=more)
        finally:  # an event that the machine could not take is the one that is looked for
            self.observers.record(event, commands, now_s, more=more)
        self.observers.look(event, now_s)
        for command in commands:
            self._execute(command)

    def _execute(self, command: Command) -> None:
        match command:
            case Answer(ask=ask, reply=reply):
                self._asks.answer(ask, reply)
            case HostOrder():
                self._hosts.order(command)
            case Write():
                self._storing.await_part(command, self._hosts.write(command))
            case BuildPackage() | Append() | CarryOut() | Discard():
                self._storing.carry_out(command)
            case Log(level=level, text=text, is_routine=is_routine):
                logger.log(getattr(logging, level.upper()), "%s", text, extra={"is_routine": is_routine})
            case Finish(by_attempt=None, reason=reason):
                self._finish(reason)
            case Finish():
                self._superseded(command)
            case _:
                assert_never(command)

    # ------------------------------------------------------------ ends

    def _finish(self, reason: str) -> None:
        logger.debug("run %r released: %s", self._settings.run, reason)
        self._ended.set()
        self._hosts.close_all(remove_arena=True)  # first: slow storage does not need them
        self._workers.shutdown()
        self.ledger.close()  # before what may take long: a releaser that waits too long kills this
        self._storing.end(may_be_older=bool(self._known_hosts))
        self._claiming.take_back()
        self._end(reason)

    def _end(self, reason: str) -> None:
        self.observers.close()
        self._on_end(reason)

    def _superseded(self, end: Finish) -> None:
        if not end.by_stranger and self._on_crash is not None:
            self._crash(self._on_crash)
            return
        self._stop_use(f"{self._storage.url}: {end.reason}", by_attempt=end.by_attempt, hosts_end=end.by_stranger)

    def why_log_is_gone(self) -> str:
        """Why the run has no log any more, "" if it has, or if storage doesn't say. For other threads; it asks storage."""
        return self._claiming.why_log_is_gone()

    def refuse(self, failure: Failure) -> None:
        """End before anything is trained. For other threads."""
        self._looks.put(lambda: self._ended.is_set() or self._refuse(failure))

    def _refuse(self, failure: Failure) -> None:
        self._ended.set()
        self._asks.fail_all(failure)
        # Made for the refused trainers; others may hold steps that the next attempt needs.
        self._hosts.close_empty()
        self._claiming.take_back()
        self.ledger.close(AT_ONCE_S)
        self._end(failure.message)

    def give_up(self, reason: str) -> None:
        """End, the hosts with what they hold, and each trainer at its next save. For other threads."""
        self._looks.put(lambda: self._ended.is_set() or self._handle(GivenUp(reason=reason)))

    def _stop_use(self, text: str, *, hosts_end: bool, **details: Any) -> None:
        self._ended.set()
        self._asks.fail_all(Failure(error=StaleAttemptError.__name__, message=text, details={"attempt": self.attempt} | details))
        if hosts_end:
            self._hosts.close_all(remove_arena=True)
        self.ledger.close(AT_ONCE_S)
        self._end(text)

    def _crash(self, on_crash: Callable[[], None]) -> None:
        self._ended.set()
        self.ledger.close(AT_ONCE_S)
        self.observers.close(timeout_s=1.0)  # the record of the crash is written first
        on_crash()
