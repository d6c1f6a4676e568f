"""What can be restored now: complete snapshots in memory, published steps in storage, and which of them turned out damaged."""

from __future__ import annotations

from raystate.core.coordinator.context import named, step_text
from raystate.core.coordinator.journal import Journal
from raystate.core.coordinator.memory import Memory, Snap
from raystate.core.coordinator.saves import Saves
from raystate.core.formats.names import SnapshotId, Tier
from raystate.core.formats.replies import RestoreChoice


class Restorable:
    """Offers the steps of all tiers to one restore, without those that it has tried in vain."""

    def __init__(self, memory: Memory, journal: Journal, saves: Saves):
        self._memory = memory
        self._journal = journal
        self._saves = saves
        self._excluded: set[tuple[Tier, SnapshotId]] = set()
        self._damaged: list[tuple[int, str]] = []
        self._aside: list[tuple[int, str]] = []  # damaged in storage, to be set aside once an older step is chosen

    def forget_damage(self) -> None:
        """Another restore begins: it may try everything."""
        self._excluded = set()
        self._damaged = []
        self._aside = []

    def exclude(self, choice: RestoreChoice, why: str) -> None:
        """The ranks could not restore this choice: it is not offered again."""
        self._excluded.add((choice.tier, choice.snapshot))
        self._damaged.append((choice.step, f"{choice.tier}: {why}"))
        if choice.tier == "storage":
            self._aside.append((choice.step, why))

    @property
    def damaged(self) -> tuple[tuple[int, str], ...]:
        """What was tried in vain, as (step, why)."""
        return tuple(self._damaged)

    def take_damaged_in_storage(self) -> list[tuple[int, str]]:
        """The stored steps that were tried in vain since the last call, as (step, why)."""
        aside, self._aside = self._aside, []
        return aside

    # ---------------------------------------------------------------- what there is

    def stored(self) -> list[int]:
        """Published steps, oldest first."""
        return [step for step in self._journal.published if ("storage", SnapshotId("", step)) not in self._excluded]

    def newest_in_memory(self) -> Snap | None:
        """The best complete snapshot if nothing in storage is better."""
        found = self._in_memory()
        return found[0] if found and not self.is_behind(found[0], self.stored()) else None

    def in_memory(self, want: int | None) -> Snap | None:
        """The snapshot to restore from memory: of the step `want`, or the newest; None if storage
        has it, or no tier."""
        if want is None:
            return self.newest_in_memory()
        snap = next((snap for snap in self._in_memory() if snap.step == want), None)
        if snap is not None and want in self.stored() and not self._journal.is_live(snap.id):
            return None  # other bytes under the same number: the durable ones are the run's
        return snap

    def all_in_memory(self) -> list[int]:
        """Steps that are complete in memory, damaged ones included; for messages."""
        return sorted({snap.step for snap in self._memory.candidates()})

    def why_not(self, want: int) -> tuple[str, str, list[int]]:
        """Why the step `want` can't be restored: the error's name, its text, and the steps that
        there are."""
        stored, held = self.stored(), self.all_in_memory()
        damaged = [why for step, why in self._damaged if step == want]
        error = "CorruptCheckpointError" if damaged else "StepNotFoundError"
        text = f"step {want} can't be restored: {damaged[-1]}" if damaged else f"step {want} does not exist"
        return error, f"{text}; durable steps: {stored}, in memory: {held}", sorted({*stored, *held})

    def unsettled(self, want: int | None) -> str:
        """Which commit or publication has to end before a choice; "" if none."""
        journal, job = self._journal, self._saves.running
        committing = job is not None and job.phase in ("packaging", "committing")
        best = self.newest_in_memory() if want is None else None
        if best is not None:
            on_the_way = [*journal.publishing, *([job.key.step] if job is not None and committing else [])]
            if all(step <= best.step for step in on_the_way):
                # Memory has a newer step, whether they succeed or not: a restore doesn't wait for
                # slow storage.
                return ""
        if journal.publishing:
            return f"the publication of steps {named([*map(str, journal.publishing)])} ({'; '.join(journal.troubles[-1:]) or 'under way'})"
        if journal.busy or committing:
            return f"the commit of step {job.key.step}" if job is not None else "a log entry"
        return ""

    def _in_memory(self) -> list[Snap]:
        return [snap for snap in self._memory.candidates() if ("memory", snap.id) not in self._excluded]

    def _rest_of(self, step: int) -> Snap | None:
        """What is left in memory of the very snapshot that is stored as this step; None: nothing that can be used."""
        stored = self._journal.live.get(step)
        snap = self._memory.snaps.get(stored.snapshot) if stored is not None and stored.lineage else None
        if snap is None or not snap.uniform or ("memory", snap.id) in self._excluded:
            return None
        return snap if self._memory.believed(snap.lineage, snap.step) else None

    def is_behind(self, snap: Snap, stored: list[int]) -> bool:
        """Never an older memory step over a newer durable one; of equal bytes memory is faster.

        Other bytes under the same number could never become durable: a run that has them as its
        last step could not end.
        (test_simulator.test_planted_bug_is_found, "older memory step over newer durable one")
        """
        return bool(stored) and (stored[-1] > snap.step or (stored[-1] == snap.step and not self._journal.is_live(snap.id)))

    # ---------------------------------------------------------------- the choice

    def choice(self, begins: str, snap: Snap | None, step: int | None) -> RestoreChoice:
        """What the ranks are told to restore.

        Args:
            begins: the lineage that begins with the restore.
            snap: to restore from memory.
            step: to restore from storage, if there is no `snap`; None: the run has no step.
        """
        if snap is not None:
            return RestoreChoice(
                tier="memory",
                step=snap.step,
                begins=begins,
                lineage=snap.lineage,
                holders=tuple(snap.holders().items()),
                world=snap.world,
                stored=snap.step in self.stored() and self._journal.is_live(snap.id),
                reason=f"step {snap.step} is complete in memory (lineage {snap.lineage}); newest durable step: "
                f"{step_text(self._journal.durable_step)}",
                set_aside=self.damaged,
            )
        if step is None:
            return RestoreChoice(tier="none", step=-1, begins=begins, reason="the run has no step yet", set_aside=self.damaged)
        best = self._memory.candidates()[:1]
        rest = self._rest_of(step)
        return RestoreChoice(
            tier="storage",
            step=step,
            holders=tuple(rest.holders().items()) if rest is not None else (),
            world=rest.world if rest is not None else 0,
            stored=True,
            held=rest.id if rest is not None else None,
            begins=begins,
            save=self._journal.live[step].save,
            reason=f"step {step} is durable; newest complete in memory: {best[0].step if best else 'none'}",
            set_aside=self.damaged,
        )
