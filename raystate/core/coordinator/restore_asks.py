"""The steps that the ranks of a group ask for when they restore."""

from __future__ import annotations

from dataclasses import dataclass, field

from raystate.core.coordinator.context import Barrier
from raystate.core.coordinator.group import Group
from raystate.core.formats.names import Ask
from raystate.core.formats.questions import RestoreAsked


@dataclass(slots=True, eq=False)
class RestoreAsks(Barrier):
    """The questions of one restore, by rank."""

    _wishes: dict[int, tuple[int | None, bool]] = field(default_factory=dict[int, tuple[int | None, bool]])  # (step, rollback)
    _words: dict[int, int] = field(default_factory=dict[int, int])  # rank -> number of its last word before it asked

    def asked(self, event: RestoreAsked, group: Group) -> None:
        """A rank asks for a restore."""
        self.add(event.rank, event.ask)
        self._wishes[event.rank] = (event.step, event.rollback)
        # A later lineage's words don't tell of the one before.
        self._words[event.rank] = event.word if event.lineage == group.lineage else 0

    def take(self) -> list[Ask]:
        """All who wait, for an answer now; then they are awaited anew."""
        asks, self.asks = self.everybody(), {}
        return asks

    def differences(self) -> str:
        """How the ranks differ in what they want; "" if they agree."""
        if len(set(self._wishes.values())) <= 1:
            return ""
        return ", ".join(f"rank {rank}: step={step}, rollback={back}" for rank, (step, back) in sorted(self._wishes.items()))

    def differs(self, event: RestoreAsked) -> bool:
        """Whether the rank wants something else than it did, or than the others do: it asks for a restore after this one."""
        if event.word < self.word(event.rank):
            return False  # it is older than what is known
        return bool(self._wishes) and (event.step, event.rollback) != self.wanted

    @property
    def wanted(self) -> tuple[int | None, bool]:
        """(step, rollback) that all ask for; None: the newest."""
        return next(iter(self._wishes.values()), (None, False))

    def word(self, rank: int) -> int:
        """Number of the last word that the rank wrote before it asked."""
        return self._words.get(rank, 0)
