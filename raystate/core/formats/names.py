"""What things are called: hosts, saves, lineages, snapshots, questions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple, NewType

HostId = NewType("HostId", str)  # the Ray node id, hex
SaveId = NewType("SaveId", str)
Ask = NewType("Ask", str)  # names a request of a trainer or the driver; its reply carries the same

MOST_TOLD = 10  # steps that an error lists

Tier = Literal["memory", "storage", "none"]  # "none": the run has no step


class Lineage(NamedTuple):
    """One unbroken line of training, from a start or a restore to the next; `str()` is what slots and messages carry.

    Later ones are greater.

    Attributes:
        attempt: of the Coordinator that drew it.
        counter: counts the lineages of that attempt.
        group: random name of the start of the worker group, drawn by its launcher; the same in all its lineages.
    """

    attempt: int
    counter: int
    group: str

    def __str__(self) -> str:
        return f"{self.attempt}.{self.counter}.{self.group}"


@lru_cache(maxsize=1024)
def lineage_order(text: str) -> Lineage:
    """The lineage of this name, to be compared with others; "" is before all."""
    if not text:
        return Lineage(0, 0, "")
    attempt, counter, group = text.split(".", 2)
    return Lineage(int(attempt), int(counter), group)


def group_of(lineage: str) -> str:
    """The worker group that trains in it; "" for no lineage."""
    return lineage_order(lineage).group


def short(host: HostId) -> str:
    """Enough of a node's id to know it by."""
    return host[:8] if len(host) > 16 else host


def told_newest(ones: Sequence[object]) -> str:
    """Steps or their names, oldest first, in an error: all of a few, else how many there are, with the newest."""
    newest = list(ones[-MOST_TOLD:])
    return f"{len(ones):,}, the newest: {newest}" if len(ones) > MOST_TOLD else str(newest)


class SnapshotId(NamedTuple):
    """Names one state: that of a step of a lineage, on all ranks.

    Attributes:
        lineage: the line of training.
        step: completed steps.
    """

    lineage: str
    step: int

    @property
    def order(self) -> tuple[Lineage, int]:
        """Newer snapshots are greater, also across lineages."""
        return (lineage_order(self.lineage), self.step)


def save_order(save: str) -> tuple[int, int]:
    """(attempt, counter) of a save id: later saves are greater. Raises ValueError for anything else."""
    attempt, _, counter = save.removeprefix("a").partition("k")
    return int(attempt), int(counter)


def cluster_of(writer: str) -> str:
    """The part of a writer's id that all Coordinators of one run in one cluster share: all but the last, random one."""
    return writer.rpartition(".")[0]
