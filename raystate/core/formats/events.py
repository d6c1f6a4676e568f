"""Events: into `Coordinator.handle`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.entries import Intent, LogEntry
from raystate.core.formats.names import Ask, HostId, SaveId, SnapshotId
from raystate.core.formats.reports import HostSummary, OfRank


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """The claim entry was created: this Coordinator is attempt entry.attempt. `dead` lists attempts known dead (Ray said so).

    `hosts` are the HostActors that exist already (found by name); restore decisions wait for their reports or their deadline.
    """

    entry: LogEntry
    hosts: tuple[HostId, ...] = ()
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDown:
    """A node is lost, with its memory. A HostActor that has died without its node says nothing, until the next one reports."""

    host: HostId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReported:
    """A HostActor tells what it holds and what its trainers say."""

    summary: HostSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A rank of a new worker group has constructed its StateManager."""

    ask: Ask
    group: str
    rank: int
    world: int
    host: HostId


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerExited:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAsked(OfRank):
    """Collective. `step`: exactly this one, or None for the newest."""

    step: int | None = None
    rollback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTried(OfRank):
    """Collective: the outcome of a RestoreChoice on one rank. Not ok: `error` says what was damaged or unreachable.

    Attributes:
        lineage: the one that the rank has asked from, which goes on until the restore is settled.
        mistaken: the step is fine, but the rank's reference does not fit it. The rank raises that,
            and no rank restores the step.
    """

    step: int
    begins: str  # of the choice: two attempts may have made one each
    ok: bool
    error: str = ""
    damaged: bool = True  # not ok: the bytes are bad (another copy or step is used); False: they could not be reached
    tier: str = ""  # where this rank got its pieces: "memory", "peer", "storage", "source" or "init"
    mistaken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushAsked(OfRank):
    """Answered once each of the `promised` snapshots is durable or can't become so.

    `broken`: promised ones whose copy on this rank came to nothing, and why. Without `wait` the answer is what is known now.
    """

    promised: tuple[SnapshotId, ...] = ()
    broken: tuple[tuple[SnapshotId, str], ...] = ()
    wait: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked(OfRank):
    """Collective: close(). The newest kept snapshot becomes durable, then the run is released.

    Attributes:
        last: what the rank has kept last, or restored; without a lineage: restored from storage; None: nothing.
        promised, broken: as in FlushAsked; the answer names those that are not durable.
    """

    last: SnapshotId | None = None
    promised: tuple[SnapshotId, ...] = ()
    broken: tuple[tuple[SnapshotId, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked(OfRank):
    """The driver, or a trainer that has failed, ends the run: newest complete snapshot durable first, then Finish. Reply: LeaveReply.

    `lineage`, `rank`, `word`: of the trainer that asks; "" for the driver.
    """

    reason: str
    lineage: str = ""
    rank: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteAsked:
    """Somebody wants this durable step removed."""

    ask: Ask
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A host finished (error == "") or failed its part of a save. `away`: it was down, or died."""

    host: HostId
    save: SaveId
    error: str = ""
    away: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Appended:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedOut:
    """The shell has published or retired a step, or could not (`error`)."""

    intent: Intent
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDead:
    """That attempt's process is known to be gone: what it left open can be closed."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """The user gives up what this cluster holds of the run: it ends here, as one that another
    cluster has taken."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed; deadlines are looked at. The shell sends one every 0.1 s or so."""


Event = (
    Claimed | HostDown | HostReported | Joined | TrainerExited | RestoreAsked | RestoreTried | FlushAsked
    | LeaveAsked | ReleaseAsked | DeleteAsked | StopAsked | Written | Progress | Packaged
    | Appended | CarriedOut | AttemptDead | GivenUp | Tick
)  # fmt: skip
