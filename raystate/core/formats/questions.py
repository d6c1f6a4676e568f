"""Questions of trainers and the driver to the Coordinator, and what ranks answer. Each that carries an `ask` gets a reply."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from raystate.core.formats.declared import Event
from raystate.core.formats.names import Ask, HostId, SnapshotId, short


def _steps(saves: Iterable[SnapshotId]) -> str:
    return ", ".join(str(one.step) for one in saves) or "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class _OfRank(Event):
    """What a rank asks or answers, in its lineage. `word`: number of its last word before that."""

    ask: Ask
    lineage: str
    rank: int
    word: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Event):
    """A rank of a new worker group has constructed its StateManager.

    Attributes:
        ages: how many seconds ago the start had come so far, by name: "called" (`fit` was: earlier groups may have trained since),
            "asked" (the launcher wanted this group), "placed" (the worker's process was there), "process" (it had started),
            "function" (the training function was called), "manager" (the constructor was). Those that are known.
    """

    ask: Ask
    group: str
    rank: int
    world: int
    host: HostId
    ages: tuple[tuple[str, float], ...] = ()

    def words(self) -> str:
        return f"rank {self.rank} of {self.world} joins on host {short(self.host)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreAsked(_OfRank):
    """Collective. `step`: exactly this one, or None for the newest."""

    step: int | None = None
    rollback: bool = False

    def words(self) -> str:
        what = "the newest step" if self.step is None else f"step {self.step}"
        return f"rank {self.rank} asks to restore {what}{', giving up newer ones' if self.rollback else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTried(_OfRank):
    """Collective: the outcome of a RestoreChoice on one rank. Not ok: `error` says what was damaged or unreachable.

    Attributes:
        lineage: the one that the rank has asked from, which goes on until the restore is settled.
        mistaken: the step is fine, but the rank's reference does not fit it. The rank raises that,
            and no rank restores the step.
        requests: to storage that its process has made since the restore before was settled, by kind: see `observe.counted.requests_in`.
    """

    step: int
    begins: str  # of the choice: two attempts may have made one each
    ok: bool
    error: str = ""
    damaged: bool = True  # not ok: the bytes are bad (another copy or step is used); False: they could not be reached
    tier: str = ""  # where this rank got its pieces: "memory", "peer", "storage", "source" or "init"
    mistaken: bool = False
    requests: tuple[tuple[str, float], ...] = ()

    def words(self) -> str:
        if not self.ok:
            return f"rank {self.rank} could not restore step {self.step}: {self.error}"
        if self.mistaken:
            return f"rank {self.rank} could not restore step {self.step}, by a mistake of its caller"
        what = f"step {self.step}{f' from {self.tier}' if self.tier else ''}" if self.step >= 0 else "nothing: the run has no step"
        return f"rank {self.rank} has restored {what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushAsked(_OfRank):
    """Answered once each of the `promised` snapshots is durable or can't become so.

    `broken`: promised ones whose copy on this rank came to nothing, and why. Without `wait` the answer is what is known now.
    """

    promised: tuple[SnapshotId, ...] = ()
    broken: tuple[tuple[SnapshotId, str], ...] = ()
    wait: bool = True

    def words(self) -> str:
        asks = "waits until its" if self.wait else "asks whether its"
        return f"rank {self.rank} {asks} saves are durable: {_steps(self.promised)}"

    def about(self) -> Collection[int | str]:
        return {one.step for one in self.promised}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveAsked(_OfRank):
    """Collective: close(). The newest kept snapshot becomes durable, then the run is released.

    Attributes:
        last: what the rank has kept last, or restored; without a lineage: restored from storage; None: nothing.
        promised, broken: as in FlushAsked; the answer names those that are not durable.
    """

    last: SnapshotId | None = None
    promised: tuple[SnapshotId, ...] = ()
    broken: tuple[tuple[SnapshotId, str], ...] = ()

    def words(self) -> str:
        saves = f", and it waits for its saves: {_steps(self.promised)}" if self.promised else ""
        return f"rank {self.rank} closes; its last step is {'none' if self.last is None else self.last.step}{saves}"

    def about(self) -> Collection[int | str]:
        return {one.step for one in (*self.promised, self.last) if one is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseAsked(_OfRank):
    """The driver, or a trainer that has failed, ends the run: newest complete snapshot durable first, then Finish. Reply: LeaveReply.

    `lineage`, `rank`, `word`: of the trainer that asks; "" for the driver.
    """

    reason: str
    lineage: str = ""
    rank: int = -1

    def words(self) -> str:
        return f"the end of the run is asked: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteAsked(Event):
    """Somebody wants this durable step removed."""

    ask: Ask
    step: int

    def words(self) -> str:
        return f"somebody asks to delete step {self.step}"
