"""Commands: out of `Coordinator.handle`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.entries import Intent, LiveStep, LogEntry
from raystate.core.formats.names import NOWHERE, Ask, HostId, SaveId, SnapshotId, lineage_order
from raystate.core.formats.replies import Failure, Reply

MOST_OLDER = 16  # restores in a row while storage takes nothing; older pasts are given up


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
class Answer:
    """Reply to a caller."""

    ask: Ask
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stamped:
    """Words of which only the newest counts, in any order of arrival."""

    attempt: int
    seq: int

    @property
    def stamp(self) -> tuple[int, int]:
        """(attempt, seq)"""
        return self.attempt, self.seq


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(_Stamped):
    """What a HostActor may reuse and what it tells its trainers. Ordered by (attempt, seq): an older one is ignored.

    Reuse rule: a slot with snapshot (l, s, n) is free iff that is not in `keep` and (l is older than lineage, and that is decided,
    or (s, n) in dead or (s, n) < stable).
    """

    lineage: str  # the current one; "" before the first join
    # Whether it is known what the current lineage goes on from. Before, a host may hold a newer
    # snapshot of an older lineage that it has not reported.
    decided: bool = False
    stable: tuple[int, int] = NOWHERE  # places, see SnapshotId
    dead: tuple[tuple[int, int], ...] = ()
    keep: tuple[SnapshotId, ...] = ()  # recovery base, queued and running durable saves
    interval: int = 1
    proposal: Proposal | None = None
    failure: Failure | None = None
    durable_step: int = -1
    save_errors: tuple[str, ...] = ()
    storage_fails: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Advise:
    """Give a HostActor this advice."""

    host: HostId
    advice: Advice


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidate(_Stamped):
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
        at = next((place for place, (one, _) in enumerate(past) if one == lineage), 0)
        return past[:at]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTrainers:
    """Kill the trainers of this lineage's worker group on that host: they are stuck in a collective with a dead rank. Idempotent.

    `hanging`: only these ranks, and they are the cause: it is found out first where they were.
    `announced`: no rank has failed. Their node or another rank's was announced to go away, and they
    did not stop in time.
    """

    host: HostId
    lineage: str
    reason: str
    attempt: int = 0  # a host ignores those of attempts that have been superseded
    hanging: tuple[int, ...] = ()
    announced: bool = False


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
        """What is to be written."""
        return SnapshotId(self.lineage, self.step, self.again)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(_Stamped):
    """The host keeps copies of these pieces of a snapshot, and fetches those that it has not. It replaces the order before it.

    Attributes:
        pieces: (rank, a host that holds its piece).
        attempt, seq: order the orders; the same one again: failed copies may be tried again.
    """

    host: HostId
    lineage: str
    step: int
    pieces: tuple[tuple[int, HostId], ...]
    again: int = 0

    @property
    def snapshot(self) -> SnapshotId:
        """What is to be copied."""
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
class CarryOut:
    """Publish or retire a step, as an open intent of the log says. Idempotent."""

    intent: Intent


@dataclass(frozen=True, slots=True, kw_only=True)
class Discard:
    """Remove what a failed or abandoned save left under its unique names. Best effort."""

    save: SaveId
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """This attempt is over, and its actor ends.

    Attributes:
        reason: why.
        by_attempt: None: the run is released. The HostActors end with their arenas, and what no step needs is removed from storage.
            Else the log is that attempt's: the storage is left alone.
        by_stranger: that attempt is of another cluster. Each question is answered with
            StaleAttemptError, the trainers here have been advised that their run is over, and the
            HostActors end. Else it is this run's next Coordinator, which answers these very
            trainers and has these very HostActors.
    """

    reason: str
    by_attempt: int | None = None
    by_stranger: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A line for the run's log. Every decision that a person might ask about has one."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


Command = (
    Answer | Advise | Invalidate | EndTrainers | Write | Copy | BuildPackage | Append | CarryOut | Discard
    | Finish | Log
)  # fmt: skip
