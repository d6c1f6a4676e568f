"""What the ranks of a group say when they restore: which step they want, and what an earlier attempt had chosen for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from raystate.core.coordinator.context import Barrier
from raystate.core.coordinator.group import Group
from raystate.core.formats.events import RestoreAsked, RestoreTried
from raystate.core.formats.names import Ask, lineage_order


@dataclass(slots=True, eq=False)
class RestoreAsks(Barrier):
    """The questions of one restore, by rank."""

    _wishes: dict[int, tuple[int | None, bool]] = field(default_factory=dict[int, tuple[int | None, bool]])  # (step, rollback)
    _words: dict[int, int] = field(default_factory=dict[int, int])  # rank -> number of its last word before it asked
    # Rank that waits for the outcome of an earlier attempt's choice -> its last word.
    _waiting: dict[int, int] = field(default_factory=dict[int, int])
    _resumed: int = -1  # the step that an earlier attempt had chosen for this group
    _resumed_in: str = ""  # the lineage in which that restore was asked for
    _asked_in: str = ""  # newest lineage that a rank has asked from
    _lineages: dict[int, str] = field(default_factory=dict[int, str])  # rank -> the one it has asked from

    # ---------------------------------------------------------------- they ask

    def asked(self, event: RestoreAsked, group: Group) -> None:
        """A rank asks for a restore."""
        self.add(event.rank, event.ask)
        self._wishes[event.rank] = (event.step, event.rollback)
        self._lineages[event.rank] = event.lineage
        self._asked_in = max(self._asked_in, event.lineage, key=lineage_order)
        # A later lineage's words don't tell of the one before.
        self._words[event.rank] = event.word if event.lineage == group.lineage else 0

    def resume(self, event: RestoreTried) -> None:
        """A rank tells how the choice of an earlier attempt went, and waits for the outcome."""
        self._resumed_in = max(self._resumed_in, event.lineage, key=lineage_order)
        self._resumed = event.step if event.ok and event.step >= 0 else self._resumed
        self._wishes[event.rank] = (event.want, event.rollback)
        self.add(event.rank, event.ask)
        self._lineages[event.rank] = event.lineage
        self._words[event.rank] = 0  # it has written none since it asked
        self._waiting[event.rank] = event.word

    def take(self) -> list[Ask]:
        """All who wait, for an answer now; then they are awaited anew."""
        asks, self.asks = self.everybody(), {}
        return asks

    # ---------------------------------------------------------------- what is known from them

    def is_older(self, lineage: str) -> bool:
        """Whether a rank that asks from this lineage has finished the restore that was resumed:
        words of that one are old."""
        return bool(self._resumed_in) and has_passed(lineage, self._resumed_in)

    def is_over(self, lineage: str) -> bool:
        """Whether some rank has finished a restore that was asked for in this lineage, and has asked for another since."""
        return bool(self._asked_in) and has_passed(self._asked_in, lineage)

    def differences(self) -> str:
        """How the ranks differ in what they want; "" if they agree."""
        if len(set(self._wishes.values())) <= 1:
            return ""
        return ", ".join(f"rank {rank}: step={step}, rollback={back}" for rank, (step, back) in sorted(self._wishes.items()))

    def asked_anew(self) -> list[int]:
        """Ranks that ask while others wait for the outcome of an earlier attempt's choice."""
        return [rank for rank in sorted(self._wishes) if self._waiting and rank not in self._waiting]

    def differs(self, event: RestoreAsked) -> bool:
        """Whether the rank wants something else than it did, or than the others do: it asks for a restore after this one."""
        if event.word < self.word(event.rank):
            return False  # it is older than what is known
        return bool(self._wishes) and (event.step, event.rollback) != next(iter(self._wishes.values()))

    @property
    def named(self) -> tuple[int | None, bool]:
        """(step, rollback) that all ask for; None: the newest."""
        return next(iter(self._wishes.values()), (None, False))

    def wanted(self) -> tuple[int | None, bool]:
        """(step, rollback) that all want. Of the newest it is the one that an earlier attempt had chosen; None: the newest."""
        step, rollback = self.named
        return (step if step is not None or self._resumed < 0 else self._resumed), rollback

    def lineage(self, rank: int) -> str:
        """The one that the rank has asked from: what it says of another restore is late."""
        return self._lineages.get(rank, "")

    def word(self, rank: int) -> int:
        """Number of the last word that the rank wrote before it asked."""
        return self._words.get(rank, 0)

    def gone_on(self, group: Group) -> list[int]:
        """Ranks that waited for the outcome of an earlier attempt's choice, had it from there, and have gone on."""
        return [rank for rank, word in self._waiting.items() if word and rank in group.seen and group.seen[rank].number > word]


def has_passed(lineage: str, begun: str) -> bool:
    """Whether a rank that asks from `lineage` has finished the restore that began in `begun`."""
    return lineage_order(lineage) > lineage_order(begun)
