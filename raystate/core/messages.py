"""The vocabulary between the decisions in core and the shells that carry them out.

Everything here is a frozen value of the standard library's types, so that it pickles, prints, compares and can be replayed. Events go
into `Coordinator.handle`, commands come out of it. A shell translates: it never decides.

Words: see docs/concepts.md. A `group` is one start of the worker group (drawn by the launcher); the Coordinator answers it with a
`Lineage`, and each restore of the group with the next one. A save id is `a<attempt>k<counter>`, unique per save try.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, NewType

from raystate.core.entries import Intent as Intent
from raystate.core.entries import LiveStep as LiveStep
from raystate.core.entries import LogEntry as LogEntry

HostId = NewType("HostId", str)  # the Ray node id, hex
SaveId = NewType("SaveId", str)
Ask = NewType("Ask", str)  # names a request of a trainer or the driver; its reply carries the same

Tier = Literal["memory", "storage", "none"]  # "none": the run has no step


@dataclass(frozen=True, slots=True, order=True)
class Lineage:
    """One unbroken line of training, from a start or a restore to the next; `str()` is what slots and messages carry.

    Attributes:
        attempt: of the Coordinator that drew it.
        counter: counts the lineages of that attempt.
        nonce: random, of the worker group: all lineages of one worker group share it.
    """

    attempt: int
    counter: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.attempt}.{self.counter}.{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Lineage:
        attempt, counter, nonce = text.split(".", 2)
        return cls(int(attempt), int(counter), nonce)


@lru_cache(maxsize=1024)
def lineage_order(text: str) -> tuple[int, int, str]:
    """A lineage's place in time; "" is before all."""
    if not text:
        return (0, 0, "")
    lineage = Lineage.parse(text)
    return (lineage.attempt, lineage.counter, lineage.nonce)


def group_of(lineage: str) -> str:
    """What the lineages of one worker group have in common; "" for no lineage."""
    return lineage_order(lineage)[2]


class SnapshotId(NamedTuple):
    """Names the bytes of one snapshot: those that one `save` call gave, on all ranks.

    Attributes:
        lineage: the line of training.
        step: completed steps.
        again: 0 for the first `save` of the step; one more for each further one that takes its place (`force=True`).
    """

    lineage: str
    step: int
    again: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """(step, again): the order of snapshots within a lineage."""
        return (self.step, self.again)


NOWHERE = (-1, 0)  # the place before all snapshots


def save_order(save: str) -> tuple[int, int]:
    """(attempt, counter) of a save id: later saves are greater. Raises ValueError for anything else."""
    attempt, _, counter = save.removeprefix("a").partition("k")
    return int(attempt), int(counter)


# ---------------------------------------------------------------- settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the Coordinator's decisions depend on. Seconds are durations, never points in time."""

    run: str
    storage: str
    save_every_s: float | None = None  # time-based saves, decided once for all hosts; None: only the trainers' step rule
    snapshot_every_steps: int = 1
    snapshot_slots: int = 3  # per trainer
    start_timeout_s: float = 300.0  # all ranks of a group have joined
    barrier_timeout_s: float = 120.0  # all ranks have called save / restore / close for the same step
    save_timeout_s: float = 600.0  # one durable save, from staged to published
    restore_timeout_s: float = 600.0
    host_timeout_s: float = 10.0  # a HostActor that says nothing for so long counts as down
    assume_dead_after_s: float = 86400.0  # an older attempt that has not come back for so long never will
    idle_timeout_s: float = 900.0  # no trainer for so long: make the newest snapshot durable and end
    stop_margin_steps: int = 2


# ---------------------------------------------------------------- what hosts hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """One trainer's complete piece of a snapshot, held in its host's arena."""

    rank: int
    world: int
    lineage: str
    step: int
    layout: str  # hash of the whole state's layout (tree, shapes, dtypes, shardings); equal on all ranks of a snapshot
    promised: bool  # save() returned True for it
    again: int = 0
    nbytes: int = 0

    @property
    def id(self) -> SnapshotId:
        return SnapshotId(self.lineage, self.step, self.again)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSeen:
    """What a trainer last wrote into its own control word."""

    rank: int
    world: int
    lineage: str
    newest_step: int  # of the last save() call, -1 before the first
    again: int = 0  # which save() of that step it was
    number: int = 0  # of the word; questions name the word they were asked after
    pending: tuple[int, ...] = ()  # steps it is still staging
    ack_id: int = 0  # newest proposal it has answered; 0: none
    ack_ok: bool = False
    ack_step: int = -1  # its step when it answered

    @property
    def place(self) -> tuple[int, int]:
        """What it has saved last, as `SnapshotId.place`."""
        return (self.newest_step, self.again)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """One HostActor's report: everything it holds and sees, so that a lost report costs nothing. `seq` grows per incarnation."""

    host: HostId
    incarnation: str
    seq: int
    staged: tuple[Staged, ...] = ()
    trainers: tuple[TrainerSeen, ...] = ()
    base: Invalidate | None = None  # newest one it has applied
    advised: tuple[int, int] | None = None  # (attempt, seq) of the newest Advice it has; None: unknown
    proposal: Proposal | None = None  # the last one it has shown to its trainers: a new Coordinator has to go on with it
    attempt: int | None = None  # newest attempt it has heard of, and whose predecessors it ignores; None: unknown


# ---------------------------------------------------------------- control words (shared memory, JSON in a cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWord:
    """Written by one trainer only, read by its HostActor. `number` grows with each word of a process, over its lineages too."""

    lineage: str
    rank: int
    world: int
    number: int = 0
    newest_step: int = -1
    again: int = 0
    pending: tuple[int, ...] = ()
    done: tuple[int, ...] = ()  # per slot: the grant number that was used up (slot staged, or handed back)
    ack_id: int = 0
    ack_ok: bool = False
    ack_step: int = -1
    phase: Literal["joined", "running", "closing", "failed"] = "joined"
    error: str = ""  # phase "failed": the user's exception, one line


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """All ranks act at the same step: end there ("stop") or make it durable ("save")."""

    id: int
    kind: Literal["stop", "save"]
    step: int
    state: Literal["proposed", "confirmed", "withdrawn"]
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error for a caller in another process: `error` names a class of core.errors."""

    error: str
    message: str
    details: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWord:
    """Written by the HostActor only, read by one trainer. A slot is the trainer's while grants[i] > done[i]."""

    grants: tuple[int, ...] = ()
    interval: int = 1  # snapshot only multiples of it (times snapshot_every_steps)
    proposal: Proposal | None = None
    failure: Failure | None = None  # raised by the next save(): BarrierTimeoutError, StaleAttemptError, …
    durable_step: int = -1  # newest published step
    save_errors: tuple[str, ...] = ()  # storage failures since the last durable step, newest last
    advice: tuple[int, int] = (0, 0)  # (attempt, seq) of the Advice that it comes from: older news than an answer is ignored


# ---------------------------------------------------------------- replies to trainers and to the driver


TIERS = ("memory", "peer", "storage", "source", "init")  # fastest first


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReply:
    lineage: str
    attempt: int
    hosts: tuple[tuple[int, HostId], ...]  # rank -> host
    newest_step: int  # newest committed step, -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreChoice:
    """Every rank begins the lineage `begins`, restores exactly this, then reports with RestoreTried."""

    tier: Tier
    step: int  # -1 with tier "none"
    begins: str  # what was staged, held or promised in lineages before it is given up
    save: str | None = None  # storage: the package; None for a step of stock Orbax
    lineage: str = ""  # memory: whose slots
    again: int = 0
    hosts: tuple[tuple[int, HostId], ...] = ()  # memory: old rank -> host that holds its piece
    reason: str = ""
    set_aside: tuple[tuple[int, str], ...] = ()

    @property
    def base(self) -> SnapshotId | None:
        """What the new lineage goes on from; without a lineage: a stored step."""
        return SnapshotId(self.lineage, self.step, self.again) if self.step >= 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSettled:
    """All ranks have restored the same step.

    Attributes:
        step: -1: the run has none.
        tier: the slowest that any rank needed.
        ahead: newer steps in storage, of another past: they can't be saved again.
        safe: the step is durable, or a promise that stands will make it so.
        durable_step: newest published step.
        advice: (attempt, seq) of the newest Advice: older news in a host's word is from before the restore.
    """

    step: int
    tier: str = ""
    ahead: tuple[int, ...] = ()
    safe: bool = False
    durable_step: int = -1
    advice: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReply:
    durable_step: int  # newest published step, -1: none
    errors: tuple[str, ...] = ()  # what was promised and is not durable, and why
    lost: tuple[SnapshotId, ...] = ()  # those snapshots


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveReply:
    step: int  # the durable last step, -1 if none was ever saved
    errors: tuple[str, ...] = ()  # what was promised, is not durable, and was not said before


Reply = JoinReply | RestoreChoice | RestoreSettled | FlushReply | LeaveReply | Failure


# ---------------------------------------------------------------- events: into Coordinator.handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """The claim entry was created: this Coordinator is attempt entry.attempt. `dead` lists attempts known dead (Ray said so).

    `hosts` are the HostActors that exist already (found by name); restore decisions wait for their reports or their deadline.
    """

    entry: LogEntry
    hosts: tuple[HostId, ...] = ()
    dead: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUp:
    host: HostId
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HostDown:
    host: HostId
    reason: str
    gone: bool = False  # the node itself is lost, with its memory; False: its HostActor may come back


@dataclass(frozen=True, slots=True, kw_only=True)
class HostReported:
    summary: HostSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    ask: Ask
    group: str
    rank: int
    world: int
    host: HostId
    nonce: str  # random; rank 0's becomes the lineage's


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerExited:
    """A trainer's process is gone, or it said that it failed.

    Attributes:
        clean: it had left or detached on purpose.
        ended: its HostActor killed it because another rank was dead: it is no cause.
    """

    host: HostId
    lineage: str
    rank: int
    clean: bool
    reason: str
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAsked:
    """Collective. `step`: exactly this one, or None for the newest. `word`: number of the rank's last word before it asked."""

    ask: Ask
    lineage: str
    rank: int
    step: int | None = None
    rollback: bool = False
    word: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTried:
    """Collective: the outcome of a RestoreChoice on one rank. Not ok: `error` says what was damaged or unreachable.

    `word`: number of the rank's last word; once the restore is settled it writes the next one.
    """

    ask: Ask
    lineage: str
    rank: int
    step: int
    ok: bool
    error: str = ""
    damaged: bool = True  # not ok: the bytes are bad (another copy or step is used); False: they could not be reached
    tier: str = ""  # where this rank got its pieces: "memory", "peer", "storage", "source" or "init"
    word: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushAsked:
    """Answered once each of the `promised` snapshots is durable or can't become so. `word`: as in RestoreAsked."""

    ask: Ask
    lineage: str
    rank: int
    promised: tuple[SnapshotId, ...] = ()
    word: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked:
    """Collective: close(). The newest kept snapshot becomes durable, then the run is released.

    Attributes:
        last: what the rank has kept last, or restored; without a lineage: restored from storage; None: nothing.
        promised, word: as in FlushAsked; the answer names those that are not durable.
    """

    ask: Ask
    lineage: str
    rank: int
    last: SnapshotId | None = None
    promised: tuple[SnapshotId, ...] = ()
    word: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked:
    """The driver, or a trainer that has failed, ends the run: newest complete snapshot durable first, then Finish. Reply: LeaveReply.

    `lineage`, `rank`, `word`: of the trainer that asks; "" for the driver.
    """

    ask: Ask
    reason: str
    lineage: str = ""
    rank: int = -1
    word: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteAsked:
    ask: Ask
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopAsked:
    """End the attempt at a common step (preemption, `ray job stop`): by `within_s` from now."""

    reason: str
    within_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidated:
    """A host has discarded everything but what `Invalidate` named."""

    host: HostId
    lineage: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A host finished (error == "") or failed its part of a save."""

    host: HostId
    save: SaveId
    error: str = ""


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
    """Outcome of Append: "ok"; "taken": another writer owns that number, `tail` is the log's newest entry; "failed": storage."""

    seq: int
    outcome: Literal["ok", "taken", "failed"]
    tail: LogEntry | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishDone:
    step: int
    save: str | None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetireDone:
    step: int
    error: str = ""
    pinned: str = ""  # nothing was done, because somebody has pinned the step: who and why


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptDead:
    """That attempt's process is known to be gone: what it left open can be closed."""

    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed; deadlines are looked at. The shell sends one every 0.1 s or so."""


Event = (
    Claimed | HostUp | HostDown | HostReported | Joined | TrainerExited | RestoreAsked | RestoreTried | FlushAsked | LeaveAsked
    | ReleaseAsked | DeleteAsked | StopAsked | Invalidated | Written | Packaged | Appended | PublishDone | RetireDone | AttemptDead
    | Tick
)  # fmt: skip


# ---------------------------------------------------------------- commands: out of Coordinator.handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    ask: Ask
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What a HostActor may reuse and what it tells its trainers. Ordered by (attempt, seq): an older one is ignored.

    Reuse rule: a slot with snapshot (l, s, n) is free iff that is not in `keep` and (l is older than lineage, and that is decided,
    or (s, n) in dead or (s, n) < stable).
    """

    attempt: int
    seq: int
    lineage: str  # the current one; "" before the first join
    # What the current lineage goes on from. Until then a host may hold something newer of an older one that nobody knows of.
    decided: bool = False
    stable: tuple[int, int] = NOWHERE  # places, see SnapshotId
    dead: tuple[tuple[int, int], ...] = ()
    keep: tuple[SnapshotId, ...] = ()  # recovery base, queued and running durable saves
    interval: int = 1
    proposal: Proposal | None = None
    failure: Failure | None = None
    durable_step: int = -1
    save_errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Advise:
    host: HostId
    advice: Advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidate:
    """Discard every slot of another lineage than `lineage` or of a step later than `step` ("" and -1: discard all). Idempotent."""

    host: HostId
    lineage: str
    step: int
    by: str = ""  # the lineage that recovers; its own slots and those of later lineages are spared
    attempt: int = 0  # (attempt, seq) orders them: one that is not newer than the last applied is acknowledged and does nothing
    seq: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTrainers:
    """Kill the trainers of this lineage's worker group on that host: they are stuck in a collective with a dead rank. Idempotent."""

    host: HostId
    lineage: str
    reason: str
    attempt: int = 0  # a host ignores those of attempts that have been superseded


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The host writes its owned shards of a snapshot under the save's unique names. Executed at most once per save id."""

    host: HostId
    save: SaveId
    lineage: str
    step: int
    ranks: tuple[int, ...]  # whose slots on this host
    again: int = 0

    @property
    def snapshot(self) -> SnapshotId:
        return SnapshotId(self.lineage, self.step, self.again)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPackage:
    """All hosts have written: check coverage, merge exactly these writers, make the small files, create the package object.

    `live`: the steps beside it, for the retention policy.
    """

    save: SaveId
    lineage: str
    step: int
    hosts: tuple[HostId, ...]
    live: tuple[LiveStep, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """Create this log entry; its seq is the tail's + 1."""

    entry: LogEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class Publish:
    """Carry out an open commit intent. Idempotent."""

    step: int
    save: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Retire:
    """Carry out an open retire intent. Idempotent."""

    step: int
    save: str | None
    aside: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Remove what a failed or abandoned save left under its unique names. Best effort."""

    save: SaveId
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The run is released: end the HostActors (with their arenas), remove garbage, end this actor."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Superseded:
    """A newer attempt has claimed: answer everybody with StaleAttemptError and end, touching nothing."""

    by_attempt: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A line for the run's log. Every decision that a person might ask about has one."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


Command = (
    Answer | Advise | Invalidate | EndTrainers | Write | BuildPackage | Append | Publish | Retire | Discard | Finish
    | Superseded | Log
)  # fmt: skip
