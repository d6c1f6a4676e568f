"""What one trainer decides at each save(): snapshot, make durable, skip, hold, stop. No traffic, no waiting for a slot.

A trainer speaks through its word (`TrainerWord`), its HostActor through its own (`HostWord`). The shell reads the host's word,
calls `on_save`, writes the word that the decision carries *before* it begins to stage, and writes `word()` again after `staged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from raystate.core.errors import StepOrderError, error_from_name
from raystate.core.messages import HostWord, Proposal, TrainerWord

REMEMBERED_DUE = 8

Action = Literal["none", "skip", "stage", "hold"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDecision:
    """What to do with the state that save() was given.

    Attributes:
        action: "stage" copies it into `slot`; "hold" keeps a copy on the device until `take_slot` gives a slot (it replaces the one
            held before, if any: see `dropped`); "skip": a snapshot was due but has no slot; "none": nothing was due.
        durable: what save() returns.
        slot: index of the granted slot, with "stage".
        wait: an acknowledged proposal is undecided at its step: read the host's word again and call `on_save` again with the same
            arguments, until a deadline. Nothing else of the decision holds then, but `word` has to be written.
        stop: this is the step at which all ranks stop: once it is durable the attempt ends with `Interrupted(reason)`.
        dropped: a durable step whose held copy is given up for this one; it will be reported as not durable.
        word: to be written into the trainer's cell now.
    """

    action: Action
    durable: bool
    slot: int | None
    reason: str
    wait: bool
    stop: bool
    dropped: int | None
    word: TrainerWord


class Trainer:
    """The decisions of one rank in one lineage.

    Args:
        rank, world: of the worker group.
        lineage: from JoinReply.
        snapshot_every: snapshot multiples of it; 0: only what will be durable.
        save_every_steps: durable is the first save() at or after each multiple; None: only forced and agreed saves.
        slots: slots of this trainer's set.
        grants: the host word's grants when the set was attached: those grants belong to the trainer before, and are void.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        lineage: str,
        *,
        snapshot_every: int = 1,
        save_every_steps: int | None = None,
        slots: int = 3,
        grants: Sequence[int] = (),
    ):
        self.rank = rank
        self.world = world
        self.lineage = lineage
        self.snapshot_every = snapshot_every
        self.save_every_steps = save_every_steps
        self.newest = -1  # of the last save(), or restored
        self.newest_kept = -1  # newest step that was staged or held, or restored: what close() asks to be durable
        self.phase: Literal["joined", "running", "closing", "failed"] = "joined"
        self.error = ""
        self.stopped_at: int | None = None
        self.held: int | None = None
        self._grants = list(grants) + [0] * (slots - len(grants))
        self._done = list(self._grants)
        self._staging: dict[int, int] = {}  # slot -> step
        self._due: tuple[int, ...] = ()
        self._next_due = self._due_after(0)
        self._ack_id = 0
        self._ack_ok = False
        self._ack_step = -1
        self._ack: Proposal | None = None  # the acknowledged proposal, until it is acted upon

    # ---------------------------------------------------------------- state

    def _due_after(self, step: int) -> int | None:
        every = self.save_every_steps
        return None if not every else (max(0, step) // every + 1) * every

    def restored(self, step: int) -> None:
        """All ranks have restored this step (-1: the run has none): counting begins there."""
        self.newest = self.newest_kept = step
        self.held = None
        self._due = ()
        self._next_due = self._due_after(step)
        self.phase = "running"

    def word(self) -> TrainerWord:
        """The trainer's word as of now."""
        pending = sorted(set(self._staging.values()) | ({self.held} if self.held is not None else set()))
        return TrainerWord(
            lineage=self.lineage,
            rank=self.rank,
            world=self.world,
            newest_step=self.newest,
            pending=tuple(pending),
            durable_due=self._due,
            done=tuple(self._done),
            ack_id=self._ack_id,
            ack_ok=self._ack_ok,
            ack_step=self._ack_step,
            phase=self.phase,
            error=self.error,
        )

    def _free_slot(self, host_word: HostWord | None) -> int | None:
        if host_word is None:
            return None
        for slot, grant in enumerate(host_word.grants[: len(self._done)]):
            if grant > self._done[slot] and slot not in self._staging:
                self._grants[slot] = grant
                return slot
        return None

    # ---------------------------------------------------------------- save()

    def on_save(self, step: int, *, force: bool = False, host_word: HostWord | None, stager_busy: bool = False) -> SaveDecision:
        """Decide about one call of save().

        Args:
            step: completed steps.
            force: make it durable, even if it equals the newest.
            host_word: the HostActor's word, None before it has written one.
            stager_busy: the copy of an earlier step is not finished.

        Raises:
            StepOrderError: the step is older than the newest one.
            RaystateError: the failure in the host's word (a barrier that timed out, a superseded attempt, …).
        """
        if host_word is not None and host_word.failure is not None:
            failure = host_word.failure
            raise error_from_name(failure.error, failure.message, dict(failure.details))
        if step < self.newest:
            raise StepOrderError(
                f"save of step {step} on rank {self.rank}: the newest step is {self.newest}",
                step=step,
                newest=self.newest,
                rank=self.rank,
            )
        wait, agreed = self._answer(step, None if host_word is None else host_word.proposal)
        if wait:
            return self._decide("none", False, None, f"step {step} waits for the outcome of a proposal", wait=True)
        again = step == self.newest
        stop = agreed is not None and agreed.kind == "stop"
        if again and not force and agreed is None:
            return self._decide("none", False, None, f"step {step} is the newest already")
        if again and step in self._due:
            return self._decide("none", stop, None, f"step {step} will be durable already", stop=stop)
        self.newest = step
        self.phase = "running"
        durable, why = self._is_due(step, force, agreed)
        if stop:
            self.stopped_at = step
        interval = 1 if host_word is None else max(1, host_word.interval)
        every = self.snapshot_every * interval
        if not durable and (every == 0 or step % every):
            return self._decide("none", False, None, "no snapshot due" if every == 0 else f"snapshots are multiples of {every}")
        slot = self._free_slot(host_word)
        if durable:
            self._due = (*self._due[-(REMEMBERED_DUE - 1) :], step) if step not in self._due else self._due
        if slot is not None and not stager_busy and not (durable and self.held is not None and self.held != step):
            self._staging[slot] = step
            self.newest_kept = step
            return self._decide("stage", durable, slot, why, stop=stop)
        lack = "the stager is busy" if stager_busy else "no slot is free"
        if not durable:
            return self._decide("skip", False, None, f"step {step} is skipped: {lack}")
        dropped = self.held if self.held is not None and self.held != step else None
        self.held = step
        self.newest_kept = step
        return self._decide("hold", True, None, f"{why}; {lack}: a copy waits on the device", stop=stop, dropped=dropped)

    def would_be_durable(self, step: int) -> bool:
        """Whether save(step) would be durable by the step rule."""
        return self._next_due is not None and step >= self._next_due and step > self.newest

    def _is_due(self, step: int, force: bool, agreed: Proposal | None) -> tuple[bool, str]:
        durable, why = False, f"snapshot of step {step}"
        if self._next_due is not None and step >= self._next_due:
            durable, why = True, f"step {step} is due: every {self.save_every_steps} steps"
            self._next_due = self._due_after(step)
        if agreed is not None:
            durable, why = True, f"all ranks {agreed.kind} at step {agreed.step}: {agreed.reason}"
        if force:
            durable, why = True, f"step {step} is forced"
        return durable, why

    def _decide(
        self,
        action: Action,
        durable: bool,
        slot: int | None,
        reason: str,
        *,
        wait: bool = False,
        stop: bool = False,
        dropped: int | None = None,
    ) -> SaveDecision:
        return SaveDecision(
            action=action, durable=durable, slot=slot, reason=reason, wait=wait, stop=stop, dropped=dropped, word=self.word()
        )

    # ---------------------------------------------------------------- stopping together

    def _answer(self, step: int, proposal: Proposal | None) -> tuple[bool, Proposal | None]:
        """Acknowledge or refuse; gives (wait here, the agreed proposal to act upon at this step)."""
        if proposal is not None and proposal.id > self._ack_id and proposal.state == "proposed":
            self._ack_id = proposal.id
            self._ack_ok = step < proposal.step
            self._ack_step = step
            self._ack = proposal if self._ack_ok else None
        mine = self._ack
        if mine is None:
            return False, None
        if proposal is not None and (proposal.id > mine.id or (proposal.id == mine.id and proposal.state == "withdrawn")):
            self._ack = None
            return False, None
        if step < mine.step:
            return False, None
        # Without news of it (another HostActor may not know it yet) the trainer waits: the others may have been told to act.
        if proposal is None or proposal.id != mine.id or proposal.state == "proposed":
            return True, None
        self._ack = None
        return False, proposal

    def reached(self, step: int, host_word: HostWord | None) -> tuple[bool, bool]:
        """For reached_preemption(step): (True if all ranks stop here, True if that is undecided: ask again).

        It answers proposals like save() does, so `word()` has to be written afterwards.
        """
        if self.stopped_at is not None:
            return step >= self.stopped_at, False
        kept = self._ack
        wait, agreed = self._answer(step, None if host_word is None else host_word.proposal)
        if agreed is not None:
            self._ack = kept  # save() acts upon it
        return agreed is not None and agreed.kind == "stop", wait

    # ---------------------------------------------------------------- slots

    def new_slots(self, slots: int) -> None:
        """The trainer was allotted another set: what was granted of the one before is gone with it."""
        self._grants = [0] * slots
        self._done = [0] * slots
        self._staging.clear()

    def hold_again(self, step: int) -> None:
        """The slot of a durable step is gone (`new_slots`): its copy waits on the device for another."""
        self.held = step

    def staged(self, slot: int, step: int) -> None:
        """The slot's header is written: it is the host's again."""
        if self._staging.get(slot) != step:
            raise ValueError(f"slot {slot} is not being staged with step {step}")
        del self._staging[slot]
        self._done[slot] = self._grants[slot]

    def released(self, slot: int) -> None:
        """Staging failed, or a granted slot is handed back unused."""
        self._staging.pop(slot, None)
        self._done[slot] = max(self._done[slot], self._grants[slot])

    def take_slot(self, host_word: HostWord | None, *, stager_busy: bool = False) -> tuple[int, int] | None:
        """A slot for the held copy as (slot, step), or None. The step stays pending until `staged`."""
        if self.held is None or stager_busy:
            return None
        slot = self._free_slot(host_word)
        if slot is None:
            return None
        step, self.held = self.held, None
        self._staging[slot] = step
        return slot, step

    def failed(self, error: str) -> None:
        """The user's code has raised."""
        self.phase = "failed"
        self.error = error

    def closing(self) -> None:
        self.phase = "closing"
