"""The ledger of a run: what died, what came back, from where, and how long it took."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from raystate.core.coordinator.facts import remember
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import Event, Intent, RestoreSettled, TrainerExited, group_of
from raystate.core.formats.texts import counted
from raystate.machine.priority import WORK_NICENESS, niceness
from raystate.machine.threads import map_in_threads
from raystate.observe.ends import End, Ends, Told, cause_of
from raystate.storage import Storage
from raystate.waits import GOODBYE_S

logger = logging.getLogger("raystate.coordinator")

EVENTS = ".raystate/events"
REMEMBERED_GROUPS = 8  # older ones are no news any more
MANY_REPEATED = 5  # steps; of one restart
OF_A_NICE_RAY = "this Ray runs its workers at niceness {}; start it with RAY_worker_niceness=0"
_READERS = 16  # objects at a time
_SAVE = "save-"  # in the names of what is noted of saves
_TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRecovery:
    """One restart of the trainers. `seconds`: from the news of the end that led to it to the first new step, to the restore if no step
    was left to do, or to its own end."""

    attempt: int
    group: str  # the start of the worker group that it led to
    cause: str
    step: int  # the step it went on from; -1: it ended before that was settled
    tier: str  # "memory", "peer", "storage", …; "": as with the step
    seconds: float
    steps_repeated: int
    back: bool = True  # False: its trainers ended before they had made a new step


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSave:
    """One durable save. `seconds`: from the first order to write it to its publication."""

    attempt: int
    step: int
    save: str
    seconds: float


_Noted = TypeVar("_Noted", LoggedRecovery, LoggedSave)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerContent:
    """What was found of a run's ledger.

    Attributes:
        recoveries: (when its first new step was there, or when it ended, wall clock; the recovery), oldest first.
        saves: by save id.
        damaged: names of what can't be read.
    """

    recoveries: tuple[tuple[float, LoggedRecovery], ...] = ()
    saves: Mapping[str, LoggedSave] = field(default_factory=dict[str, LoggedSave])
    damaged: tuple[str, ...] = ()


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


class Ledger:
    """Looks at what the Coordinator's machine knows: who died first, what came back.

    Attributes:
        lock: for readers on other threads than the Coordinator's, which writes it.
    """

    def __init__(self, storage: Storage, machine: Coordinator):
        self._storage = storage
        self._machine = machine
        self.lock = threading.RLock()
        self._attempt = -1
        self._pasts: dict[str, _Past] = {}  # by worker group
        self._open: _OpenRecovery | None = None
        self._writing: list[threading.Thread] = []
        self.recoveries: list[LoggedRecovery] = []

    def begin(self, attempt: int) -> None:
        self._attempt = attempt

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
            if joins.ended and self._machine.leaving.phase == "open":  # trainers that left for good have no successors
                self._ended(next(reversed(joins.ended)), now_s)
            if joins.group is not None and joins.group.alive:
                self._goes_on(joins.group, now_s)

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
        self.recoveries.append(recovery)
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
        self._note("recovery", f"{len(self.recoveries):04d}", recovery)

    def saved(self, intent: Intent, since_s: float | None, now_s: float) -> None:
        """A step is durable, whose save was under way since then. Of an earlier attempt's save it isn't known when it began."""
        if since_s is not None and intent.attempt == self._attempt:
            one = LoggedSave(attempt=self._attempt, step=intent.step, save=str(intent.save), seconds=round(now_s - since_s, 3))
            self._note("save", f"{_SAVE}{intent.save}", one)

    def _note(self, kind: str, name: str, what: LoggedRecovery | LoggedSave) -> None:
        """On a thread of its own: a slow storage must not delay the Coordinator, and no call waits
        for a report."""
        data = json.dumps({"kind": kind, "time_s": time.time(), **dataclasses.asdict(what)}).encode()
        arguments = (f"{EVENTS}/{self._attempt:06d}-{name}.json", data)
        thread = threading.Thread(target=self._write, args=arguments, name="raystate-ledger", daemon=True)
        self._writing = [*(one for one in self._writing if one.is_alive()), thread]
        thread.start()

    def close(self) -> None:
        """Wait a moment for what is being written: the process ends now."""
        deadline_s = time.monotonic() + GOODBYE_S
        for thread in self._writing:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _write(self, name: str, data: bytes) -> None:
        try:
            self._storage.create(name, data)
        except RaystateError as error:
            logger.warning("the ledger could not be written: %s", error)


def read_ledger(storage: Storage, *, saves: bool = True) -> LedgerContent:
    """All that the ledger of a run holds; without the saves, of which there may be many, unless
    `saves`."""
    names = sorted(info.name for info in storage.list(EVENTS) if saves or f"-{_SAVE}" not in info.name)
    recoveries: list[tuple[float, LoggedRecovery]] = []
    found: dict[str, LoggedSave] = {}
    damaged: list[str] = []
    read = map_in_threads(storage.read, names, threads=_READERS, name="raystate-ledger")
    for name, data in zip(names, read, strict=True):
        try:
            raw = json.loads(data)
            if raw["kind"] == "recovery":
                recoveries.append((_finite(raw["time_s"]), _made(LoggedRecovery, raw)))
            elif raw["kind"] == "save":
                save = _made(LoggedSave, raw)
                found[save.save] = save
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            logger.warning("%s can't be read and is left out: %s", name, error)
            damaged.append(name)
    return LedgerContent(recoveries=tuple(recoveries), saves=found, damaged=tuple(damaged))


def _made(kind: type[_Noted], raw: Mapping[str, Any]) -> _Noted:
    """Raises KeyError, ValueError, OverflowError: it is not what was written."""
    fields = dataclasses.fields(kind)
    made = kind(**{one.name: raw[one.name] for one in fields})
    for one in fields:
        value, wanted = getattr(made, one.name), _TYPES[str(one.type)]
        if not isinstance(value, wanted) or isinstance(value, bool) != (one.type == "bool"):
            raise ValueError(f"{one.name} is no {one.type}")
        if one.type == "float":
            _finite(value)
    return made


def _finite(value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no number of seconds")
    return number
