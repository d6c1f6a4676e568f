"""What one trainer decides at each save(): snapshot, make durable, skip, hold, stop. No traffic, no waiting for a slot.

A trainer speaks through its word (`TrainerWord`), its HostActor through its own (`HostWord`). The
shell reads the host's word and calls `on_save`. It writes the word that the decision carries
*before* it begins to stage, and `word()` again after `staged`. A shell that can't do what was
decided puts the machine back as it was (`memento`, `put_back`): a save that raises leaves no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Literal

from raystate.core.formats.errors import InvalidTransitionError, error_from_name
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.replies import Proposal
from raystate.core.formats.reports import HostWord, TrainerWord
from raystate.core.trainer.own_promises import OwnPromises
from raystate.core.trainer.own_slots import OwnSlots
from raystate.core.trainer.save_decision import Action, Due, SaveDecision, refuse_other_pasts


class Trainer:
    """The decisions of one rank, from one lineage to the next.

    Args:
        rank, world: of the worker group.
        lineage: from JoinReply.
        snapshot_every: snapshot multiples of it; 0: only what will be durable.
        save_every_steps: durable is the first save() at or after each multiple; None: only forced and agreed saves.
        policy: says of each step whether it is durable, too; None: there is none.
        slots: slots of this trainer's set.
        stored_step: newest committed step when it joined: one that never restores can't save it again. -1: none.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        lineage: str,
        *,
        snapshot_every: int = 1,
        save_every_steps: int | None = None,
        policy: Due | None = None,
        slots: int = 3,
        stored_step: int = -1,
    ):
        self.rank = rank
        self.world = world
        self.lineage = lineage
        self.snapshot_every = snapshot_every
        self.save_every_steps = save_every_steps
        self._policy = policy
        self.newest: int = -1  # of the last save(), or restored
        self.kept: SnapshotId | None = None  # what was staged or held last, or restored: close() asks for it to be durable
        # Only forward: a host ends a trainer that seems to go on after its group has ended.
        self.phase: Literal["joined", "running", "closing", "failed"] = "joined"
        self.error = ""
        self.stopped_at: int | None = None
        self.told_to_stop = ""  # why, once `reached` has said so
        self.held: int | None = None
        self.late: int | None = None  # the newest step, if it was skipped: it may still be snapshotted until the next one is saved
        self._stored_step = stored_step
        self._first = stored_step < 0  # nothing is durable or promised yet
        self._ahead: frozenset[int] = frozenset()
        self._safe: int = -1  # the step that is promised, or was durable when it was restored
        self.promises = OwnPromises()
        self._slots = OwnSlots.of(slots)
        self._next_due = self._due_after(0)
        self._number = 0
        self._ack_id = 0
        self._ack_ok = False
        self._ack_step = -1
        self._ack: Proposal | None = None  # the acknowledged proposal, until it is acted upon

    # ---------------------------------------------------------------- state

    def _due_after(self, step: int) -> int | None:
        every = self.save_every_steps
        return None if not every else (max(0, step) // every + 1) * every

    def begin(self, lineage: str, origin: SnapshotId | None) -> None:
        """All ranks go on from `origin` (None: the run has no step) in a new lineage. Staging must
        have ended; slots stay. It ends the promises of the lineage before."""
        self.lineage = lineage
        self.newest = step = origin.step if origin is not None else -1
        self.kept = origin
        self.held = self.late = None
        self.stopped_at = None
        self.told_to_stop = ""
        self._ack = None
        self._ack_ok = False  # a new Coordinator must not count it: nothing is waited for in this lineage
        self._stored_step = -1
        self._ahead = frozenset()
        self._safe = -1
        self._slots.promised, self._slots.captured = {}, None
        self.promises = OwnPromises()
        self._next_due = self._due_after(step)
        self.phase = "running" if self.phase == "joined" else self.phase

    def settled(self, *, ahead: Iterable[int], safe: bool, saving: bool = False, stored: bool = True) -> None:
        """How the restore ended: the newer steps in storage, and whether the restored one is durable (`safe`).

        `saving`: its save is under way, which is a promise from now on. `stored`: the run has a durable step.

        `word()` has to be written then: a new Coordinator knows by it that this rank does not wait any more.
        """
        self._ahead = frozenset(ahead)
        self._safe = self.newest if safe or saving else -1
        self._first = not (safe or saving or stored)
        if saving and self.kept is not None:
            self.promises.make(self.kept)

    def memento(self) -> dict[str, Any]:
        """What the machine is now, for `put_back`."""
        return {name: copy.copy(value) for name, value in vars(self).items()}

    def put_back(self, memento: dict[str, Any]) -> None:
        """As if what was decided since `memento` had never been asked for. Numbers of words go on."""
        number = self._number
        vars(self).update(memento)
        self._number = number

    @property
    def is_safe(self) -> bool:
        """The newest step was promised, or is durable. The same on all ranks."""
        return self.newest < 0 or self._safe == self.newest

    @property
    def number(self) -> int:
        """The number of the newest word."""
        return self._number

    def word(self) -> TrainerWord:
        """The trainer's word as of now, with the next number."""
        self._number += 1
        late = self.late if self.phase == "running" else None
        pending = sorted({*self._slots.staging.values(), *(step for step in (self.held, late) if step is not None)})
        return TrainerWord(
            lineage=self.lineage,
            rank=self.rank,
            world=self.world,
            number=self._number,
            newest_step=self.newest,
            pending=tuple(pending),
            done=self._slots.done,
            ack_id=self._ack_id,
            ack_ok=self._ack_ok,
            ack_step=self._ack_step,
            phase=self.phase,
            error=self.error,
        )

    @property
    def staging(self) -> bool:
        """Whether a slot is being filled."""
        return bool(self._slots.staging)

    def must_wait(self, step: int, *, force: bool, host_word: HostWord | None) -> bool:
        """Whether save(step) has to wait for a slot, while storage makes progress. It is due, and a
        step due before it has none yet; or due steps hold all slots but that of the newest
        snapshot."""
        if not (force or self.would_be_durable(step)) or self.capture_of(step, host_word) is not None:
            return False
        return self.held is not None or self._slots.are_crowded(host_word)

    # ---------------------------------------------------------------- save()

    def on_save(self, step: int, *, force: bool = False, host_word: HostWord | None, stager_busy: bool = False) -> SaveDecision:
        """Decide about one call of save().

        Args:
            step: completed steps.
            force: make it durable. The newest step's capture becomes so; only where it has none this call makes one.
            host_word: the HostActor's word, None before it has written one.
            stager_busy: the copy of an earlier step is not finished.

        Raises:
            StepOrderError: the step is older than the newest one, or lies in storage from another past.
            RaystateError: the failure in the host's word (a barrier that timed out, a superseded attempt, …).
        """
        if host_word is not None and host_word.failure is not None:
            failure = host_word.failure
            raise error_from_name(failure.error, failure.message, dict(failure.details))
        self._refuse_other_pasts(step)
        wait, agreed = self._answer(step, None if host_word is None else host_word.proposal)
        if wait:
            return self._decide("none", False, None, f"step {step} waits for the outcome of a proposal", wait=True)
        stop = agreed is not None and agreed.kind == "stop"
        self.stopped_at = step if stop else self.stopped_at
        if step == self.newest and (step == self._safe or not (force or agreed)):
            why = f"step {step} {'will be durable' if self.is_safe else 'is the newest'} already"
            return self._decide("none", False, None, why, stop=stop, ignored=True)
        captured = self.capture_of(step, host_word)
        self.newest = step
        self.late = None
        self.phase = "running" if self.phase == "joined" else self.phase
        promised, why = self._is_due(step, force, agreed)
        if captured is not None:
            self._promise(step)
            self._slots.promise(captured, step)
            return self._decide("promise", True, captured, why, stop=stop)
        interval = 1 if host_word is None else max(1, host_word.interval)
        every = self.snapshot_every * interval
        if not promised and (every == 0 or step % every):
            return self._decide("none", False, None, "no snapshot due" if every == 0 else f"snapshots are multiples of {every}")
        slot = self._slots.free(host_word)
        if promised:
            self._promise(step)
        # A promised copy that waits has the next slot: a snapshot that went before it could make others give the promised step up.
        if host_word is not None and slot is not None and not stager_busy and self.held is None:
            self._slots.fill(slot, host_word, step, promised=promised)
            self.kept = SnapshotId(self.lineage, step)
            return self._decide("stage", promised, slot, why, stop=stop)
        lack = (
            "the stager is busy" if stager_busy else "no slot is free" if slot is None else f"step {self.held} waits for the slot"
        )
        if not promised:
            self.late = step
            return self._decide("skip", False, None, f"step {step} is skipped: {lack}")
        dropped = self.kept if self.held is not None else None
        self.held = step
        self.kept = SnapshotId(self.lineage, step)
        return self._decide("hold", True, None, f"{why}; {lack}: a copy waits on the device", stop=stop, dropped=dropped)

    def capture_of(self, step: int, host_word: HostWord | None) -> int | None:
        """The slot with the capture of the newest step, if that is this step; None: it has none."""
        return self._slots.capture_of(step, host_word) if step == self.newest else None

    def _promise(self, step: int) -> None:
        self.promises.make(SnapshotId(self.lineage, step))
        self._safe = step
        self._first = False

    def _refuse_other_pasts(self, step: int) -> None:
        stored = self._stored_step if self.phase == "joined" else -1
        refuse_other_pasts(step, rank=self.rank, newest=self.newest, stored=stored, ahead=self._ahead)

    def may_keep(self, step: int, *, force: bool) -> bool:
        """Whether save(step) may keep the step's bytes; if not, it surely keeps none."""
        every = self.snapshot_every
        return force or self._ack is not None or bool(self._why_due(step)) or (every > 0 and step % every == 0)

    def would_be_durable(self, step: int) -> bool:
        """Whether save(step) would be durable by the step rule."""
        return step > self.newest and bool(self._why_due(step))

    def _why_due(self, step: int) -> str:
        if self._next_due is not None and step >= self._next_due:
            return f"every {self.save_every_steps} steps" if self.save_every_steps != 1 else "every step"
        return self._policy(step, self._first) if self._policy is not None else ""

    def _is_due(self, step: int, force: bool, agreed: Proposal | None) -> tuple[bool, str]:
        promised, why = False, f"snapshot of step {step}"
        if due := self._why_due(step):
            promised, why = True, f"step {step} is due: {due}"
        if self._next_due is not None and step >= self._next_due:
            self._next_due = self._due_after(step)
        if agreed is not None:
            promised, why = True, agreed.text
        if force:
            promised, why = True, f"step {step} is forced"
        return promised, why

    def _decide(
        self,
        action: Action,
        promised: bool,
        slot: int | None,
        reason: str,
        *,
        wait: bool = False,
        stop: bool = False,
        dropped: SnapshotId | None = None,
        ignored: bool = False,
    ) -> SaveDecision:
        if dropped is not None:
            self.promises.broke(dropped, "no slot became free for it before the next durable step")
        return SaveDecision(
            action=action,
            promised=promised,
            slot=slot,
            reason=reason,
            wait=wait,
            stop=stop,
            dropped=dropped,
            ignored=ignored,
            word=self.word(),
        )

    # ---------------------------------------------------------------- stopping together

    def _answer(self, step: int, proposal: Proposal | None) -> tuple[bool, Proposal | None]:
        """Acknowledge or refuse; gives (wait here, the agreed proposal to act upon at this step)."""
        if proposal is not None and proposal.id > self._ack_id and proposal.state == "proposed":
            self._ack_id = proposal.id
            # A step that is made already can't be agreed to: this rank would act at a later one.
            # (test_simulator.test_planted_bug_is_found, "stop step overtaken")
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
        # Without news of it (another HostActor may not know it yet) the trainer waits: the others
        # may have been told to act.
        # (test_simulator.test_planted_bug_is_found, "stop without waiting for the others")
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
        if agreed is None:
            return False, wait
        self._ack = kept  # save() acts upon it
        if agreed.kind == "stop":
            self.told_to_stop = agreed.text
        return agreed.kind == "stop", wait

    # ---------------------------------------------------------------- slots

    def new_slots(self, slots: int) -> None:
        """The trainer was allotted another set, and nothing is being staged into the one before."""
        if self.staging:
            raise self._invalid("new slots", f"slots {sorted(self._slots.staging)} are being filled")
        self._slots = OwnSlots.of(slots)

    def staged(self, slot: int, step: int) -> None:
        """The slot's header is written: it is the host's again."""
        if self._slots.staging.get(slot) != step:
            raise self._invalid(f"step {step} staged in slot {slot}", "that slot is not being filled with it")
        self._slots.staged(slot)

    def released(self, slot: int) -> None:
        """Staging failed, or a granted slot is handed back unused."""
        self._slots.released(slot)

    def take_slot(self, host_word: HostWord | None) -> tuple[int, int] | None:
        """A slot as (slot, step) for the held copy, else for the newest step if it was skipped; or None. Pending until `staged`."""
        step = self.late if self.held is None else self.held
        slot = self._slots.free(host_word)
        if host_word is None or step is None or slot is None:
            return None
        if self.held is None:
            self.late, self.kept = None, SnapshotId(self.lineage, step)
        self._slots.fill(slot, host_word, step, promised=self.held is not None)
        self.held = None
        return slot, step

    def give_up_held(self) -> None:
        """The held copy has waited too long for a slot."""
        self.held = None

    def _invalid(self, event: str, why: str) -> InvalidTransitionError:
        staging = ", ".join(f"step {step} in slot {slot}" for slot, step in self._slots.staging.items()) or "nothing"
        return InvalidTransitionError(
            f"the machine of rank {self.rank} cannot take {event}: {why}; lineage {self.lineage}, {self.phase}, newest step {self.newest}, "
            f"staging {staging}, held {self.held}",
            rank=self.rank,
        )

    def failed(self, error: str) -> None:
        """The user's code has raised."""
        self.phase = "failed"
        self.error = error

    def closing(self) -> None:
        """The user has called close()."""
        self.phase = "closing"
