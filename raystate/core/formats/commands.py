"""Commands: out of `Coordinator.handle`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.entries import Intent, LiveStep, LogEntry
from raystate.core.formats.names import Ask, HostId, SaveId, SnapshotId
from raystate.core.formats.orders import HostOrder
from raystate.core.formats.replies import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Reply to a caller."""

    ask: Ask
    reply: Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """The host writes its owned shards of a snapshot under the save's unique names. Executed at most once per save id."""

    host: HostId
    save: SaveId
    lineage: str
    step: int
    ranks: tuple[int, ...]  # whose slots on this host

    @property
    def snapshot(self) -> SnapshotId:
        """What is to be written."""
        return SnapshotId(self.lineage, self.step)


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
            Else the log is that attempt's, or this attempt is given up by its user: the storage is left alone.
        by_stranger: that attempt is of another cluster, or the run is given up. Each question is answered with
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
    step: int = -1  # that it is about; -1: about no single step
    kind: str = ""  # it says why a command of this class was given
    is_routine: bool = False  # such a line comes with each durable save: no news for those who watch the run


Command = Answer | HostOrder | Write | BuildPackage | Append | CarryOut | Discard | Finish | Log
