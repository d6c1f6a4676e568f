"""The Coordinator's decisions: events in, commands out.

`handle` is the only mutator. It is deterministic and has neither clock nor I/O, so that any history can be replayed. The parts:

    group       who trains (joins, lineages, ends)      memory, snapshots  what hosts hold; advice to them
    journal     entries of the log and their intents    saves              from a complete snapshot to its commit
    recovery    what a group restores                   agreement          all ranks act at the same step
    leaving     flush, close, release                   withdrawals        steps that leave the log on demand

Some have parts of their own, such as the snapshots' copying and laggards. `notices` knows the hosts that are to go away; `slow_ranks`
only watches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raystate.core.coordinator.agreement import Agreement
from raystate.core.coordinator.context import Context
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.journal import Journal
from raystate.core.coordinator.leaving import Leaving
from raystate.core.coordinator.memory import Memory
from raystate.core.coordinator.notices import Notices
from raystate.core.coordinator.recovery import Restores
from raystate.core.coordinator.saves import Saves
from raystate.core.coordinator.slow_ranks import SlowRanks
from raystate.core.coordinator.snapshots import Snapshots
from raystate.core.coordinator.tenancy import Presence, presence_of
from raystate.core.coordinator.withdrawals import Withdrawals
from raystate.core.formats.commands import Answer, Command, Finish
from raystate.core.formats.declared import Event, Failure
from raystate.core.formats.entries import LogEntry
from raystate.core.formats.errors import InvalidTransitionError
from raystate.core.formats.events import (
    Appended,
    AttemptDead,
    CarriedOut,
    Claimed,
    GivenUp,
    HostDown,
    HostReported,
    Packaged,
    Progress,
    StopAsked,
    Tick,
    TrainerExited,
    Written,
)
from raystate.core.formats.names import Ask
from raystate.core.formats.printed import printed_parts
from raystate.core.formats.questions import DeleteAsked, FlushAsked, Joined, LeaveAsked, ReleaseAsked, RestoreAsked, RestoreTried
from raystate.core.formats.settings import Settings

NO_REST = "the decisions have not come to rest"
_ERROR_CHARS = 200
_MAX_ROUNDS = 50  # each round follows from a change of the one before; more would be a loop


class Coordinator:
    """One attempt's decisions.

    Args:
        settings: what the decisions depend on.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self._context = context = Context(settings)
        self.memory = Memory(context)
        self.journal = Journal(context)
        self.joins = Joins(context, self.memory, self.journal)
        self.saves = Saves(context, self.memory, self.joins, self.journal)
        self.notices = Notices(context, self.joins)
        self.snapshots = Snapshots(context, self.memory, self.joins, self.journal, self.saves, self.notices)
        self.withdrawals = Withdrawals(context, self.memory, self.joins, self.journal, self.saves)
        self.recovery = Restores(context, self.snapshots, self.withdrawals)
        self.agreement = Agreement(context, self.joins, self.journal, self.saves, self.snapshots, self.notices)
        self.leaving = Leaving(context, self.memory, self.joins, self.journal, self.saves, self.snapshots)
        self.slow_ranks = SlowRanks(context, self.joins)
        self.journal.editors = {
            "commit": self.saves,
            "retention": self.saves,
            "rollback": self.withdrawals,
            "set aside": self.withdrawals,
            "delete": self.withdrawals,
        }
        self._early: list[Event] = []
        self._end: Finish | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            Claimed: self._claim,
            HostDown: self._host_down,
            HostReported: self._reported,
            Joined: self._joined,
            TrainerExited: self.joins.exited,
            RestoreAsked: self.recovery.asked,
            RestoreTried: self.recovery.tried,
            FlushAsked: self.leaving.promises.flush_asked,
            LeaveAsked: self.leaving.leave_asked,
            ReleaseAsked: self.leaving.release_asked,
            DeleteAsked: self.withdrawals.delete_asked,
            StopAsked: self._stop_asked,
            Written: self.saves.written,
            Progress: self.saves.progressed,
            Packaged: self._packaged,
            Appended: self.journal.appended,
            CarriedOut: self.journal.carried_out,
            AttemptDead: self.journal.attempt_dead,
            GivenUp: self._given_up,
            Tick: self._tick,
        }

    # ---------------------------------------------------------------- what others may look at

    @property
    def attempt(self) -> int:
        """Which attempt this is; 0 before the claim."""
        return self._context.attempt

    @property
    def tail(self) -> LogEntry | None:
        """The newest log entry that is known, None before the claim."""
        return self.journal.tail

    @property
    def finished(self) -> bool:
        """Whether it decides nothing any more: the run is released, or another attempt owns it."""
        return self.leaving.is_finished() or self._end is not None

    @property
    def held_by(self) -> frozenset[int]:
        """Older attempts that may still carry out an open intent: the opposite has to wait for
        them."""
        return self.journal.held_by

    def presence(self, now_s: float) -> Presence:
        """Which trainers are there, as far as it has heard by then."""
        return presence_of(self.joins, self.memory, self.journal, now_s, leaving=self.leaving.phase != "open")

    # ---------------------------------------------------------------- the one entrance

    def handle(self, event: Event, now_s: float, *, more: bool = False) -> list[Command]:
        """Take one event.

        Args:
            event: what has happened.
            now_s: monotonic seconds of this process; only differences matter.
            more: another event follows at once, and the parts look after that one. A Tick ends a batch that never ended.

        Returns:
            What is to be done, in order. The outcome of each comes back as an event.

        Raises:
            InvalidTransitionError: a bug in raystate; it tells the event and the state that did not fit.
        """
        try:
            return self._handle(event, now_s, more)
        except Exception as error:
            text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise InvalidTransitionError(f"the Coordinator cannot take {event!r} ({text}); {self.story()}") from error

    def story(self) -> str:
        """The state in one line, for people."""
        group, saves, journal = self.joins.group, self.saves, self.journal
        jobs = ", ".join(f"step {key.step} {job.phase}" for key, job in saves.jobs.items()) or "none"
        tail = "none" if journal.tail is None else f"{journal.tail.seq} ({journal.tail.kind})"
        return (
            f"attempt {self.attempt}; lineage {group.lineage if group is not None else 'none'}"
            f"{'' if group is None or group.alive else ' (ended)'}; recovery {self.recovery.phase}; end {self.leaving.phase}; "
            f"saves: {jobs}; stable {self.snapshots.stable}; durable {journal.durable_step}; log entry {tail}"
        )

    def state(self) -> dict[str, Any]:
        """All that it knows, by part, in values that print, compare and go into JSON."""
        return printed_parts(self)

    def __repr__(self) -> str:
        return f"<Coordinator: {self.story()}>"

    def _handle(self, event: Event, now_s: float, more: bool) -> list[Command]:
        context = self._context
        context.now_s = now_s
        out: list[Command] = []
        context.out = out
        if self.finished:
            return out
        if not self.attempt and type(event) not in (Claimed, GivenUp):
            if type(event) is not Tick:
                self._early.append(event)
            return out
        self._take(event)
        if not more and self._end is None:
            self._settle()
        return out

    def _take(self, event: Event) -> None:
        ask: Ask | None = getattr(event, "ask", None)
        if ask is not None:
            known = self._context.replies.get(ask)
            if known is not None:
                self._context.out.append(Answer(ask=ask, reply=known))
                return
            if self.leaving.is_finished():  # by one that waited for the claim before this one did
                self._context.fail([ask], "StaleAttemptError", "the run has been released", released=True)
                return
            self._context.open_asks[ask] = type(event)
        elif self.leaving.is_finished():
            return
        self._handlers[type(event)](event)

    def _settle(self) -> None:
        """Let every part look at what is known and at the time, until a round gives no command.

        The order, in each round: snapshots are judged; saves begin; recovery and agreement go on; those that wait for
        durability or for the end are answered; the journal gives the entries that all of these
        want; advice tells the hosts. Each part reads what the parts before it have left, and
        asks only the journal (which comes last) for entries. What a round has changed without a
        command, an earlier part sees with the next event; `Tick` comes several times a second.
        """
        context = self._context
        for _ in range(_MAX_ROUNDS):
            given = len(context.out)
            if self.journal.superseded is not None:
                self._supersede(self.journal.superseded)
                return
            if self.leaving.is_finished():
                return
            self.joins.turn()
            self.snapshots.turn()
            self.saves.turn()
            self.recovery.turn()
            self.agreement.turn()
            self.withdrawals.turn()
            self.leaving.turn()
            self.journal.turn()
            self.slow_ranks.turn()
            if self.leaving.is_finished():
                return
            self.snapshots.advise()
            if len(context.out) == given:
                return
        context.log("error", f"{NO_REST} after {_MAX_ROUNDS} rounds; {self.story()}")

    # ---------------------------------------------------------------- beginning and end

    def _claim(self, event: Claimed) -> None:
        if self.attempt:
            return
        context = self._context
        context.attempt, context.claimed_s = event.entry.attempt, context.now_s
        context.log("debug", f"attempt {context.attempt} owns run {event.entry.run}: {event.entry.reason}")
        self.journal.start(event)
        self.memory.gathering = set(event.hosts)  # nothing is decided before they have reported, or have had their time to
        self.agreement.start()
        self._settle()
        early, self._early = self._early, []
        for one in early:
            self._take(one)
            self._settle()

    def _supersede(self, end: Finish) -> None:
        self._end = end
        context = self._context
        context.log("error", end.reason)
        if end.by_stranger:  # else the next Coordinator answers
            stale = Failure(error="StaleAttemptError", message=end.reason, details={"by_attempt": end.by_attempt})
            context.out += [Answer(ask=ask, reply=stale) for ask in context.open_asks]
            self.snapshots.failure = stale  # or save() would go on to say True
            self.snapshots.advise()
        context.out.append(end)

    # ---------------------------------------------------------------- small ones

    def _reported(self, event: HostReported) -> None:
        self.snapshots.reported(event)
        self.slow_ranks.reported(event.summary)

    def _host_down(self, event: HostDown) -> None:
        self.snapshots.host_down(event)
        self.notices.down(event)

    def _joined(self, event: Joined) -> None:
        if self.leaving.is_settled and event.group != self.joins.joining.name:
            # Its Coordinator is the next one: this one would end under its feet.
            self._context.fail([event.ask], "StaleAttemptError", "the run is being released", released=True)
            return
        self.joins.joined(event)

    def _stop_asked(self, event: StopAsked) -> None:
        if event.host is not None:
            self.notices.leaving(event.host, event)
            return
        group = self.joins.group
        if event.group and (group is None or not group.alive or group.name != event.group or self.leaving.phase != "open"):
            self._context.log("debug", f"no trainer is asked to stop, the group has ended or is ending: {event.reason}")
            return
        self.agreement.stop(event.reason, event.within_s, group if event.group else None)

    def _packaged(self, event: Packaged) -> None:
        self.saves.packaged(event)
        mistake, group = self.saves.mistake, self.joins.group
        if mistake is not None and event.hopeless and group is not None and group.lineage == mistake[0].lineage:
            # Nothing that this training makes can ever be durable: better said now than at its end.
            self.snapshots.failure = Failure(error="ConfigError", message=mistake[1], details={"step": mistake[0].step})

    def _given_up(self, event: GivenUp) -> None:
        self._supersede(Finish(by_attempt=self.attempt, reason=event.reason, by_stranger=True))

    def _give_up_waiting(self) -> None:
        """No process sleeps for so long: its open intents are closed, and their steps are free."""
        if self._context.now_s - self._context.claimed_s >= self.settings.assume_dead_after_s:
            for attempt in sorted(self.journal.held_by):
                self._context.log("warning", f"attempt {attempt} has not come back: its process is taken for dead")
                self.journal.attempt_dead(AttemptDead(attempt=attempt))

    def _tick(self, event: Tick) -> None:
        self._context.storage_error = event.storage_error[:_ERROR_CHARS]
        self._give_up_waiting()
        self.snapshots.tick()
