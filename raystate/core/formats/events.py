"""What has happened, for `Coordinator.handle`: news of hosts and trainers, and what became of commands. See `questions` for the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.declared import Event
from raystate.core.formats.entries import Intent, LogEntry
from raystate.core.formats.names import HostId, SaveId, short
from raystate.core.formats.reports import HostSummary


def _outcome(done: str, failed: str, error: str) -> str:
    return f"{failed}: {error}" if error else done


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed(Event):
    """The claim entry was created: this Coordinator is attempt entry.attempt. `dead` lists attempts known dead (Ray said so).

    `hosts` are the HostActors that exist already (found by name); restore decisions wait for their reports or their deadline.
    """

    entry: LogEntry
    hosts: tuple[HostId, ...] = ()
    dead: tuple[int, ...] = ()

    def words(self) -> str:
        live = ", ".join(str(one.step) for one in self.entry.live[-5:]) or "none"
        return f"attempt {self.entry.attempt} claims the run ({self.entry.reason}); newest steps in its log: {live}"

    def about(self) -> Collection[int | str]:
        return {one.step for one in (*self.entry.live, *self.entry.intents)}


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDown(Event):
    """A node is lost, with its memory. A HostActor that has died without its node says nothing, until the next one reports."""

    host: HostId
    reason: str

    def words(self) -> str:
        return f"host {short(self.host)} is lost: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReported(Event):
    """A HostActor tells what it holds and what its trainers say."""

    summary: HostSummary

    def words(self) -> str:
        return f"host {short(self.summary.host)} reports"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerExited(Event):
    """A trainer's process is gone, or it said that it failed.

    Attributes:
        clean: it had left or detached on purpose.
        returned: its process goes on; its launcher says, again and again, that its training function has returned.
        ended: its HostActor killed it because another rank was dead: it is no cause.
        hung: its HostActor killed it because it made no step any more; `stack`: where its Python was then, "" if it could not say.
    """

    host: HostId
    lineage: str
    rank: int
    clean: bool
    reason: str
    ended: bool = False
    hung: bool = False
    returned: bool = False
    stack: str = ""

    def words(self) -> str:
        ending = "leaves" if self.clean else "is gone"
        return f"the trainer of rank {self.rank} on host {short(self.host)} {ending}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked(Event):
    """End the training at a common step.

    Attributes:
        reason: why, or who says so.
        within_s: from now until some of its trainers may be gone. None: no trainer goes away, and a
            stop that the ranks don't agree on in time is given up.
        group: only this worker group is meant, as in Joined; "": any group that trains.
        host: it is to go away within `within_s` (None: unknown): its node is preempted or drained.
            The groups with ranks there are meant. Told any number of times.
    """

    reason: str
    within_s: float | None
    group: str = ""
    host: HostId | None = None

    def words(self) -> str:
        when = "" if self.within_s is None else f" within {self.within_s:.0f} s"
        if self.host is None:
            return f"a stop{when} is asked: {self.reason}"
        return f"host {short(self.host)} is to go away{when}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written(Event):
    """A host finished (error == "") or failed its part of a save. `away`: it was down, or died."""

    host: HostId
    save: SaveId
    error: str = ""
    away: bool = False

    def words(self) -> str:
        where = f"host {short(self.host)}"
        return _outcome(
            f"{where} has written its part of save {self.save}", f"{where} could not write save {self.save}", self.error
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """How far one process has come with its share, said every second. It may be lost.

    Attributes:
        of: the save's id, or the lineage that a restore begins.
        who: the host that writes, or the rank that reads.
        done_bytes: of arrays.
        total_bytes: of its share.
    """

    of: str
    who: str
    done_bytes: int
    total_bytes: int

    def words(self) -> str:
        return f"{self.who} has moved {self.done_bytes} of {self.total_bytes} bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged(Event):
    """All parts merged, coverage checked, package object created.

    Attributes:
        metrics: the step's.
        kept: of the live steps that BuildPackage named and the new one, those that the retention policy keeps.
        hopeless: the caller's mistake, in `error`: no try can package these bytes, nor those of later steps.
    """

    save: SaveId
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    time_s: float = 0.0
    kept: tuple[int, ...] = ()
    error: str = ""
    hopeless: bool = False

    def words(self) -> str:
        return _outcome(f"save {self.save} is packaged", f"save {self.save} could not be packaged", self.error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended(Event):
    """Outcome of Append.

    Attributes:
        outcome: "ok"; "taken": another writer owns that number, `tail` is the log's newest entry; "failed": by storage, and the entry may
            be there or appear later; "refused": the step that it commits is gone from storage
            (`error`), and the entry was never sent there.
    """

    seq: int
    outcome: Literal["ok", "taken", "failed", "refused"]
    tail: LogEntry | None = None
    error: str = ""

    def words(self) -> str:
        texts = {
            "ok": f"log entry {self.seq} is written",
            "taken": f"log entry {self.seq} is there already",
            "refused": f"log entry {self.seq} is not written: {self.error}",
            "failed": f"whether log entry {self.seq} is written is not known: {self.error}",
        }
        return texts[self.outcome]

    def about(self) -> Collection[int | str]:
        return (f"log entry {self.seq}",)


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedOut(Event):
    """The shell has published or retired a step, or could not (`error`)."""

    intent: Intent
    error: str = ""

    def words(self) -> str:
        step = self.intent.step
        if self.intent.kind == "commit":
            return _outcome(f"step {step} is visible in storage", f"step {step} could not be made visible", self.error)
        return _outcome(f"the files of step {step} are gone from its place", f"step {step} could not be removed", self.error)

    def about(self) -> Collection[int | str]:
        return (self.intent.step,)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDead(Event):
    """That attempt's process is known to be gone: what it left open can be closed."""

    attempt: int

    def words(self) -> str:
        return f"the process of attempt {self.attempt} is known to be gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp(Event):
    """The user gives up what this cluster holds of the run: it ends here, as one that another
    cluster has taken."""

    reason: str

    def words(self) -> str:
        return f"the run is given up: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(Event):
    """Time passed; deadlines are looked at. The shell sends one every 0.1 s or so.

    Attributes:
        counts: to a HostActor, now and then: what its process has counted so far, by name.
        storage_error: to a Coordinator: why the newest request of its process to storage failed; "": it did not.
    """

    counts: tuple[tuple[str, float], ...] = ()
    storage_error: str = ""

    def words(self) -> str:
        return f"time has passed, and storage fails: {self.storage_error}" if self.storage_error else "time has passed"
