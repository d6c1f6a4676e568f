"""Orders of the Coordinator to a HostActor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.declared import Failure
from raystate.core.formats.names import HostId, SnapshotId, lineage_order

_ALL = HostId("")
MOST_OLDER = 16  # restores in a row while storage takes nothing; older pasts are given up


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOrder:
    """What the Coordinator tells a HostActor, which answers by its reports alone. Any may be lost, come late, or come twice."""

    host: HostId

    def words(self, step: int) -> str:
        """What it means for a step, for people; "": nothing."""
        del step
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StampedOrder(HostOrder):
    """An order of a kind of which only the newest counts, in any order of arrival."""

    attempt: int
    seq: int

    @property
    def stamp(self) -> tuple[int, int]:
        """(attempt, seq)"""
        return self.attempt, self.seq


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
class Advice(StampedOrder):
    """What a HostActor may reuse and what it tells its trainers. Ordered by (attempt, seq): an older one is ignored.

    Reuse rule: a slot with snapshot (l, s) is free iff that is not in `keep` and (l is older than lineage, and that is decided,
    or s < stable, or s is in dead; if it was promised, in lost).
    """

    host: HostId = _ALL  # "": what all are told
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
class Invalidate(StampedOrder):
    """Discard every slot that `spares` does not spare. Idempotent.

    Attributes:
        lineage: of the snapshot that is restored; "": it comes from storage, and nothing older than `by` is spared.
        step: that is restored, -1: none; later ones of its lineage are discarded.
        by: the lineage that recovers; its own slots and those of later lineages are spared.
        older: the lineages that `lineage` has come from, oldest first, each with the step after which the next one went on.
        attempt, seq: order them: one that is not newer than the last applied is acknowledged and does nothing.
    """

    lineage: str
    step: int
    by: str
    older: tuple[tuple[str, int], ...] = ()

    def words(self, step: int) -> str:
        return "discard what does not come before it" if step == self.step else ""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTrainers(HostOrder):
    """Kill the trainers of this lineage's worker group on that host: they are stuck in a collective with a dead rank. Idempotent.

    `hanging`: only these ranks, and they are the cause: it is found out first where they were.
    `announced`: no rank has failed. Their node or another rank's was announced to go away, and they
    did not stop in time.
    """

    lineage: str
    reason: str
    attempt: int = 0  # a host ignores those of attempts that have been superseded
    hanging: tuple[int, ...] = ()
    announced: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(StampedOrder):
    """The host keeps copies of these pieces of a snapshot, and fetches those that it has not. It replaces the order before it.

    Attributes:
        pieces: (rank, a host that holds its piece).
        attempt, seq: order the orders; the same one again: failed copies may be tried again.
    """

    lineage: str
    step: int
    pieces: tuple[tuple[int, HostId], ...]

    @property
    def snapshot(self) -> SnapshotId:
        """What is to be copied."""
        return SnapshotId(self.lineage, self.step)
