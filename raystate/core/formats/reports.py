"""What trainers and hosts say of themselves: in control words (shared memory) and in reports to the Coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.declared import Failure
from raystate.core.formats.names import HostId, SnapshotId
from raystate.core.formats.orders import Advice, Invalidate, Proposal

# Causes in `TrainerWord.spent`; that of a section is `SECTION` and its name.
SAVES, RESTORE, COMPILATION, SECTION = "saves", "restore", "compilation", "section:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """One trainer's complete piece of a snapshot, held in its host's arena."""

    rank: int
    world: int
    lineage: str
    step: int
    layout: str  # hash of the whole state's layout (tree, shapes, dtypes, shardings); equal on all ranks of a snapshot
    promised: bool  # save() returned True for it
    nbytes: int = 0
    local: int = 0  # core.formats.local_values.digest of what the rank holds for itself, to be equal on all; 0: not said

    @property
    def id(self) -> SnapshotId:
        """The snapshot that it is a piece of."""
        return SnapshotId(self.lineage, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWord:
    """Written by one trainer only, read by its HostActor, which reports it. `number` grows with each word of a process, over its lineages
    too; questions name the word that they were asked after."""

    lineage: str
    rank: int
    world: int
    number: int = 0
    newest_step: int = -1  # of the last save() call, or restored; -1: none
    pending: tuple[int, ...] = ()  # steps it is still staging
    done: tuple[int, ...] = ()  # per slot: the grant number that was used up (slot staged, or handed back)
    ack_id: int = 0  # newest proposal it has answered; 0: none
    ack_ok: bool = False
    ack_step: int = -1  # its step when it answered
    phase: Literal["joined", "running", "closing", "failed"] = "joined"
    error: str = ""  # phase "failed": the user's exception, one line
    stride: int = 1  # steps between its last two calls
    step_s: float = 0.0  # seconds that an undisturbed step takes; 0.0: not known
    snapshot_s: float | None = None  # seconds that a snapshot costs the steps; None: not known
    save_s: float | None = None  # seconds that a durable save costs them; None: not known
    # Of this process since it joined, over its lineages, when the word was made. Sums, so that a lost word costs nothing.
    steps: int = 0  # that it has made
    lived_s: float = 0.0
    spent: tuple[tuple[str, float], ...] = ()  # seconds of the training thread that were no steps, by cause; they add up
    reached: tuple[tuple[int, float], ...] = ()  # (step, CLOCK_MONOTONIC of its node) at a few calls of save() that snapshotted
    section: str = ""  # the section with a time-out of its own that the training thread is in; "": none
    section_s: float = 0.0  # that time-out


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSummary:
    """One HostActor's report: everything it holds and sees, so that a lost report costs nothing. `seq` grows per incarnation."""

    host: HostId
    incarnation: str
    seq: int
    staged: tuple[Staged, ...] = ()
    trainers: tuple[TrainerWord, ...] = ()
    restore: Invalidate | None = None  # newest one it has applied
    advised: tuple[int, int] | None = None  # (attempt, seq) of the newest Advice it has; None: unknown
    proposal: Proposal | None = None  # the last one it has shown to its trainers: a new Coordinator has to go on with it
    attempt: int | None = None  # newest attempt it has heard of, and whose predecessors it ignores; None: unknown
    domain: str = ""  # what it is lost together with; "": nothing else
    machine: str = ""  # name of its machine, for people
    no_copies: str = ""  # why it can't keep copies for others; "": it can
    clock_s: float = 0.0  # CLOCK_MONOTONIC of the node when it reported
    counts: tuple[tuple[str, float], ...] = ()  # what this incarnation has counted so far, by name


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWord:
    """Written by the HostActor only, read by one trainer. A slot is the trainer's while grants[i] > done[i]."""

    grants: tuple[int, ...] = ()
    interval: int = 1  # steps from one snapshot to the next (times snapshot_every_steps, where that is a number)
    proposal: Proposal | None = None
    failure: Failure | None = None  # raised by the next save(): BarrierTimeoutError, StaleAttemptError, …
    durable_step: int = -1  # newest published step
    save_errors: tuple[str, ...] = ()  # failures of storage and lost steps since the last durable step, newest last
    storage_fails: bool = False  # since the last durable step it has failed or stood still, which is more than being slow
    advice: tuple[int, int] = (0, 0)  # (attempt, seq) of the Advice that it comes from: older news than an answer is ignored

    @classmethod
    def saying(cls, grants: tuple[int, ...], advice: Advice | None) -> HostWord:
        """The word by which a host tells a trainer its grants and the Coordinator's advice."""
        if advice is None:
            return cls(grants=grants)
        return cls(
            grants=grants,
            interval=advice.interval,
            proposal=advice.proposal,
            failure=advice.failure,
            durable_step=advice.durable_step,
            save_errors=advice.save_errors,
            storage_fails=advice.storage_fails,
            advice=advice.stamp,
        )
