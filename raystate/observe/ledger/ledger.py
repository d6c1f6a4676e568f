"""The ledger of a run: what died, what came back, from where, and how long it took."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from raystate.core.coordinator.facts import remember
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.messages import Event, HostId, Intent, RestoreSettled, Tick, TrainerExited, group_of
from raystate.core.formats.texts import counted
from raystate.machine.counts import counts
from raystate.machine.own_time import wall_clock
from raystate.machine.priority import WORK_NICENESS, niceness
from raystate.observe.ends import End, Ends, Told, cause_of, first_to_fail, kind_of
from raystate.observe.ledger.happenings import Happenings
from raystate.observe.ledger.lines import Line, LoggedRecovery, LoggedSave, Noted, Noticed, RunLeft, Sampled, line_of
from raystate.observe.ledger.requests import Requests
from raystate.observe.ledger.slow_ranks import SlowLines
from raystate.observe.ledger.troubles import TroubleLines
from raystate.observe.ledger.writer import LedgerWriter
from raystate.observe.running_goodput import RunningGoodput
from raystate.storage import Storage
from raystate.waits import GOODBYE_S

logger = logging.getLogger("raystate.coordinator")

_MOST_NEWS = 1000  # that listeners may ask for; the ledger itself has all
REMEMBERED_GROUPS = 8  # older ones are no news any more
MANY_REPEATED = 5  # steps; of one restart
OF_A_NICE_RAY = "this Ray runs its workers at niceness {}; start it with RAY_worker_niceness=0"


@dataclass(slots=True, kw_only=True)
class _OpenRecovery:
    """A restart that has not led to a new step yet."""

    group: str  # whose end it is
    since_s: float
    newest: int  # the step that had been reached
    restored: RestoreSettled | None = None  # the step to go on from, once that is known
    restored_s: float = 0.0  # when it was


@dataclass(slots=True)
class _Past:
    """What is known of one worker group."""

    newest: int = -1  # newest step seen
    has_joined: bool = False  # False: only its launcher has told of it
    has_begun: bool = False  # its end has begun a recovery
    ends: Ends = field(default_factory=Ends)  # how its trainers ended
    hosts: Mapping[int, HostId] = field(default_factory=dict[int, HostId])  # of its ranks


class Ledger:
    """Looks at what the Coordinator's machine knows: who died first, what came back.

    Attributes:
        lock: for readers on other threads than the Coordinator's, which writes it.
        goodput: of this attempt; for other threads, too.
    """

    def __init__(self, storage: Storage, machine: Coordinator):
        self._writer = LedgerWriter(storage)
        self._machine = machine
        self._happenings = Happenings(machine, self._note, lambda group: self._past(group).ends)
        self._slow = SlowLines(machine, self._note)
        self._troubles = TroubleLines(machine, self._note)
        self._requests = Requests(machine)
        self.lock = threading.RLock()
        self._attempt = -1
        self._pasts: dict[str, _Past] = {}  # by worker group
        self._open: _OpenRecovery | None = None
        self._lines = 0  # of this attempt
        self._restarts = 0  # of this attempt
        self._news: deque[Noted] = deque(maxlen=_MOST_NEWS)
        self.goodput = RunningGoodput()

    def begin(self, attempt: int) -> None:
        self._attempt = attempt
        self._writer.begin(attempt)

    @property
    def restarts(self) -> int | None:
        """Of the trainers, in all attempts; None: those of the earlier ones have not been counted yet."""
        earlier = self._writer.earlier_restarts
        return None if earlier is None else earlier + self._restarts

    # ------------------------------------------------------------ who has ended

    def raised(self, lineage: str, end: End) -> None:
        """A trainer tells its exception, before it tells that it has failed."""
        with self.lock:
            self._joined(group_of(lineage)).ends.add(end)

    def seen(self, group: str, ends: Sequence[End], now_s: float) -> None:
        """The launcher tells how a group ended: it sees what is raised without a StateManager, and groups that never joined."""
        with self.lock:
            past = self._past(group)
            for end in ends:
                past.ends.add(end)
            self._ended(group, now_s)

    def sweeps(self, group: str) -> None:
        """The launcher ends all ranks of a group whose end is not known by now, because others have ended."""
        with self.lock:
            self._past(group).ends.is_swept = True

    def ends(self, group: str) -> Told:
        """How the trainers of a worker group ended, as far as this is known."""
        with self.lock:
            past, present = self._past(group), self._present(group)
            ends = past.ends.in_order
            hanging = frozenset[int]() if present is None else present.hanging - {end.rank for end in ends}
            return Told(ends=ends, has_joined=past.has_joined, hanging=hanging)

    def _past(self, group: str) -> _Past:
        if group not in self._pasts:
            remember(self._pasts, group, _Past(), most=REMEMBERED_GROUPS)
        return self._pasts[group]

    def _joined(self, group: str) -> _Past:
        past = self._past(group)
        past.has_joined = True
        return past

    def _present(self, group: str) -> Group | None:
        present = self._machine.joins.group
        return present if present is not None and present.name == group else None

    def _exited(self, event: TrainerExited) -> None:
        name = group_of(event.lineage)
        past, present = self._joined(name), self._present(name)
        kind = "died"
        if event.hung:
            kind = "hung"
        elif event.ended or (past.ends.is_swept and event.rank not in past.ends):
            kind = "interrupted" if present is not None and present.announced else "ended"
        past.ends.add(End(rank=event.rank, kind=kind, reason=event.reason, traceback=event.stack))

    # ------------------------------------------------------------ what came back

    def look(self, event: Event, now_s: float) -> None:
        """The machine has taken an event."""
        joins = self._machine.joins
        with self.lock:
            if isinstance(event, TrainerExited) and not event.clean:
                self._exited(event)
            self._requests.look(event)
            if joins.ended and self._machine.leaving.phase == "open":  # trainers that left for good have no successors
                self._ended(next(reversed(joins.ended)), now_s)
            if joins.group is not None and joins.group.alive:
                self._goes_on(joins.group, now_s)
            self._happenings.look(event, now_s)
            self._troubles.look()
            if isinstance(event, Tick):
                self._slow.look()

    def _ended(self, group: str, now_s: float) -> None:
        """A recovery begins. If a restart had led to this group, it has failed, and the next one counts from here."""
        past, before = self._pasts.get(group), self._open
        if past is None or past.has_begun or (before is None and not past.has_joined):
            return  # the last: the first start has failed, and no group of this run has ended
        past.has_begun = True
        since_s, newest = self._machine.joins.gone_s.get(group, now_s), past.newest
        if before is not None:
            newest = max(newest, before.newest)  # none of these steps has been done again
            self._closed(before, group, since_s, back=False)
        self._open = _OpenRecovery(group=group, since_s=since_s, newest=newest)

    def _goes_on(self, group: Group, now_s: float) -> None:
        """A recovery ends with the first new step of the next worker group."""
        past, before, restored = self._joined(group.name), self._open, group.restored
        past.newest = max(past.newest, group.newest)
        past.hosts = group.hosts
        if before is None or past.has_begun:
            return
        if before.restored != restored:
            before.restored, before.restored_s = restored, now_s
        if restored is None:
            return
        if group.newest > restored.step:
            self._closed(before, group.name, now_s, back=True)
            self._open = None
        elif self._machine.leaving.have_all_closed:  # nothing was left to do
            self._closed(replace(before, newest=restored.step), group.name, before.restored_s, back=True)
            self._open = None

    def _closed(self, ended: _OpenRecovery, group: str, now_s: float, *, back: bool) -> None:
        past, restored = self._pasts.get(ended.group), ended.restored
        step = -1 if restored is None else max(0, restored.step)  # none is restored where the run had none: 0 are completed
        recovery = LoggedRecovery(
            attempt=self._attempt,
            group=group,
            cause="" if past is None else cause_of(past.ends.in_order, is_all=not past.has_joined),
            step=step,
            tier="" if restored is None else restored.tier,
            seconds=round(max(0.0, now_s - ended.since_s), 3),
            steps_repeated=max(0, ended.newest - step) if back else 0,
            back=back,
        )
        self._restarts += 1
        counts.add(f"recoveries/{self._kind(past)}/{recovery.tier or 'none'}")
        if back:
            logger.info(
                "%s; step %d from %s, %s repeated, %.1f s",
                recovery.cause or "started again", recovery.step, recovery.tier, counted(recovery.steps_repeated, "step"),
                recovery.seconds,
            )  # fmt: skip
            if recovery.steps_repeated >= MANY_REPEATED and niceness() >= WORK_NICENESS:
                logger.info("steps are repeated where other programs fill the cores: %s", OF_A_NICE_RAY.format(niceness()))
        else:
            logger.info("%s; the next group ended before a new step, after %.1f s", recovery.cause, recovery.seconds)
        self._note(recovery)

    def _kind(self, past: _Past | None) -> str:
        """The cause of a group's end, in one word of a few: its metric has a row for each."""
        if past is None:
            return "unknown"
        ends, is_all = past.ends.in_order, not past.has_joined
        first = first_to_fail(ends, is_all=is_all)
        host = None if first is None else past.hosts.get(first.rank)
        view = None if host is None else self._machine.memory.hosts.get(host)
        return "host" if view is not None and not view.up else kind_of(ends, is_all=is_all)

    def saved(self, intent: Intent, since_s: float | None, now_s: float) -> None:
        """A step is durable, whose save was under way since then. Of an earlier attempt's save it isn't known when it began."""
        if since_s is None or intent.save is None or intent.attempt != self._attempt:
            return
        with self.lock:
            counts.took("durable_seconds", now_s - since_s)
            written_s, nbytes = self._happenings.written(intent.save)
            self._note(
                LoggedSave(
                    attempt=self._attempt,
                    step=intent.step,
                    save=intent.save,
                    seconds=round(now_s - since_s, 3),
                    writing_s=0.0 if written_s is None else max(0.0, written_s - since_s),
                    nbytes=nbytes,
                )
            )

    def _note(self, what: Line) -> None:
        if isinstance(what, Sampled | RunLeft):
            what = replace(what, requests=self._requests.sums())
        self._lines += 1
        noted = Noted(self._attempt, self._lines, wall_clock(), what)
        self._writer.note(line_of(noted))
        self.goodput.note(noted)
        if isinstance(what, LoggedSave | LoggedRecovery | Noticed):
            self._news.append(noted)

    def news(self, after: tuple[int, int]) -> tuple[Noted, ...]:
        """Durable steps, restarts and notices of this attempt, with a place after this (attempt, number). For other threads."""
        with self.lock:
            return tuple(one for one in self._news if (one.attempt, one.n) > after)

    def close(self, timeout_s: float = GOODBYE_S) -> None:
        """Wait a moment for what is being written: the process ends now."""
        self._writer.close(timeout_s)
