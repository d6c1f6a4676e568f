"""What one trainer answers to proposals, and where it stops: all ranks act at one step, or none does."""

from __future__ import annotations

from dataclasses import dataclass

from raystate.core.formats.orders import Proposal


@dataclass(slots=True)
class OwnAnswers:
    """Its values are replaced and never changed, so that a shallow copy of it is a memento.

    Attributes:
        id, ok, step: the newest answer: to which proposal, whether it agrees, and the step at which this rank was.
        agreed: the proposal that it agrees to, until it is acted upon.
        stopped_at: the step at which all ranks stop.
        told_to_stop: why, once `reached` has said so.
    """

    id: int = 0
    ok: bool = False
    step: int = -1
    agreed: Proposal | None = None
    stopped_at: int | None = None
    told_to_stop: str = ""

    def begin(self) -> None:
        """In a new lineage nothing is waited for: a new Coordinator must not count what was agreed to before."""
        self.ok, self.agreed, self.stopped_at, self.told_to_stop = False, None, None, ""

    def answer(self, step: int, proposal: Proposal | None) -> tuple[bool, Proposal | None]:
        """Acknowledge or refuse; gives (wait here, the agreed proposal to act upon at this step)."""
        if proposal is not None and proposal.id > self.id and proposal.state == "proposed":
            # A step that is made already can't be agreed to: this rank would act at a later one.
            # (test_simulator.test_planted_bug_is_found, "stop step overtaken")
            self.id, self.step, self.ok = proposal.id, step, step < proposal.step
            self.agreed = proposal if self.ok else None
        mine = self.agreed
        if mine is None:
            return False, None
        if proposal is not None and (proposal.id > mine.id or (proposal.id == mine.id and proposal.state == "withdrawn")):
            self.agreed = None
            return False, None
        if step < mine.step:
            return False, None
        # Without news of it (another HostActor may not know it yet) the trainer waits: the others
        # may have been told to act.
        # (test_simulator.test_planted_bug_is_found, "stop without waiting for the others")
        if proposal is None or proposal.id != mine.id or proposal.state == "proposed":
            return True, None
        self.agreed = None
        return False, proposal

    def reached(self, step: int, proposal: Proposal | None) -> tuple[bool, bool]:
        """(True if all ranks stop at this step, True if that is undecided: ask again)."""
        if self.stopped_at is not None:
            return step >= self.stopped_at, False
        kept = self.agreed
        wait, agreed = self.answer(step, proposal)
        if agreed is None:
            return False, wait
        self.agreed = kept  # save() acts upon it
        if agreed.kind == "stop":
            self.told_to_stop = agreed.text
        return agreed.kind == "stop", wait
