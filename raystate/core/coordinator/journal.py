"""The log as one attempt writes it: one entry at a time, and every open intent carried out.

An append that failed says nothing about the entry: it may be there. So the same entry is tried
again until the answer is known, and what it decided is neither abandoned nor discarded in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from raystate.core.coordinator.context import Context, retry_delay_s
from raystate.core.coordinator.facts import Facts
from raystate.core.formats import log
from raystate.core.formats.commands import Append, CarryOut, Command, Finish
from raystate.core.formats.entries import Intent, LiveStep, LogEntry
from raystate.core.formats.events import Appended, AttemptDead, CarriedOut, Claimed
from raystate.core.formats.log import IntentKey, key_of
from raystate.core.formats.names import SnapshotId, cluster_of
from raystate.waits import LOG_CLOSED_S

Retirement = tuple[int, str]
"""A step that goes, and why."""

Change = tuple[LiveStep | None, list[Retirement]]
"""The step to commit, and the steps to retire."""

STILL, SLOW = "it stands still", "it is too slow"
Kind = Literal["commit", "retention", "rollback", "set aside", "delete", "close"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An entry that somebody wants.

    Attributes:
        kind: whose it is, and what it does.
        why: for the entry and the log.
        snapshot: commit: what becomes durable.
        retires: steps that are to go.
    """

    kind: Kind
    why: str
    snapshot: SnapshotId | None = None
    retires: tuple[Retirement, ...] = ()


class Editor(Protocol):
    """A part of the Coordinator that asks for entries, and decides late what they change."""

    def change(self, request: Request) -> Change | None:
        """What the entry changes, when its turn has come; None: it is not wanted any more."""
        ...

    def logged(self, request: Request, entry: LogEntry | None, refused: str = "") -> None:
        """The entry is in the log; None: `change` gave None, or what it commits is gone from storage (`refused`)."""
        ...


@dataclass(slots=True, eq=False, kw_only=True)
class _Work:
    """The shell is told to do it until it has done it."""

    busy: bool = False  # it has been told, and has not said how it went
    tries: int = 0
    next_s: float = 0.0  # not tried again before

    def order(self, context: Context, command: Command) -> None:
        """Tell the shell, if it is time."""
        if not self.busy and context.now_s >= self.next_s:
            self.busy = True
            context.out.append(command)

    def failed(self, now_s: float) -> None:
        self.busy, self.tries = False, self.tries + 1
        self.next_s = now_s + retry_delay_s(self.tries)


@dataclass(slots=True, eq=False, kw_only=True)
class _Carried(_Work):
    """An intent that is being carried out."""

    intent: Intent


@dataclass(slots=True, eq=False, kw_only=True)
class _Flight(_Work):
    """An entry that is being written, and who wants it."""

    entry: LogEntry
    request: Request


class Journal:
    """What this attempt has written to the log, has still to write, and has to carry out."""

    def __init__(self, context: Context):
        self.context = context
        self.tail: LogEntry | None = None
        self.writer = ""
        self.dead: set[int] = set()
        self.carried: set[IntentKey] = set()
        self.published: tuple[int, ...] = ()
        self.live: dict[int, LiveStep] = {}  # by step, ascending
        self.facts = Facts()
        self.troubles: list[str] = []  # failures of storage and steps that were lost since the last published step, newest last
        self.fails = False  # storage has failed or stood still since then; a step is also lost where it is only slow
        self.cause = ""  # the newest failure of storage since then
        self.changed_s = 0.0  # when an entry was last written, or something carried out
        self.superseded: Finish | None = None
        self._work: dict[IntentKey, _Carried] = {}
        self.editors: Mapping[Kind, Editor] = {}
        self._requests: deque[Request] = deque()
        self._stays: set[int] = set()  # steps of which people have been told that they can't be retired yet
        self._flight: _Flight | None = None

    # ---------------------------------------------------------------- state

    @property
    def durable_step(self) -> int:
        """Newest published step, -1: none."""
        return self.published[-1] if self.published else -1

    @property
    def newest(self) -> int:
        """Newest committed step, -1: none."""
        return next(reversed(self.live), -1)

    @property
    def busy(self) -> bool:
        """Whether an entry is being written or waits to be."""
        return self._flight is not None or bool(self._requests)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """Entries that are wanted and not begun."""
        return tuple(self._requests)

    @property
    def commits(self) -> tuple[Intent, ...]:
        """Those of steps that are not visible yet."""
        return tuple(one.intent for one in self._work.values() if one.intent.kind == "commit")

    @property
    def publishing(self) -> tuple[int, ...]:
        """Committed steps that are not visible yet."""
        return tuple(one.step for one in self.commits)

    @property
    def retiring(self) -> tuple[int, ...]:
        """Steps whose retirement is decided and not carried out yet."""
        return tuple(one.intent.step for one in self._work.values() if one.intent.kind == "retire")

    @property
    def working(self) -> bool:
        """Whether something is being carried out."""
        return bool(self._work)

    @property
    def held_by(self) -> frozenset[int]:
        """Older attempts that may still carry out an open intent."""
        intents = self.tail.intents if self.tail is not None else ()
        mine = self.context.attempt
        return frozenset(late for one in intents for late in log.carriers(one, self.dead) if late != mine)

    @property
    def closable(self) -> bool:
        """Whether an entry written now would close an intent, or say what was given up."""
        intents, mine = self.tail.intents if self.tail is not None else (), self.context.attempt
        closed = (log.is_closed(one, attempt=mine, carried=self.carried, dead=self.dead) for one in intents)
        return self.facts.has_news or any(closed)

    def is_live(self, key: SnapshotId) -> bool:
        """Whether the live step of that number is this very snapshot."""
        one = self.live.get(key.step)
        return one is not None and one.snapshot == key

    def refuse_save(self, step: int) -> str | None:
        """Why this step may not be committed now, or None."""
        assert self.tail is not None
        return log.refuse_save(self.tail, step, attempt=self.context.attempt, carried=self.carried, dead=self.dead)

    def refuse_retire(self, step: int) -> str | None:
        """Why this step may not be retired now, or None."""
        assert self.tail is not None
        return log.refuse_retire(self.tail, step, attempt=self.context.attempt, carried=self.carried, dead=self.dead)

    def retirable(self, retires: Iterable[Retirement]) -> list[Retirement]:
        """Those of these steps that may be retired now."""
        free: list[Retirement] = []
        for step, why in retires:
            refused = self.refuse_retire(step)
            if refused is None:
                free.append((step, why))
            elif self.held_by and step not in self._stays:
                self._stays.add(step)
                self.context.log("info", f"{refused}. Until then it stays beside the steps that retention keeps")
        return free

    def trouble(self, text: str, *, cause: str = "", step: int = -1, of_storage: bool = True, is_told: bool = True) -> None:
        """A step is not durable, or not yet: log it, and tell users until a step has been published again.

        Args:
            cause: that part of the text which may be told of other steps, too.
            of_storage: because storage has failed, which is more than that something was slow.
        """
        self.fails = self.fails or of_storage
        if of_storage and cause:
            self.cause = cause
        self.context.log("warning", text, step=step)
        if is_told and self.troubles[-1:] != [text]:
            self.troubles = [*self.troubles[-4:], text]

    @property
    def problem(self) -> str:
        """Why storage fails, by the newest that is known; "": it does not."""
        return self.context.storage_error or self.cause or (SLOW if self.fails else "")

    def attempt_dead(self, event: AttemptDead) -> None:
        """The process of an older attempt is gone: it carries nothing out any more."""
        if event.attempt < self.context.attempt and event.attempt not in self.dead:
            self.dead.add(event.attempt)

    # ---------------------------------------------------------------- writing entries

    def start(self, event: Claimed) -> None:
        """This attempt owns the run: carry out what earlier attempts have left open."""
        self.writer = event.entry.writer
        self.dead = set(event.dead)
        self._arrived(event.entry)

    def request(self, request: Request) -> None:
        """Write an entry as soon as the one before it is known; its editor says then what it changes, and hears when it is there."""
        self._requests.append(request)

    def close(self, why: str) -> None:
        """Write an entry that closes what is carried out."""
        self.request(Request(kind="close", why=why))

    def _change(self, request: Request) -> Change | None:
        if request.kind == "close":
            return (None, []) if self.closable else None
        return self.editors[request.kind].change(request)

    def _logged(self, request: Request, entry: LogEntry | None, refused: str = "") -> None:
        if request.kind != "close":
            self.editors[request.kind].logged(request, entry, refused)

    def turn(self) -> None:
        """Order what can be carried out now, and write the next entry if none is in flight."""
        context = self.context
        self._close_in_time()
        publishing = bool(self.publishing)
        for work in self._work.values():
            if not self._has_to_wait(work.intent, publishing):
                work.order(context, CarryOut(intent=work.intent))
        if self._flight is not None:
            self._flight.order(context, Append(entry=self._flight.entry))
        while self._requests and self._flight is None:
            request = self._requests.popleft()
            change = self._change(request)
            if change is None:
                self._logged(request, None)
                continue
            commit, retires = change
            assert self.tail is not None
            aside = request.kind == "set aside"
            entry = log.next_entry(
                self.tail,
                attempt=context.attempt,
                writer=self.writer,
                carried=self.carried,
                dead=self.dead,
                commit=commit,
                retires=[(step, aside, why) for step, why in retires],
                given_up=self.facts.take(),
                reason=request.why,
            )
            self._flight = _Flight(entry=entry, request=request)
            step = -1 if request.snapshot is None else request.snapshot.step
            context.log("debug", f"log entry {entry.seq} ({entry.kind}): {request.why}", step=step, kind="Append")
            self._flight.order(context, Append(entry=entry))

    def _has_to_wait(self, intent: Intent, publishing: bool) -> bool:
        """A newer step is visible before those that it replaces go: readers always find one.
        (test_saves.test_retention_retires_after_the_newer_one_is_visible)"""
        return publishing and intent.kind == "retire"

    def _close_in_time(self) -> None:
        """Close carried-out intents when nothing else is logged for a while."""
        if not self.busy and not self.working and self.context.now_s - self.changed_s >= LOG_CLOSED_S and self.closable:
            self.close("nothing else to log")

    def appended(self, event: Appended) -> None:
        """How the append of the entry in flight went."""
        flight = self._flight
        if flight is None or event.seq != flight.entry.seq:
            return
        entry = flight.entry
        if event.outcome == "failed":
            # The log may have it all the same: a commit is neither discarded nor made anew.
            # (test_saves.test_an_unanswered_append_is_repeated_and_never_discarded)
            if flight.busy:
                flight.failed(self.context.now_s)
                text = f"log entry {entry.seq} ({entry.kind}) could not be written: {event.error}; it is tried again"
                self.trouble(text, cause=event.error)
            return
        if event.outcome == "taken":
            tail = event.tail
            # Our own entry under our own name: the acknowledgement of an earlier try was lost.
            if tail is None or tail.writer != self.writer or tail.attempt != self.context.attempt:
                self._supersede(tail, entry)
                return
            if tail.seq < entry.seq:
                flight.busy = False
                return
        self._flight = None
        if event.outcome == "refused":
            # The package is gone and nothing was written: the entry's retirements must not happen.
            # (test_saves.test_nothing_goes_for_a_step_that_has_not_come)
            self.facts.refused()
            self._logged(flight.request, None, event.error)
            return
        self._arrived(entry)
        self._logged(flight.request, entry)

    def _supersede(self, tail: LogEntry | None, flight: LogEntry) -> None:
        attempt = -1 if tail is None else tail.attempt
        mine = self.context.attempt
        stranger = tail is not None and cluster_of(tail.writer) != cluster_of(self.writer)
        settings = self.context.settings
        where = f"run {settings.run!r} on {settings.storage}"
        if attempt > mine:
            who = "a later start"
            if stranger:
                is_here = tail is not None and tail.writer.partition(".")[0] == self.writer.partition(".")[0]
                who = "another run of this Ray cluster, which has its storage under another path or URL," if is_here else _ELSEWHERE
            text = (
                f"{where}: {who} has taken over the run (as attempt {attempt}, with log entry {flight.seq}), and this attempt ({mine}) "
                "can't make steps durable any more" + ("; end one of them, or give each a storage of its own" if stranger else "")
            )
        else:
            text = (
                f"{where}: log entry {flight.seq} belongs to attempt {attempt}, this is attempt {mine}, so it is another run's log"
            )
        self.superseded = Finish(by_attempt=attempt, reason=text, by_stranger=stranger)

    def _arrived(self, entry: LogEntry) -> None:
        self.tail = entry
        open_keys: set[IntentKey] = set()
        for intent in entry.intents:
            key = key_of(intent)
            open_keys.add(key)
            if key not in self.carried and key not in self._work:
                self._work[key] = _Carried(intent=intent)
        self.carried &= open_keys
        self.facts.arrived(entry)
        self._looked()

    def _looked(self) -> None:
        tail = self.tail
        assert tail is not None
        self.published = log.published_steps(tail, self.carried)  # durable is what readers see
        self.live = {one.step: one for one in tail.live}
        self.changed_s = self.context.now_s

    # ---------------------------------------------------------------- carrying out

    def carried_out(self, event: CarriedOut) -> None:
        """How the publication of a committed step, or the removal of a retired one, went."""
        key = key_of(event.intent)
        work = self._work.get(key)
        if work is None or not work.busy:
            return
        step, is_commit = work.intent.step, work.intent.kind == "commit"
        if event.error:
            work.failed(self.context.now_s)
            text = f"step {step} could not be {'published' if is_commit else 'retired'}: {event.error}; it is tried again"
            self.trouble(text, cause=event.error, step=step)
            return
        del self._work[key]
        self.carried.add(key)
        if is_commit:
            self.troubles, self.fails, self.cause = [], False, ""
            self.context.log("info", f"step {step} is durable", step=step, is_routine=True)
        else:
            self.context.log("debug", f"step {step} is retired: {work.intent.reason}", step=step)
        self._looked()


_ELSEWHERE = "another Ray cluster, or another script with a Ray of its own,"
