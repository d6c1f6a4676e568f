"""Which step a group restores: chosen once for all ranks, over memory and storage together.

The phases of one restore:
    asking        the ranks arrive
    looking       fresh reports of all hosts, publications and commits under way come to an end
    trying        the ranks restore and say how it went; if one fails, choose again without that copy
    retiring      a rollback: the newer steps leave the log, and then storage; or, before a choice: damaged steps are set aside
    discarding    the group's next lineage begins, and every host discards what the choice gives up

Until all ranks have the step nothing begins and nothing is given up: a restore that fails changes nothing.
"""

from __future__ import annotations

from typing import Literal

from raystate.core.coordinator.context import NAMED, Context, all_have
from raystate.core.coordinator.fresh_reports import RestoreReports
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.restorable import Restorable
from raystate.core.coordinator.restore_asks import RestoreAsks
from raystate.core.coordinator.snapshots import Snapshots
from raystate.core.coordinator.withdrawals import Withdrawals
from raystate.core.formats.errors import InvalidTransitionError
from raystate.core.formats.questions import RestoreAsked, RestoreTried
from raystate.core.formats.replies import TIERS, RestoreChoice, RestoreSettled

Phase = Literal["idle", "asking", "looking", "retiring", "discarding", "trying"]

# What may follow on what. One that fails, or gives way to that of a new worker group, is idle first.
_NEXT: dict[Phase, tuple[Phase, ...]] = {
    "idle": ("asking",),
    "asking": ("looking", "idle"),
    "looking": ("retiring", "trying", "idle"),
    "trying": ("looking", "retiring", "discarding", "idle"),
    "retiring": ("looking", "discarding", "idle"),
    "discarding": ("idle",),
}


class Restores:
    """One restore at a time, through its phases; its parts know what is wanted, held and whole."""

    def __init__(self, context: Context, snapshots: Snapshots, withdrawals: Withdrawals):
        self.context = context
        self.memory = snapshots.memory
        self.joins = snapshots.joins
        self.journal = snapshots.journal
        self.saves = snapshots.saves
        self.snapshots = snapshots
        self.phase: Phase = "idle"
        self._asks = RestoreAsks()
        self._fresh_reports = RestoreReports(context, self.memory)
        self._restorable = Restorable(self.memory, self.journal, self.saves)
        self.withdrawals = withdrawals
        self._group: Group | None = None
        self._want: int | None = None
        self._rollback = False
        self._tried: dict[int, RestoreTried] = {}
        self._since_s = 0.0  # when this phase began
        self._rolls_back = False  # all ranks have the step, and the newer ones are being retired
        self._choice: RestoreChoice | None = None

    @property
    def trying(self) -> RestoreChoice | None:
        """What the ranks are restoring now."""
        return self._choice if self.phase == "trying" else None

    # ---------------------------------------------------------------- events

    def asked(self, event: RestoreAsked) -> None:
        """A rank has called restore."""
        if not self.joins.check(event.ask, event.lineage, event.rank, restoring=True):
            return
        group = self.joins.group
        assert group is not None
        if not self._is_for(group) or self.phase == "idle":
            self._begin(group)
        elif self.phase != "asking" and self._asks.differs(event):
            why = f"{self.joins.where([event.rank])} had its outcome from an earlier attempt and has gone on"
            self.context.fail([event.ask], "StaleAttemptError", why, replaced=True)
            self._fail("StaleAttemptError", why, replaced=True)
            return
        elif self.phase == "trying" and event.ask not in self._asks.everybody():
            # The rank never got the choice, or has begun anew: it gets the same one.
            assert self._choice is not None
            self.context.answer(event.ask, self._choice)
            return
        self._asks.asked(event, group)

    def tried(self, event: RestoreTried) -> None:
        """A rank tells how its restore went, and waits for the outcome."""
        if not self.joins.check(event.ask, event.lineage, event.rank, restoring=True):
            return
        choice, group = self.trying, self.joins.group
        if self.phase in ("retiring", "discarding") and event.ask in self._asks.everybody():
            # Said once more, by a rank that has waited long: it waits for the outcome still.
            # (test_recovery.test_a_rank_that_says_again_how_its_restore_went_waits_on)
            return
        is_asked = choice is not None and (event.begins, event.step) == (choice.begins, choice.step)
        if not is_asked or group is None or not self._is_for(group):
            # Perhaps the choice of an earlier attempt, which has died: what the other ranks have of it is not known.
            text = f"rank {event.rank} has tried step {event.step}, and that restore is over, or its Coordinator has died during it"
            self.context.fail([event.ask], "StaleAttemptError", text, rank=event.rank, step=event.step, replaced=True)
            return
        self._asks.add(event.rank, event.ask)
        self._tried[event.rank] = event

    # ---------------------------------------------------------------- progress

    def _is_for(self, group: Group) -> bool:
        return self._group is not None and self._group.name == group.name

    def _begin(self, group: Group) -> None:
        if self.phase != "idle":
            self._fail("StaleAttemptError", f"a restore of lineage {group.lineage} has begun, and this one is over")
        self._group = group
        self._asks = RestoreAsks()
        self._restorable.forget_damage()
        self._rolls_back = False
        self._tried, self._choice = {}, None
        self._enter("asking")

    def _enter(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            group = self._group
            raise InvalidTransitionError(
                f"a restore of {group.lineage if group is not None else 'no lineage'} goes from {self.phase} to {phase}: {self._choice}"
            )
        if phase == "idle":
            self.saves.protect(-1)  # nothing is read any more
        self.phase = phase
        if self._group is not None:
            self._group.restoring = phase == "trying"
        self._since_s = self.context.now_s

    def turn(self) -> None:
        """Go on as far as what is known and the time allow."""
        phase = ""
        while self.phase not in (phase, "idle"):
            phase = self.phase
            self._go_through()
        if self.phase != "idle":
            self._look_at_deadlines()

    def _go_through(self) -> None:
        group, present = self._group, self.joins.group
        assert group is not None
        if present is not None and present.name == group.name:
            self._group = group = present  # an adopted group may turn out to be in a later lineage
        if not group.alive or present is not group:
            self._fail("StaleAttemptError", f"lineage {group.lineage} has ended: {group.why_ended or 'replaced'}")
            return
        if self.phase == "asking" and self._asks.is_full(group.world):
            self._all_asked()
        if self.phase == "retiring" and not self.withdrawals.under_way:
            self._retired()
        if self.phase == "looking" and not self._waiting_for(group):
            self._choose()
        if self.phase == "trying" and len(self._tried) == group.world:
            self._judge()
        if self.phase == "discarding" and self.memory.first_undone() is None:
            self._settle()

    def _all_asked(self) -> None:
        differences = self._asks.differences()
        if differences:
            self._fail("ConfigError", f"the ranks ask for different steps: {differences}")
            return
        self._want, self._rollback = self._asks.wanted
        self._enter("looking")
        self._fresh_reports.begin()

    def _waiting_for(self, group: Group) -> str:
        """What has to be known before the choice; "" if nothing."""
        gathered = self._fresh_reports.gathered()
        if gathered:
            return f"reports of hosts {gathered}"
        late = self._fresh_reports.first_late(lambda view: self._fresh_reports.is_late(view, group))
        if late is not None:
            return f"a report of host {late.host}"
        unheard = group.first_unheard(self._asks.word)
        if unheard is not None:
            return f"a report of what {self.joins.where([unheard])} had saved when it asked"
        return self._restorable.unsettled(self._want)

    # ---------------------------------------------------------------- the choice

    def _choose(self) -> None:
        want, stored, damaged = self._want, self._restorable.stored(), self._restorable.damaged
        snap = self._restorable.in_memory(want)
        if want is not None:
            if snap is None and want not in stored:
                error, text, available = self._restorable.why_not(want)
                self._fail(error, text, step=want, available=available)
                return
            if self._rollback and (refused := self.withdrawals.refuse_rollback(want)) is not None:
                self._fail("StorageError", f"rollback to step {want}: {refused}", step=want)
                return
        if snap is None and not stored and damaged:
            text = "; ".join(f"step {step}: {why}" for step, why in damaged)
            text = f"no step of the run can be restored: {text}. Bring the folders back; or begin anew with `raystate rm STORAGE`"
            self._fail("CorruptCheckpointError", text, steps=[one for one, _ in damaged])
            return
        if self.withdrawals.set_aside(self._restorable.take_damaged_in_storage()):
            self._enter("retiring")
            return
        # All choices of one restore are for the same lineage.
        begins = self._choice.begins if self._choice is not None else self.joins.next_lineage()
        choice = self._restorable.choice(begins, snap, want if want is not None or not stored else stored[-1])
        if choice.tier == "storage":
            self.saves.protect(choice.step)
        self._announce(choice)

    def _announce(self, choice: RestoreChoice) -> None:
        self._choice = choice
        what = "begins without a step" if choice.tier == "none" else f"restores step {choice.step} from {choice.tier}"
        # A group that follows another is told of in one line, when it has gone on (`runtime.ledger`).
        follows = self.joins.ended and (group := self.joins.group) is not None and not group.decided
        self.context.log("debug" if follows else "info", f"{what}: {choice.reason}", step=choice.step)
        self._tried = {}
        asks = self._asks.take()
        self._enter("trying")
        for ask in asks:
            self.context.answer(ask, choice)

    # ---------------------------------------------------------------- how it went

    def _judge(self) -> None:
        choice = self._choice
        assert choice is not None
        bad = [one for _, one in sorted(self._tried.items()) if not one.ok]
        if not bad:
            self._go_on(choice)
            return
        text = "; ".join(f"rank {one.rank}: {one.error}" for one in bad)
        self.context.log("warning", f"step {choice.step} could not be restored from {choice.tier}: {text}", step=choice.step)
        # Storage out of reach is no damage: the step is not set aside for it.
        # (test_recovery.test_unreachable_storage_is_not_taken_for_damage)
        if choice.tier == "none" or (choice.tier == "storage" and not any(one.damaged for one in bad)):
            self._fail("StorageError", f"step {choice.step} could not be restored from {choice.tier}: {text}", step=choice.step)
            return
        self._restorable.exclude(choice, text)
        if choice.tier == "storage":
            self.saves.protect(-1)
        self._enter("looking")

    def _go_on(self, choice: RestoreChoice) -> None:
        """The newer steps go only now that all ranks have the one behind them: else a damaged step
        would cost all others. (test_recovery.test_a_rollback_that_no_rank_can_use_costs_no_step)"""
        want = self._want
        if mistaken := [rank for rank, one in sorted(self._tried.items()) if one.mistaken]:
            who = self.joins.where(mistaken)
            text = f"step {choice.step} is not restored, and nothing has changed: {who} can't use it as it was asked for"
            self._fail("RaystateError", text, step=choice.step)
            return
        if want is None or not self._rollback:
            self._discard(choice)
            return
        self._rolls_back = True
        self._enter("retiring")

    def _retired(self) -> None:
        """No entry is on its way. Damaged steps: choose now. A rollback is done when the newer steps can't be seen any more."""
        if not self._rolls_back:
            self._enter("looking")
            return
        want, choice = self._want, self._choice
        assert want is not None
        assert choice is not None
        self.withdrawals.give_up_saves(want)
        if self._restorable.unsettled(want):
            # A newer step whose commit is being written is to be retired, too.
            # (test_recovery.test_a_rollback_waits_for_the_commit_that_is_being_written)
            return
        if (refused := self.withdrawals.refuse_rollback(want)) is not None:
            self._fail("StorageError", f"rollback to step {want}: {refused}", step=want)
        elif not self.withdrawals.roll_back(want) and not self.withdrawals.still_visible(want):
            self._rolls_back = False
            self._discard(choice)

    def _discard(self, choice: RestoreChoice) -> None:
        """From now on the group stages in a new lineage: no older piece can be taken for one."""
        self._group = group = self.joins.renew(choice.begins, back_to=choice.step if self._rollback else None)
        lineage = choice.in_memory.lineage if choice.in_memory is not None else ""
        self.memory.give_up_but(lineage, choice.step, by=group.lineage)
        self.saves.forget_unbelieved()
        self._enter("discarding")

    def _settle(self) -> None:
        group, choice = self._group, self._choice
        assert group is not None
        assert choice is not None
        group.decide()
        step = choice.step
        origin = choice.snapshot
        tiers = [one.tier for one in self._tried.values()]
        tier = max(tiers, key=lambda tier: TIERS.index(tier) if tier in TIERS else -1, default="")
        fate = self.saves.fate(origin)[0]
        durable = choice.tier == "storage" or fate is True
        saving = not durable and (origin in self.saves.jobs or (fate is None and step in self.journal.publishing))
        settled = RestoreSettled(
            step=step,
            tier=tier,
            ahead=tuple(sorted(one for one in self.journal.live if one > step)),
            safe=durable,
            saving=saving,
            durable_step=self.journal.durable_step,
            advice=(self.context.attempt, self.memory.advice_seq),
        )
        group.restored = settled
        if self._want is None and choice.in_memory is None:
            self.snapshots.interval.durable.lost_memory()
        for ask in self._asks.everybody():
            self.context.answer(ask, settled)
        what = f"restored step {step} from {tier or choice.tier}" if step >= 0 else "begun without a step"  # which was said
        self.context.log("debug", f"{all_have(group.world)} {what}", step=choice.step)
        self._enter("idle")

    def _fail(self, error: str, message: str, **details: object) -> None:
        self.context.log("debug", message)  # those who asked raise it
        self.context.fail(self._asks.everybody(), error, message, **details)
        self._enter("idle")

    # ---------------------------------------------------------------- deadlines

    def _look_at_deadlines(self) -> None:
        group = self._group
        assert group is not None
        settings, waited_s = self.context.settings, self.context.now_s - self._since_s
        if self.phase == "asking":
            missing = self._asks.missing(group.world)
            why = self.joins.why_not_here(missing, "call restore", waited_s, settings.barrier_timeout_s)
            if why and group.world is None:
                why = f"ranks of unknown number (no host reports this lineage) did not call restore within {waited_s:.1f} s"
            if why:
                self._fail("BarrierTimeoutError", why, missing_ranks=missing[:NAMED], phase="restore", waited_s=waited_s)
        elif self.phase in ("looking", "retiring"):
            self._give_up_late(group, waited_s)
        elif self.phase == "discarding" and waited_s >= settings.host_timeout_s:
            while (view := self.memory.first_undone()) is not None:
                self.snapshots.give_up_on(view.host, f"it has not discarded what the restore gives up within {waited_s:.1f} s")
        elif self.phase == "trying" and waited_s >= settings.restore_timeout_s:
            missing = [rank for rank in range(group.world or 0) if rank not in self._tried]
            message = f"{self.joins.where(missing)} did not finish restoring within {waited_s:.1f} s"
            self._fail("BarrierTimeoutError", message, missing_ranks=missing[:NAMED], phase="restore", waited_s=waited_s)

    def _give_up_late(self, group: Group, waited_s: float) -> None:
        settings = self.context.settings
        if waited_s >= settings.host_timeout_s:
            for host, why in self._fresh_reports.overdue(group, waited_s):
                self.snapshots.give_up_on(host, why)
        asked_s = waited_s if self._rolls_back else self.context.now_s - self._fresh_reports.began_s
        if asked_s >= settings.restore_timeout_s:
            waiting = self._waiting_for(group) or "the log"
            self._fail("StorageError", f"restore waited {asked_s:.1f} s for {waiting}", phase="restore", waited_s=asked_s)
