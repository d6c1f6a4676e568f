"""The story of one step, from the record of a Coordinator: what happened, what was decided, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from raystate.core.coordinator.context import named
from raystate.core.formats.messages import (
    Advice,
    Answer,
    Append,
    BuildPackage,
    CarriedOut,
    CarryOut,
    Command,
    Discard,
    Event,
    HostDown,
    HostOrder,
    HostReported,
    Intent,
    LeaveReply,
    Log,
    LogEntry,
    RestoreChoice,
    TrainerExited,
    Write,
    short,
)
from raystate.observe.record import AttemptRecord, Record

_ASKED = {  # by a proposal's state; {}: what all ranks do
    "proposed": "all ranks are asked to {} at it",
    "confirmed": "all ranks agree to {} at it",
    "withdrawn": "the request to {} at it is withdrawn",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the Coordinator made of an event. `level`: of the run's log; "info" for a command."""

    text: str
    reason: str = ""
    level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One event of the story. `time_s`: wall clock."""

    attempt: int
    time_s: float
    event: str
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that the record knows of a step.

    Attributes:
        moments: oldest first; none: the record doesn't know it.
        milestones: how far it came -> when first (wall clock), in this order.
    """

    step: int
    run: str
    moments: tuple[Moment, ...]
    milestones: dict[str, float]


def tell(step: int, attempts: Iterable[AttemptRecord]) -> Story:
    """The story of a step."""
    run, teller = "", _Teller(step)
    for attempt in attempts:
        run = attempt.settings.run
        for record in attempt.records:
            teller.take(record)
    return Story(step=step, run=run, moments=tuple(teller.moments), milestones=teller.milestones)


def known_steps(attempts: Iterable[AttemptRecord]) -> list[int]:
    """Steps that have a story, ascending."""
    steps: set[int] = set()
    for record in (record for attempt in attempts for record in attempt.records):
        if isinstance(record.event, HostReported):
            steps |= {piece.step for piece in record.event.summary.staged}
        for command in record.commands:
            if isinstance(command, Append):
                steps |= {intent.step for intent in command.entry.intents} | {one.step for one in command.entry.live}
    return sorted(steps)


class _Teller:
    """Reads records in their order, and remembers what belongs to the step."""

    def __init__(self, step: int):
        self.step = step
        self.moments: list[Moment] = []
        self.milestones: dict[str, float] = {}
        self._names: set[int | str] = {step}  # by which events are news of it: ids of its saves
        self._entries: set[str] = set()  # and log entries that decide on it
        self._seen: set[tuple[object, ...]] = set()  # what is told only once
        self._attempt = -1

    def take(self, record: Record) -> None:
        if record.attempt != self._attempt:
            self._attempt, self._entries = record.attempt, set()
        for command in record.commands:
            self._learn(command)
        event = self._happened(record.event, record.time_s)
        decisions = self._decided(record, about_it=bool(event))
        if event or decisions:
            self.moments.append(
                Moment(
                    attempt=record.attempt,
                    time_s=record.time_s,
                    event=event or record.event.words(),
                    decisions=tuple(decisions),
                )
            )

    def _learn(self, command: Command) -> None:
        match command:
            case Write(step=self.step, save=str(save)) | CarryOut(intent=Intent(kind="commit", step=self.step, save=str(save))):
                self._names.add(save)
            case Append(entry=entry) if self._changes(entry):
                self._entries.add(f"log entry {entry.seq}")
            case _:
                pass

    def _changes(self, entry: LogEntry) -> list[str]:
        """What an entry decides on the step."""
        changes = [one for one in entry.intents if one.step == self.step and one.seq == entry.seq]
        retired = "sets it aside" if any(one.aside for one in changes) else "retires it"
        return [f"commits it (save {one.save})" if one.kind == "commit" else retired for one in changes]

    def _begin(self, time_s: float) -> None:
        """It is staged; a step that was given up before begins anew."""
        if self.milestones.keys() & {"retired", "set aside"}:
            self.milestones.clear()
        self._reached("staged", time_s)

    def _reached(self, milestone: str, time_s: float) -> None:
        self.milestones.setdefault(milestone, time_s)

    def _first(self, *what: object) -> bool:
        """Whether it is told for the first time."""
        known = what in self._seen
        self._seen.add(what)
        return not known

    # ------------------------------------------------------------ events

    def _happened(self, event: Event, time_s: float) -> str:
        """What an event means for the step; "" if nothing."""
        if isinstance(event, HostReported):
            summary = event.summary
            fresh = [
                piece
                for piece in summary.staged
                if piece.step == self.step and self._first("staged", piece.lineage, piece.rank, summary.host)
            ]
            if not fresh:
                return ""
            self._begin(time_s)
            ranks = named([str(piece.rank) for piece in fresh])
            return f"host {short(summary.host)} holds the snapshot of rank{'s' if len(fresh) > 1 else ''} {ranks}"
        if isinstance(event, TrainerExited | HostDown) and self.milestones.keys() & {"staged"} and "durable" not in self.milestones:
            return event.words()  # while the step was on its way
        if self._names.isdisjoint(about := event.about()) and self._entries.isdisjoint(about):
            return ""
        if isinstance(event, CarriedOut) and event.intent.kind == "commit" and not event.error:
            self._reached("durable", time_s)
        return event.words()

    # ------------------------------------------------------------ decisions

    def _decided(self, record: Record, *, about_it: bool) -> list[Decision]:
        """Commands that concern the step, those for many hosts or ranks as one; with the lines of the run's log about it, and, beside
        an event of it, those about no other step. Lines of level "debug" only repeat a decision, and say why."""
        found: dict[Decision, list[str]] = {}
        of_kind: dict[str, Decision] = {}
        lines: list[Log] = []
        for command in record.commands:
            if isinstance(command, Log) and (
                command.step == self.step or (about_it and command.step < 0 and command.level != "debug")
            ):
                lines.append(command)
            for decision in self._meaning(command, record.time_s):
                found.setdefault(decision, []).extend(_hosts(command))
                of_kind[type(command).__name__] = decision
        because = {of_kind[line.kind]: line.text for line in lines if line.level == "debug" and line.kind in of_kind}
        decisions = [_worded(decision, hosts, because.get(decision, "")) for decision, hosts in found.items()]
        return decisions + [Decision(text=line.text, level=line.level) for line in lines if line.text not in because.values()]

    def _meaning(self, command: Command, time_s: float) -> list[Decision]:
        step = self.step
        match command:
            case Write(step=self.step, save=save):
                self._reached("save begun", time_s)
                return [Decision(text=f"write save {save}")]
            case BuildPackage(step=self.step, save=save):
                return [Decision(text=f"build the package of save {save}")]
            case Append(entry=entry):
                changes = self._changes(entry)
                if changes and self._first("entry", entry.attempt, entry.seq):
                    self._reached(
                        "retired" if "retires it" in changes else "set aside" if "aside" in changes[0] else "committed", time_s
                    )
                    reasons = [one.reason for one in entry.intents if one.step == step and one.seq == entry.seq and one.reason]
                    return [Decision(text=f"log entry {entry.seq} {' and '.join(changes)}", reason=(reasons or [entry.reason])[0])]
            case CarryOut(intent=Intent(kind="commit", step=self.step, save=save)):
                return [Decision(text=f"make save {save} visible in storage")]
            case CarryOut(intent=Intent(step=self.step, aside=aside)):
                return [Decision(text="move its files aside" if aside else "remove its files")]
            case Discard(step=self.step, save=save):
                return [Decision(text=f"remove what save {save} has left")]
            case Answer(reply=RestoreChoice(step=self.step, tier=tier, begins=begins, reason=reason)):
                return [Decision(text=f"all ranks restore it from {tier}, as lineage {begins}", reason=reason)]
            case Answer(reply=LeaveReply(step=self.step)):
                return [Decision(text="the run ends with it")]
            case Advice():
                return self._advised(command, time_s)
            case HostOrder() if text := command.words(step):
                return [Decision(text=text)]
            case _:
                pass
        return []

    def _advised(self, advice: Advice, time_s: float) -> list[Decision]:
        """What hosts hear of the step for the first time; it is the same for all of them."""
        told: list[Decision] = []
        if advice.stable == self.step and self._first("stable", advice.lineage, advice.stable):
            self._reached("stable", time_s)
            told.append(Decision(text="it is stable: all of it is in the memory of the hosts"))
        if self.step in advice.dead and self._first("dead", advice.lineage):
            told.append(Decision(text="its snapshot is dead: it can't become complete"))
        one = advice.proposal
        if one is not None and one.step == self.step and self._first("proposal", advice.attempt, one.id, one.state):
            told.append(Decision(text=_ASKED[one.state].format(one.kind), reason=one.reason))
        return told


def _worded(decision: Decision, hosts: list[str], because: str) -> Decision:
    where = f": host{'s' if len(hosts) > 1 else ''} {named(hosts)}" if hosts else ""
    return dataclasses.replace(decision, text=f"{decision.text}{where}", reason=decision.reason or because)


def _hosts(command: Command) -> list[str]:
    """Advice is the same for all of them."""
    return [short(command.host)] if isinstance(command, Write | HostOrder) and not isinstance(command, Advice) else []
