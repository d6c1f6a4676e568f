"""The worker group that trains now, in one of its lineages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from raystate.core.formats.names import HostId, Lineage, group_of, lineage_order
from raystate.core.formats.replies import RestoreSettled
from raystate.core.formats.reports import TrainerWord


@dataclass(slots=True, eq=False)
class Group:
    """A worker group in one of its lineages."""

    lineage: str
    world: int | None  # None while unknown: a Coordinator that took over learns it from reports
    hosts: dict[int, HostId]  # by rank
    first_s: float  # when the Coordinator heard of it
    adopted: bool  # an earlier attempt drew its lineage
    alive: bool = True
    why_ended: str = ""
    announced: bool = False  # it has ended as a node goes away
    hanging: frozenset[int] = frozenset()  # ranks whose hosts were asked to end them for it
    decided: bool = False  # it has restored, or has shown that it doesn't
    restored: RestoreSettled | None = None  # what it has restored in this lineage
    restoring: bool = False  # its ranks read what was chosen: they make no steps
    seen: dict[int, TrainerWord] = field(default_factory=dict[int, TrainerWord])  # by rank
    left: set[int] = field(default_factory=set[int])  # ranks that have gone on purpose
    acked: int = 0  # newest proposal that a rank has agreed to
    moved_s: dict[int, float] = field(default_factory=dict[int, float])  # when the rank's newest step last changed
    lived_s: dict[int, float] = field(default_factory=dict[int, float])  # when it last said a word: by any call of its manager
    newest: int = -1  # of any rank

    @property
    def order(self) -> Lineage:
        """Its lineage's place in time."""
        return lineage_order(self.lineage)

    @property
    def name(self) -> str:
        """The same in all lineages of the worker group, drawn by its launcher."""
        return group_of(self.lineage)

    @property
    def all_seen(self) -> bool:
        """Whether a report has told of every rank."""
        return self.world is not None and len(self.seen) >= self.world

    def decide(self) -> None:
        """It has restored, or has shown that it does not."""
        self.decided = True

    def heard(self, rank: int, word: int) -> bool:
        """Whether a report has told of the rank's word with this number, or of a later one.

        Judged on an older report, a question would miss what the rank had saved when it asked.
        (test_simulator.test_planted_bug_is_found, "questions judged on older reports")
        """
        seen = self.seen.get(rank)
        return word == 0 or (seen is not None and seen.number >= word)

    def first_unheard(self, word_of: Callable[[int], int]) -> int | None:
        """A rank whose word with that number no report has told of yet; None: there is none."""
        return next((rank for rank in range(self.world or 0) if not self.heard(rank, word_of(rank))), None)
