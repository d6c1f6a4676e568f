"""What trainers and the driver are answered."""

from __future__ import annotations

from dataclasses import dataclass

from raystate.core.formats.declared import Failure
from raystate.core.formats.names import HostId, SnapshotId, Tier

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
