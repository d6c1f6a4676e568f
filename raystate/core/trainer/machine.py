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
from raystate.core.formats.orders import Proposal
from raystate.core.formats.reports import HostWord, TrainerWord
from raystate.core.trainer.copy_pace import spread_s
from raystate.core.trainer.own_answers import OwnAnswers
from raystate.core.trainer.own_past import OwnPast
from raystate.core.trainer.own_promises import OwnPromises
from raystate.core.trainer.own_slots import OwnSlots
from raystate.core.trainer.save_decision import Due, SaveDecision
from raystate.core.trainer.step_times import StepTimes

LEFT_OUT = 8  # of so many snapshots one is left out where the interval has fewer calls: there are undisturbed steps to measure then


class Trainer:
    """The decisions of one rank, from one lineage to the next.

    Args:
        rank, world: of the worker group.
        lineage: from JoinReply.
        snapshot_every: snapshot multiples of it; 0: only what will be durable. None: as the Coordinator measures; then the first save()
            at or after each multiple of its interval.
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
        snapshot_every: int | None = 1,
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
        self.past = OwnPast(stored=stored_step, first=stored_step < 0)
        self.promises = OwnPromises()
        self.slots = OwnSlots.of(slots)
        self.answers = OwnAnswers()
        self.times = StepTimes()
        self.number = 0  # of the newest word
        self.steps = 0  # that were made, over all lineages

    # ---------------------------------------------------------------- state

    def begin(self, lineage: str, origin: SnapshotId | None) -> None:
        """All ranks go on from `origin` (None: the run has no step) in a new lineage. Staging must
        have ended; slots stay. It ends the promises of the lineage before."""
        self.lineage = lineage
        self.newest = origin.step if origin is not None else -1
        self.kept = origin
        self.answers.begin()
        self.past = OwnPast(first=self.past.first)
        self.slots.begin()
        self.promises = OwnPromises()
        self.times.forget()
        self.phase = "running" if self.phase == "joined" else self.phase

    def settled(self, *, ahead: Iterable[int], safe: bool, saving: bool = False, stored: bool = True) -> None:
        """How the restore ended: the newer steps in storage, and whether the restored one is durable (`safe`).

        `saving`: its save is under way, which is a promise from now on. `stored`: the run has a durable step.

        `word()` has to be written then: a new Coordinator knows by it that this rank does not wait any more.
        """
        is_safe = safe or saving
        self.past = OwnPast(ahead=frozenset(ahead), safe=self.newest if is_safe else -1, first=not (is_safe or stored))
        if saving and self.kept is not None:
            self.promises.make(self.kept)

    def memento(self) -> dict[str, Any]:
        """What the machine is now, for `put_back`. The times of calls stay true."""
        return {name: copy.copy(value) for name, value in vars(self).items() if name != "times"}

    def put_back(self, memento: dict[str, Any]) -> None:
        """As if what was decided since `memento` had never been asked for. Numbers of words go on."""
        number = self.number
        vars(self).update(memento)
        self.number = number

    @property
    def is_safe(self) -> bool:
        """The newest step was promised, or is durable. The same on all ranks."""
        return self.newest < 0 or self.past.safe == self.newest

    def word(self) -> TrainerWord:
        """The trainer's word as of now, with the next number."""
        self.number += 1
        return TrainerWord(
            lineage=self.lineage,
            rank=self.rank,
            world=self.world,
            number=self.number,
            newest_step=self.newest,
            pending=self.slots.pending(late=self.phase == "running"),
            done=self.slots.done,
            ack_id=self.answers.id,
            ack_ok=self.answers.ok,
            ack_step=self.answers.step,
            phase=self.phase,
            error=self.error,
            stride=self.times.stride,
            step_s=self.times.step_s,
            snapshot_s=self.times.snapshot_s,
            save_s=self.times.saves.cost_s,
            steps=self.steps,
        )

    @property
    def staging(self) -> bool:
        """Whether a slot is being filled."""
        return bool(self.slots.staging)

    def must_wait(self, step: int, *, force: bool, host_word: HostWord | None) -> bool:
        """Whether save(step) has to wait for a slot, while storage makes progress. It is due, and a
        step due before it has none yet; or due steps hold all slots but that of the newest
        snapshot."""
        if not (force or self.would_be_durable(step)) or self.capture_of(step, host_word) is not None:
            return False
        return self.slots.held is not None or self.slots.are_crowded(host_word)

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
        self.past.refuse_others(step, rank=self.rank, newest=self.newest)
        wait, agreed = self.answers.answer(step, None if host_word is None else host_word.proposal)
        if wait:
            return SaveDecision(reason=f"step {step} waits for the outcome of a proposal", wait=True, word=self.word())
        stop = agreed is not None and agreed.kind == "stop"
        self.answers.stopped_at = step if stop else self.answers.stopped_at
        if step == self.newest and (step == self.past.safe or not (force or agreed)):
            why = f"step {step} {'will be durable' if self.is_safe else 'is the newest'} already"
            return SaveDecision(reason=why, stop=stop, ignored=True, word=self.word())
        captured = self.capture_of(step, host_word)
        promised, why = self._is_due(step, force, agreed)
        interval = 1 if host_word is None else host_word.interval
        is_due = promised or self._takes_snapshot(step, interval)
        self._made(step)
        self.phase = "running" if self.phase == "joined" else self.phase
        if promised:
            self.promises.make(SnapshotId(self.lineage, step))
            self.past.promised(step)
            self.times.saves.began(step)
        if captured is not None:
            self.slots.promise(captured, step)
            return SaveDecision(action="promise", promised=True, slot=captured, reason=why, stop=stop, word=self.word())
        if not is_due:
            return SaveDecision(reason=f"no snapshot due, of interval {interval}", word=self.word())
        slot = self.slots.free(host_word)
        # A promised copy that waits has the next slot: a snapshot that went before it could make others give the promised step up.
        held = self.slots.held
        if host_word is not None and slot is not None and not stager_busy and held is None:
            self.slots.fill(slot, host_word, step, promised=promised)
            self.kept = SnapshotId(self.lineage, step)
            return SaveDecision(action="stage", promised=promised, slot=slot, reason=why, stop=stop, word=self.word())
        lack = "the stager is busy" if stager_busy else "no slot is free" if slot is None else f"step {held} waits for the slot"
        if not promised:
            self.slots.late = step
            return SaveDecision(action="skip", reason=f"step {step} is skipped: {lack}", word=self.word())
        dropped = self.kept if held is not None else None
        if dropped is not None:
            self.promises.broke(dropped, "no slot became free for it before the next durable step")
        self.slots.held = step
        self.kept = SnapshotId(self.lineage, step)
        told = why if stop else f"{why}; {lack}: a copy waits on the device"  # why it stops is what people read
        return SaveDecision(action="hold", promised=True, reason=told, stop=stop, dropped=dropped, word=self.word())

    def capture_of(self, step: int, host_word: HostWord | None) -> int | None:
        """The slot with the capture of the newest step, if that is this step; None: it has none."""
        return self.slots.capture_of(step, host_word) if step == self.newest else None

    def due_in(self, host_word: HostWord | None) -> int:
        """The next snapshot is due at the call after so many, where the interval is measured; 0: at the next one."""
        interval = 1 if host_word is None else host_word.interval
        return (interval - max(0, self.newest) % interval - 1) // self.times.stride

    def copy_spread_s(self, host_word: HostWord | None) -> float:
        """Seconds that the copy of a snapshot is to take, where the interval is measured; 0.0: as few as it can."""
        interval = 1 if host_word is None else host_word.interval
        return spread_s(self.times.is_slowing, self.times.step_s, max(interval, self.times.stride))

    def passes(self, step: int, host_word: HostWord | None) -> bool:
        """Whether save(step) keeps nothing, answers nothing and fails at nothing: `pass_by` is all that it does then."""
        if host_word is None or host_word.failure is not None or self.answers.agreed is not None or self.phase != "running":
            return False
        is_asked = host_word.proposal is not None and host_word.proposal.id > self.answers.id
        is_new = step > max(self.newest, self.past.stored) and step not in self.past.ahead
        return is_new and not is_asked and not self._why_due(step) and not self._takes_snapshot(step, host_word.interval)

    def pass_by(self, step: int) -> None:
        """save(step) has kept nothing. The word may be written later."""
        self._made(step)

    def _made(self, step: int) -> None:
        """The step is the newest now. A first one that comes without a restore may be any: nothing says where the script began."""
        if self.phase != "joined":
            self.steps += step - max(0, self.newest)
        self.newest = step
        self.slots.late = None

    def _takes_snapshot(self, step: int, interval: int) -> bool:
        """Whether a snapshot of this step is due; asked before it is the newest."""
        if self.snapshot_every is not None:
            return self.snapshot_every > 0 and step % (self.snapshot_every * interval) == 0
        stride = step - self.newest  # a loop may call at its own cadence
        number = step // max(interval, stride)  # each time at another place of so many: long and short steps may alternate
        is_left_out = interval < LEFT_OUT * stride and (number + number // LEFT_OUT) % LEFT_OUT == LEFT_OUT - 1
        return step // interval > self.newest // interval and not is_left_out

    def would_be_durable(self, step: int) -> bool:
        """Whether save(step) would be durable by the step rule."""
        return step > self.newest and bool(self._why_due(step))

    def _why_due(self, step: int) -> str:
        every = self.save_every_steps
        if every and step // every > max(0, self.newest) // every:
            return f"every {every} steps" if every != 1 else "every step"
        return self._policy(step, self.past.first) if self._policy is not None else ""

    def _is_due(self, step: int, force: bool, agreed: Proposal | None) -> tuple[bool, str]:
        promised, why = False, f"snapshot of step {step}"
        if due := self._why_due(step):
            promised, why = True, f"step {step} is due: {due}"
        if agreed is not None:
            promised, why = True, agreed.text
        if force:
            promised, why = True, f"step {step} is forced"
        return promised, why

    def reached(self, step: int, host_word: HostWord | None) -> tuple[bool, bool]:
        """For reached_preemption(step): (True if all ranks stop here, True if that is undecided: ask again).

        It answers proposals like save() does, so `word()` has to be written afterwards.
        """
        return self.answers.reached(step, None if host_word is None else host_word.proposal)

    # ---------------------------------------------------------------- slots

    def new_slots(self, slots: int) -> None:
        """The trainer was allotted another set, and nothing is being staged into the one before."""
        if self.staging:
            raise self._invalid("new slots", f"slots {sorted(self.slots.staging)} are being filled")
        self.slots = OwnSlots.of(slots, before=self.slots)

    def staged(self, slot: int, step: int) -> None:
        """The slot's header is written: it is the host's again."""
        if self.slots.staging.get(slot) != step:
            raise self._invalid(f"step {step} staged in slot {slot}", "that slot is not being filled with it")
        self.slots.staged(slot)

    def released(self, slot: int) -> None:
        """Staging failed, or a granted slot is handed back unused."""
        self.slots.released(slot)

    def take_slot(self, host_word: HostWord | None) -> tuple[int, int] | None:
        """A slot as (slot, step) for the held copy, else for the newest step if it was skipped; or None. Pending until `staged`."""
        taken = self.slots.take(host_word)
        if taken is not None:
            self.kept = SnapshotId(self.lineage, taken[1])
        return taken

    def give_up_held(self) -> None:
        """The held copy has waited too long for a slot."""
        self.slots.held = None

    def _invalid(self, event: str, why: str) -> InvalidTransitionError:
        staging = ", ".join(f"step {step} in slot {slot}" for slot, step in self.slots.staging.items()) or "nothing"
        return InvalidTransitionError(
            f"the machine of rank {self.rank} cannot take {event}: {why}; lineage {self.lineage}, {self.phase}, newest step {self.newest}, "
            f"staging {staging}, held {self.slots.held}",
            rank=self.rank,
        )

    def failed(self, error: str) -> None:
        """The user's code has raised."""
        self.phase = "failed"
        self.error = error

    def closing(self) -> None:
        """The user has called close()."""
        self.phase = "closing"
