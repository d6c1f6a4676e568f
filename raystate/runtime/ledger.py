"""The ledger of a run: what died, what came back, from where, and how long it took."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from raystate.core.coordinator.context import remember
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import (
    Answer,
    EndTrainers,
    HostReported,
    Intent,
    JoinReply,
    RestoreSettled,
    TrainerExited,
    group_of,
    lineage_order,
)
from raystate.core.formats.texts import counted
from raystate.in_threads import map_in_threads
from raystate.runtime.ends import End, Ends, Told, cause_of
from raystate.storage import Storage
from raystate.waits import GOODBYE_S

logger = logging.getLogger("raystate.coordinator")

EVENTS = ".raystate/events"
REMEMBERED_GROUPS = 8  # older ones are no news any more
_READERS = 16  # objects at a time
_SAVE = "save-"  # in the names of what is noted of saves
_TYPES = {"int": int, "float": (int, float), "str": str, "bool": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRecovery:
    """One restart of the trainers. `seconds`: from the news of the end that led to it to the first new step, or to its own end."""

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

    lineage: str  # of the trainers that ended
    group: str  # whose end it is: theirs, or that of a group after them which never joined
    since_s: float
    newest: int  # the step that had been reached
    step: int = -1
    tier: str = ""
    settled: bool = False  # whether the step to go on from is known


@dataclass(slots=True)
class _Past:
    """What is known of one worker group."""

    newest: int = -1  # newest step seen
    has_joined: bool = True  # False: only its launcher has told of it
    has_died: bool = False
    has_begun: bool = False  # its end has begun a recovery
    is_announced: bool = False  # it was ended because a node goes away
    hanging: frozenset[int] = frozenset()  # ranks that hosts were asked to end because they hang
    ends: Ends = field(default_factory=Ends)  # how its trainers ended


class Ledger:
    """Watches the events and commands that pass through the Coordinator: who died first, what came back.

    Attributes:
        lock: for readers on other threads than the Coordinator's, which writes it.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self.lock = threading.RLock()
        self._attempt = -1
        self._pasts: dict[str, _Past] = {}  # by worker group
        self._left: tuple[str, float] | None = None  # the lineage of trainers that left on purpose, and when the first did
        self._open: _OpenRecovery | None = None
        self._writing: list[threading.Thread] = []
        self.recoveries: list[LoggedRecovery] = []

    def begin(self, attempt: int) -> None:
        self._attempt = attempt

    def raised(self, lineage: str, end: End) -> None:
        """A trainer tells its exception, before it tells that it has failed."""
        with self.lock:
            self._past(lineage).ends.add(end)

    def seen(self, group: str, ends: Sequence[End], now_s: float) -> None:
        """The launcher tells how a group ended: it sees what is raised without a StateManager, and groups that never joined."""
        with self.lock:
            if group not in self._pasts:
                remember(self._pasts, group, _Past(has_joined=False), most=REMEMBERED_GROUPS)
                self._stranger_ended(group, now_s)
            for end in ends:
                self._pasts[group].ends.add(end)

    def sweeps(self, group: str) -> None:
        """The launcher ends all ranks of a group whose end is not known by now, because others have ended."""
        with self.lock:
            self._pasts[group].ends.is_swept = True

    def ends(self, group: str) -> Told:
        """How the trainers of a worker group ended, as far as this is known."""
        with self.lock:
            past = self._pasts[group]
            ends = past.ends.in_order
            return Told(ends=ends, has_joined=past.has_joined, hanging=past.hanging - {end.rank for end in ends})

    def _past(self, lineage: str) -> _Past:
        group = group_of(lineage)
        if group not in self._pasts:
            remember(self._pasts, group, _Past(), most=REMEMBERED_GROUPS)
        self._pasts[group].has_joined = True
        return self._pasts[group]

    def _cause(self, ended: _OpenRecovery) -> str:
        past = self._pasts.get(ended.group)
        return "" if past is None else cause_of(past.ends.in_order, is_all=not past.has_joined)

    def observe(self, message: Any, now_s: float) -> None:
        with self.lock:
            self._observe(message, now_s)

    def _observe(self, message: Any, now_s: float) -> None:
        if isinstance(message, TrainerExited) and not message.clean:
            past = self._past(message.lineage)
            ended = message.ended or (past.ends.is_swept and message.rank not in past.ends)
            kind = "hung" if message.hung else "died" if not ended else "interrupted" if past.is_announced else "ended"
            self.raised(message.lineage, End(rank=message.rank, kind=kind, reason=message.reason, traceback=message.stack))
        match message:
            case TrainerExited(lineage=lineage, clean=False) if not self._past(lineage).has_died:
                self._begin_recovery(lineage, now_s)
            case TrainerExited(lineage=lineage) if self._left is None or group_of(self._left[0]) != group_of(lineage):
                self._past(lineage)
                self._left = (lineage, now_s)
            case EndTrainers(lineage=lineage, announced=announced, hanging=hanging):
                past = self._past(lineage)
                past.has_died = True
                past.hanging |= set(hanging)
                past.is_announced |= announced
            case Answer(reply=JoinReply(lineage=lineage)):
                self._past(lineage)
                if self._left is not None and group_of(self._left[0]) != group_of(lineage):
                    self._begin_left()
            case Answer(reply=RestoreSettled(step=step, tier=tier)) if self._open is not None:
                self._open.step, self._open.tier, self._open.settled = step, tier, True
            case HostReported(summary=summary):
                for trainer in summary.trainers:
                    past = self._past(trainer.lineage)
                    past.newest = max(past.newest, trainer.newest_step)
                    self._close(trainer.lineage, trainer.newest_step, now_s)
            case _:
                pass

    def saved(self, intent: Intent, since_s: float | None, now_s: float) -> None:
        """A step is durable, whose save was under way since then. Of an earlier attempt's save it isn't known when it began."""
        if since_s is not None and intent.attempt == self._attempt:
            one = LoggedSave(attempt=self._attempt, step=intent.step, save=str(intent.save), seconds=round(now_s - since_s, 3))
            self._note("save", f"{_SAVE}{intent.save}", one)

    def _begin_left(self) -> None:
        """They left because the training had to end, else the run would have been released: another group goes on with it."""
        if self._left is not None:
            self._begin_recovery(*self._left)
            self._left = None

    def _begin_recovery(self, lineage: str, since_s: float) -> None:
        """These trainers have ended. If a restart had led to them, it has failed, and the next one counts from here."""
        past = self._past(lineage)
        if past.has_begun:
            return
        past.has_begun = past.has_died = True
        group, newest = group_of(lineage), past.newest
        if (before := self._open) is not None:
            if group == before.group or lineage_order(lineage) < lineage_order(before.lineage):
                return  # late news of those that are known to have ended, or of those before them
            newest = max(newest, before.newest)  # none of these steps has been done again
            self._closed(before, group, since_s, back=False)
        self._open = _OpenRecovery(lineage=lineage, group=group, since_s=since_s, newest=newest)

    def _stranger_ended(self, group: str, now_s: float) -> None:
        """A group has ended that never joined."""
        self._begin_left()
        before = self._open
        if before is None:
            return
        self._closed(before, group, now_s, back=False)
        self._open = _OpenRecovery(lineage=before.lineage, group=group, since_s=now_s, newest=before.newest)

    def _close(self, lineage: str, newest_step: int, now_s: float) -> None:
        """A recovery ends with the first new step of a living worker group, which is a newer one."""
        past, before = self._past(lineage), self._open
        if before is None or not before.settled or past.has_died or newest_step <= before.step:
            return
        if lineage_order(lineage) < lineage_order(before.lineage):
            return
        self._closed(before, group_of(lineage), now_s, back=True)
        self._open = None

    def _closed(self, ended: _OpenRecovery, group: str, now_s: float, *, back: bool) -> None:
        recovery = LoggedRecovery(
            attempt=self._attempt,
            group=group,
            cause=self._cause(ended),
            step=ended.step,
            tier=ended.tier,
            seconds=round(max(0.0, now_s - ended.since_s), 3),
            steps_repeated=max(0, ended.newest - ended.step) if back else 0,
            back=back,
        )
        self.recoveries.append(recovery)
        if back:
            logger.info(
                "%s; step %d from %s, %s repeated, %.1f s",
                recovery.cause or "started again", recovery.step, recovery.tier, counted(recovery.steps_repeated, "step"),
                recovery.seconds,
            )  # fmt: skip
        else:
            logger.info("%s; the next group ended before a new step, after %.1f s", recovery.cause, recovery.seconds)
        self._note("recovery", f"{len(self.recoveries):04d}", recovery)

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
