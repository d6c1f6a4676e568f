"""What one trainer knows of the steps in storage: those of other pasts, which save() refuses, and what is durable of its own."""

from __future__ import annotations

from dataclasses import dataclass

from raystate.core.formats.errors import StepOrderError

_WAYS_OUT = (
    "restore(step=…, rollback=True) retires the newer steps, restore() goes on from the newest, and another `storage` begins a run of "
    "its own"
)


@dataclass(slots=True)
class OwnPast:
    """Its values are replaced and never changed, so that a shallow copy of it is a memento.

    Attributes:
        stored: newest step in storage if this training has restored none of them; -1: it has, or there is none.
        ahead: steps in storage that are newer than what this training has restored.
        safe: the step that is promised, or was durable when it was restored; -1: none.
        first: nothing is durable or promised yet.
    """

    stored: int = -1
    ahead: frozenset[int] = frozenset()
    safe: int = -1
    first: bool = False

    def refuse_others(self, step: int, *, rank: int, newest: int) -> None:
        """Refuse a step that is older than the newest one, or lies in storage from another past.

        Args:
            step, rank: of the save.
            newest: step of this training.

        Raises:
            StepOrderError: names the ways out.
        """
        if step < newest:
            text = f"the newest step is {newest}. Begin the loop at `restored.step`; to go back, restore(step=…, rollback=True)"
        elif step <= self.stored:
            newest = self.stored
            text = f"storage holds steps up to {newest} of an earlier training, and this one has restored none of them: {_WAYS_OUT}"
        elif step in self.ahead:
            newest, text = max(self.ahead), f"storage holds that step of another past: {_WAYS_OUT}"
        else:
            return
        raise StepOrderError(f"save of step {step} on rank {rank}: {text}", step=step, newest=newest, rank=rank)

    def promised(self, step: int) -> None:
        """save() returns True for it."""
        self.safe, self.first = step, False
