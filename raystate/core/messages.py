"""The vocabulary between the decisions in core and the shells that carry them out.

Everything here is a frozen value of the standard library's types, so that it pickles, prints, compares and can be replayed. Events go
into `Coordinator.handle`, commands come out of it. A shell translates: it never decides.

Words: see docs/concepts.md. A `group` is one start of the worker group (drawn by the launcher); the Coordinator answers it with a
`Lineage`. A save id is `a<attempt>k<counter>`, unique per save try.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NewType

from raystate.core.sealed import seal, unseal

HostId = NewType("HostId", str)  # the Ray node id, hex
SaveId = NewType("SaveId", str)
Ask = NewType("Ask", str)  # names a request of a trainer or the driver; its reply carries the same

Tier = Literal["memory", "storage", "none"]  # "none": the run has no step


@dataclass(frozen=True, slots=True, order=True)
class Lineage:
    """One start of the worker group, (attempt, counter, random id); `str()` is what slots and messages carry."""

    attempt: int
    counter: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.attempt}.{self.counter}.{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Lineage:
        attempt, counter, nonce = text.split(".", 2)
        return cls(int(attempt), int(counter), nonce)


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
    durable: bool  # save() returned True for this step
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSeen:
    """What a trainer last wrote into its own control word."""

    rank: int
    world: int
    lineage: str
    newest_step: int  # of the last save() call, -1 before the first
    pending: tuple[int, ...] = ()  # steps it is still staging
    durable_due: tuple[int, ...] = ()  # steps for which save() returned True, newest last (the last few)
    ack_id: int = 0  # newest proposal it has answered; 0: none
    ack_ok: bool = False
    ack_step: int = -1  # its step when it answered


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


# ---------------------------------------------------------------- the log


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStep:
    """A committed step. `save` is None for a step that stock Orbax wrote and a claim adopted."""

    step: int
    save: str | None
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    time_s: float = 0.0  # wall clock at the commit, for reports and time-based retention; never compared for safety


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A commit or retire that has been decided and may not be carried out yet."""

    kind: Literal["commit", "retire"]
    step: int
    save: str | None
    attempt: int
    seq: int  # of the entry that opened it
    aside: bool = False  # retire: keep the data, unpublished
    reason: str = ""
    carriers: tuple[int, ...] = ()  # attempts whose process may still carry it out; none named: `attempt` alone


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """An entry holds the whole state after it, so that the tail alone is enough."""

    seq: int
    attempt: int
    writer: str  # random id of the process that created it
    kind: Literal["claim", "commit", "retire", "close"]
    run: str
    live: tuple[LiveStep, ...] = ()  # by step, ascending
    intents: tuple[Intent, ...] = ()
    reason: str = ""
    format: int = 1

    def to_json(self) -> bytes:
        return seal(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: bytes) -> LogEntry:
        """Raises ValueError, KeyError or TypeError if it is not what `to_json` gave, bit for bit."""
        raw = unseal(data)
        raw["live"] = tuple(LiveStep(**live) for live in raw["live"])
        for intent in raw["intents"]:
            intent["carriers"] = tuple(intent.get("carriers", ()))
        raw["intents"] = tuple(Intent(**intent) for intent in raw["intents"])
        return cls(**raw)


# ---------------------------------------------------------------- control words (shared memory, JSON in a cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWord:
    """Written by one trainer only, read by its HostActor."""

    lineage: str
    rank: int
    world: int
    newest_step: int = -1
    pending: tuple[int, ...] = ()
    durable_due: tuple[int, ...] = ()
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
    """Every rank restores exactly this, then reports with RestoreTried."""

    tier: Tier
    step: int  # -1 with tier "none"
    save: str | None = None  # storage: the package; None for a step of stock Orbax
    lineage: str = ""  # memory: whose slots
    hosts: tuple[tuple[int, HostId], ...] = ()  # memory: old rank -> host that holds its piece
    reason: str = ""
    set_aside: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSettled:
    """All ranks have restored the same step. `tier` is the slowest that any rank needed."""

    step: int
    tier: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReply:
    durable_step: int  # newest published step, -1: none
    errors: tuple[str, ...] = ()  # what is due and not durable, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveReply:
    step: int  # the durable last step, -1 if none was ever saved


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

    `clean`: it had left or detached on purpose. `ended`: its HostActor ended it, because its group could not go on.
    """

    host: HostId
    lineage: str
    rank: int
    clean: bool
    reason: str
    ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAsked:
    """Collective. `step`: exactly this one, or None for the newest. `layout`: hash or "" when unknown."""

    ask: Ask
    lineage: str
    rank: int
    step: int | None = None
    rollback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTried:
    """Collective: the outcome of a RestoreChoice on one rank. Not ok: `error` says what was damaged or unreachable."""

    ask: Ask
    lineage: str
    rank: int
    step: int
    ok: bool
    error: str = ""
    damaged: bool = True  # not ok: the bytes are bad (another copy or step is used); False: they could not be reached
    tier: str = ""  # where this rank got its pieces: "memory", "peer", "storage", "source" or "init"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushAsked:
    """Answered once every step for which save() returned True up to `step` is durable or has failed."""

    ask: Ask
    lineage: str
    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked:
    """Collective: close(). The newest saved step `step` (-1: none) becomes durable, then the run is released."""

    ask: Ask
    lineage: str
    rank: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked:
    """The driver (or its absence) ends the run: newest complete snapshot durable first, then Finish. Reply: LeaveReply."""

    ask: Ask
    reason: str


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
    """All parts merged, coverage checked, package object created. `metrics` are the step's."""

    save: SaveId
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    time_s: float = 0.0
    error: str = ""


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

    Reuse rule: slot (l, s) is free iff (l, s) is not in `keep` and (l is older than lineage, and that is decided, or s in dead or
    s < stable).
    """

    attempt: int
    seq: int
    lineage: str  # the current one; "" before the first join
    # What the current lineage goes on from. Until then a host may hold something newer of an older one that nobody knows of.
    decided: bool = False
    stable: int = -1
    dead: tuple[int, ...] = ()
    keep: tuple[tuple[str, int], ...] = ()  # recovery base, queued and running durable saves
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
    """Kill this lineage's trainers on that host (they are stuck in a collective with a dead rank). Idempotent."""

    host: HostId
    lineage: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The host writes its owned shards of (lineage, step) under the save's unique names. Executed at most once per save id."""

    host: HostId
    save: SaveId
    lineage: str
    step: int
    ranks: tuple[int, ...]  # whose slots on this host


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildPackage:
    """All hosts have written: check coverage, merge exactly these writers, make the small files, create the package object."""

    save: SaveId
    lineage: str
    step: int
    hosts: tuple[HostId, ...]


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
