"""What trainers and the driver are answered, and what HostActors are told to know."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from raystate.core.formats.names import HostId, SnapshotId, Stamped, Tier, lineage_order


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error for a caller in another process: `error` names a class of core.formats.errors."""

    error: str
    message: str
    details: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])


MOST_OLDER = 16  # restores in a row while storage takes nothing; older pasts are given up
TIERS = ("memory", "peer", "storage", "source", "init")  # fastest first


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReply:
    """The group is complete, and this is its first lineage."""

    lineage: str
    attempt: int
    host_count: int  # that its ranks are on
    newest_step: int  # newest committed step, -1: none


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreChoice:
    """Every rank begins the lineage `begins`, restores exactly this, then reports with RestoreTried.

    With another number of ranks than the snapshot has, each takes what it needs of all of them.
    """

    tier: Tier
    step: int  # -1 with tier "none"
    begins: str  # what was staged, held or promised in lineages before it is given up
    save: str | None = None  # storage: the package; None for a step of stock Orbax
    lineage: str = ""  # memory: whose slots
    holders: tuple[tuple[int, tuple[HostId, ...]], ...] = ()  # rank of the snapshot in memory -> the hosts that hold its piece
    world: int = 0  # how many ranks that snapshot has
    stored: bool = False  # the same snapshot is durable
    held: SnapshotId | None = None  # storage: the same snapshot, of which some ranks' pieces are in memory
    reason: str = ""
    set_aside: tuple[tuple[int, str], ...] = ()

    @property
    def snapshot(self) -> SnapshotId:
        """What it names; without a lineage: a stored step."""
        return SnapshotId(self.lineage, self.step)

    @property
    def origin(self) -> SnapshotId | None:
        """What the new lineage goes on from, if anything."""
        return self.snapshot if self.step >= 0 else None

    @property
    def in_memory(self) -> SnapshotId | None:
        """The snapshot that is in memory, all of it or, with tier "storage", a part; None: nothing is."""
        return self.origin if self.tier == "memory" else self.held


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreSettled:
    """All ranks have restored the same step.

    Attributes:
        step: -1: the run has none.
        tier: the slowest that any rank needed.
        ahead: newer steps in storage, of another past: they can't be saved again.
        safe: the step is durable.
        saving: its save is under way: a rank that waits for durability waits for it, too.
        durable_step: newest published step.
        advice: (attempt, seq) of the newest Advice: older news in a host's word is from before the restore.
    """

    step: int
    tier: str = ""
    ahead: tuple[int, ...] = ()
    safe: bool = False
    saving: bool = False
    durable_step: int = -1
    advice: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushReply:
    """What a rank waited for is durable, but for `errors`. Also the answer to a delete."""

    durable_step: int  # newest published step, -1: none
    errors: tuple[str, ...] = ()  # what was promised and is not durable, and why
    lost: tuple[SnapshotId, ...] = ()  # of those snapshots: these never will be
    undecided: tuple[SnapshotId, ...] = ()  # of those snapshots: these may still become durable


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveReply:
    """The run is released."""

    step: int  # the durable last step, -1 if none was ever saved
    errors: tuple[str, ...] = ()  # promised steps that are not durable: the asker's; of a release, the last group's
    newest_lost: bool = False  # so is the newest of the asker's; else the others have given way to it


Reply = JoinReply | RestoreChoice | RestoreSettled | FlushReply | LeaveReply | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """All ranks act at the same step: end there ("stop") or make it durable ("save")."""

    id: int
    kind: Literal["stop", "save"]
    step: int
    state: Literal["proposed", "confirmed", "withdrawn"]
    reason: str = ""

    @property
    def text(self) -> str:
        """What all ranks do, and why."""
        return f"all ranks {self.kind} at step {self.step}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(Stamped):
    """What a HostActor may reuse and what it tells its trainers. Ordered by (attempt, seq): an older one is ignored.

    Reuse rule: a slot with snapshot (l, s) is free iff that is not in `keep` and (l is older than lineage, and that is decided,
    or s < stable, or s is in dead; if it was promised, in lost).
    """

    lineage: str  # the current one; "" before the first join
    # Whether it is known what the current lineage goes on from. Before, a host may hold a newer
    # snapshot of an older lineage that it has not reported.
    decided: bool = False
    stable: int = -1
    dead: tuple[int, ...] = ()  # steps that a rank has skipped
    lost: tuple[int, ...] = ()  # those of them that no rank can get by force any more: it is past them
    keep: tuple[SnapshotId, ...] = ()  # what a recovery may need, queued and running durable saves
    interval: int = 1
    proposal: Proposal | None = None
    failure: Failure | None = None
    durable_step: int = -1
    save_errors: tuple[str, ...] = ()
    storage_fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidate(Stamped):
    """Discard every slot that `spares` does not spare. Idempotent.

    Attributes:
        lineage: of the snapshot that is restored; "": it comes from storage, and nothing older than `by` is spared.
        step: that is restored, -1: none; later ones of its lineage are discarded.
        by: the lineage that recovers; its own slots and those of later lineages are spared.
        older: the lineages that `lineage` has come from, oldest first, each with the step after which the next one went on.
        attempt, seq: order them: one that is not newer than the last applied is acknowledged and does nothing.
    """

    host: HostId
    lineage: str
    step: int
    by: str
    older: tuple[tuple[str, int], ...] = ()

    def spares(self, lineage: str, step: int) -> bool:
        """Whether a slot that holds (lineage, step) stays."""
        if lineage == self.lineage:
            return step <= self.step
        if lineage_order(lineage) >= lineage_order(self.by):
            return True
        return any(one == lineage and step <= last for one, last in self.older)

    def before(self, lineage: str) -> tuple[tuple[str, int], ...]:
        """What `lineage` has come from, as `older` has it; () if it is not of this past."""
        past = (*self.older, (self.lineage, self.step)) if self.lineage else ()
        if lineage == self.by:
            return past[-MOST_OLDER:]
        at = next((index for index, (one, _) in enumerate(past) if one == lineage), 0)
        return past[:at]
