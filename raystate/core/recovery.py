"""Which step a group restores: chosen once for all ranks, over memory and storage together.

The phases of one restore:
    asking        the ranks arrive
    looking       fresh reports of all hosts, publications and commits under way come to an end
    retiring      rollback only: the newer steps are retired in the log
    discarding    the group's next lineage begins, and every host discards what the choice gives up
    trying        the ranks restore and say how it went; if one fails, choose again without that copy
"""

from __future__ import annotations

from typing import Literal

from raystate.core.desk import NAMED, Barrier, Desk, Lookout, named
from raystate.core.errors import InvalidTransitionError
from raystate.core.group import Group, Joins
from raystate.core.journal import Change, Journal, Request
from raystate.core.memory import HostView, Memory, Snap
from raystate.core.messages import (
    TIERS,
    Failure,
    LogEntry,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    SnapshotId,
    Tier,
    group_of,
    lineage_order,
)
from raystate.core.saves import Saves
from raystate.core.snapshots import Snapshots

Phase = Literal["idle", "asking", "looking", "retiring", "discarding", "trying"]


# What may follow on what. A new worker group, or a restore that fails, may begin anew at any time.
_NEXT: dict[Phase, tuple[Phase, ...]] = {
    "idle": ("asking",),
    "asking": ("looking", "idle", "asking"),
    "looking": ("retiring", "discarding", "idle", "asking"),
    "retiring": ("looking", "idle", "asking"),
    "discarding": ("trying", "looking", "idle", "asking"),
    "trying": ("looking", "idle", "asking"),
}


class Recovery:
    def __init__(self, desk: Desk, memory: Memory, joins: Joins, journal: Journal, saves: Saves, snapshots: Snapshots):
        self.desk = desk
        self.memory = memory
        self.joins = joins
        self.journal = journal
        self.saves = saves
        self.snapshots = snapshots
        self.phase: Phase = "idle"
        self._group: Group | None = None
        self._asks = Barrier(0.0)
        self._asked: dict[int, tuple[int | None, bool]] = {}
        self._words: dict[int, int] = {}  # rank -> number of its last word before it asked
        self._waiting: dict[int, int] = {}  # rank that waits for the outcome of an earlier attempt's choice -> its last word
        self._want: int | None = None
        self._rollback = False
        self._resumed = -1  # the step that an earlier attempt had chosen for this group
        self._resumed_in = ""  # the lineage that began with that choice
        self._asked_in = ""  # newest lineage that a rank has asked from
        self._tried: dict[int, RestoreTried] = {}
        self._since_s = 0.0  # when this phase began
        self._began_s = 0.0  # when all ranks had asked
        self._fresh_seq = -1
        self._renewed = False  # the group's next lineage has begun: all choices of one restore are for the same
        self._late_hosts = Lookout()
        self._late_ranks = Lookout()
        self._choice: RestoreChoice | None = None
        self._excluded: set[tuple[Tier, SnapshotId]] = set()
        self._damaged: list[tuple[int, str]] = []
        self._aside: list[tuple[int, str]] = []  # damaged in storage, to be set aside once an older step is chosen

    # ---------------------------------------------------------------- events

    def asked(self, event: RestoreAsked) -> None:
        if not self.joins.check(event.ask, event.lineage, event.rank, restoring=True):
            return
        group = self.joins.group
        assert group is not None
        if not self._is_for(group) or self.phase == "idle":
            self._begin(group)
        elif self._resumed_in and self.phase == "asking" and _has_passed(event.lineage, self._resumed_in):
            self._begin(group)  # what a late message said was tried belongs to the restore before this one
        elif self.phase == "trying" and event.ask not in self._asks.everybody():
            # The rank never got the choice, or has begun anew: it gets the same one.
            assert self._choice is not None
            self.desk.answer(event.ask, self._choice)
            return
        self._asks.add(event.rank, event.ask)
        self._asked[event.rank] = (event.step, event.rollback)
        self._asked_in = max(self._asked_in, event.lineage, key=lineage_order)
        # A later lineage's words don't tell of the one before.
        self._words[event.rank] = event.word if event.lineage == group.lineage else 0
        self.desk.stir = True

    def tried(self, event: RestoreTried) -> None:
        if not self.joins.check(event.ask, event.lineage, event.rank, restoring=True):
            return
        choice, group = self._choice, self.joins.group
        assert group is not None
        asking = self._is_for(group) and self.phase == "asking"
        over = asking and self._asked_in and _has_passed(self._asked_in, event.lineage)
        if group.adopted and not over and (asking or self.phase == "idle" or not self._is_for(group)):
            # An earlier attempt made the choice, and its ranks have tried it: choose once more, the same step if it is good.
            if not asking:
                self._begin(group)
            self._resumed_in = max(self._resumed_in, event.lineage, key=lineage_order)
            self._resumed = event.step if event.ok and event.step >= 0 else self._resumed
            self._asks.add(event.rank, event.ask)
            self._words[event.rank] = self._waiting[event.rank] = event.word
            self.desk.stir = True
            return
        if self.phase != "trying" or choice is None or not self._is_for(group):
            self.desk.fail(
                [event.ask],
                "StaleAttemptError",
                f"rank {event.rank} reports a restore of step {event.step}, but none is under way",
                rank=event.rank,
                step=event.step,
            )
            return
        if event.step != choice.step or event.lineage != choice.begins:
            self.desk.fail(
                [event.ask],
                "StaleAttemptError",
                f"rank {event.rank} has tried step {event.step}, but the choice is step {choice.step}",
                rank=event.rank,
                expected=choice.step,
                got=event.step,
            )
            return
        self._asks.add(event.rank, event.ask)
        self._tried[event.rank] = event
        self.desk.stir = True

    # ---------------------------------------------------------------- progress

    def _is_for(self, group: Group) -> bool:
        return self._group is not None and self._group.nonce == group.nonce

    def _begin(self, group: Group) -> None:
        self._group = group
        self._asks = Barrier(self.desk.now_s)
        self._asked = {}
        self._words = {}
        self._waiting = {}
        self._resumed = -1
        self._resumed_in = self._asked_in = ""
        self._renewed = False
        self._tried = {}
        self._choice = None
        self._excluded = set()
        self._damaged = []
        self._aside = []
        self.saves.protect(-1)
        self._enter("asking")

    def _enter(self, phase: Phase) -> None:
        if phase not in _NEXT[self.phase]:
            group = self._group
            raise InvalidTransitionError(
                f"a restore of {group.lineage if group is not None else 'nobody'} goes from {self.phase} to {phase}: {self._choice}"
            )
        self.phase = phase
        self._since_s = self.desk.now_s
        self.desk.stir = True

    def turn(self) -> None:
        if self.phase == "idle":
            return
        group, present = self._group, self.joins.group
        assert group is not None
        if present is not None and present.nonce == group.nonce:
            self._group = group = present  # an adopted group may turn out to be in a later lineage
        if not group.alive or present is not group:
            self._fail("StaleAttemptError", f"lineage {group.lineage} has ended: {group.why_ended or 'replaced'}")
            return
        if self.phase == "asking" and self._asks.is_full(group.world):
            self._all_asked()
        if self.phase == "looking" and not self._waiting_for():
            self._choose(group)
        if self.phase == "discarding" and self.snapshots.not_discarded() is None:
            self._announce()
        if self.phase == "trying" and len(self._tried) == group.world:
            self._judge(group)

    def _all_asked(self) -> None:
        if len(set(self._asked.values())) > 1:
            text = ", ".join(f"rank {rank}: step={step}, rollback={back}" for rank, (step, back) in sorted(self._asked.items()))
            self._fail("ConfigError", f"the ranks ask for different steps: {text}")
            return
        step, rollback = next(iter(self._asked.values()), (None, False))
        self._want = step if step is not None or self._resumed < 0 else self._resumed
        self._rollback = rollback
        self._began_s = self.desk.now_s
        self._enter("looking")
        self._fresh_seq = self.snapshots.demand_fresh() if not self.snapshots.gathering else -1

    def _waiting_for(self) -> str:
        """What has to be known before the choice; "" if nothing."""
        snapshots, memory = self.snapshots, self.memory
        group = self._group
        assert group is not None
        if snapshots.gathering:
            return f"reports of hosts {named(sorted(snapshots.gathering))}"
        if self._fresh_seq < 0:
            self._fresh_seq = snapshots.demand_fresh()
        late = self._late_hosts.first(memory.views, self._is_late)
        if late is not None:
            return f"a report of host {late.host}"
        if not self._renewed:  # else they were heard for the first choice, and their next lineage says nothing of the one before
            unheard = self._late_ranks.first(range(group.world or 0), lambda rank: not group.heard(rank, self._words.get(rank, 0)))
            if unheard is not None:
                return f"a report of what {self.joins.where([unheard])} had saved when it asked"
        job = self.saves.running
        committing = job is not None and job.phase in ("packaging", "committing")
        best = self._memory_choice(None) if self._want is None else None
        if best is not None and not self._is_behind(best, self._stored()):
            on_the_way = [*self.journal.publishing, *([job.key.step] if job is not None and committing else [])]
            if all(step <= best.step for step in on_the_way):
                return ""  # whatever becomes of them, memory has something newer: storage that is slow or out holds nobody up
        if self.journal.publishing:
            return (
                f"the publication of steps {list(self.journal.publishing)} ({'; '.join(self.journal.troubles[-1:]) or 'under way'})"
            )
        if self.journal.busy or committing:
            return f"the commit of step {job.key.step}" if job is not None else "a log entry"
        return ""

    def _is_late(self, view: HostView) -> bool:
        """Its report has to be waited for: it has not said yet what it holds now, or it is down and expected back."""
        return not self._is_fresh(view) if view.up else view.back_until_s > self.desk.now_s

    def _is_fresh(self, view: HostView) -> bool:
        """The host's last report was made after all ranks had asked, and no trainer of an older worker group is left there."""
        if view.reported_s is None or view.reported_s < self._began_s or self._has_not_heard(view):
            return False
        group = self._group
        assert group is not None
        return all(group_of(one.lineage) == group.nonce for one in view.trainers)

    def _has_not_heard(self, view: HostView) -> bool:
        """The question has not reached it, as its last report says."""
        return view.advised is not None and view.advised < (self.desk.attempt, self._fresh_seq)

    def _is_on_its_way(self, view: HostView) -> bool:
        heard_lately = self.desk.now_s - view.heard_s < self.desk.settings.host_timeout_s
        return heard_lately and view.reported_s is not None and self._has_not_heard(view)

    # ---------------------------------------------------------------- the choice

    def _choose(self, group: Group) -> None:
        gone_on = [rank for rank, word in self._waiting.items() if word and rank in group.seen and group.seen[rank].number > word]
        if gone_on:
            self._fail("StaleAttemptError", f"{self.joins.where(gone_on)} had its outcome from an earlier attempt and has gone on")
            return
        want = self._want
        snap = self._memory_choice(want)
        stored = self._stored()
        if want is not None:
            if snap is not None and want in stored and not self._is_stored(snap):
                snap = None
            if snap is None and want not in stored:
                self._not_found(want, stored)
                return
            if self._rollback and self._roll_back(want):
                return
        elif snap is not None and self._is_behind(snap, stored):
            snap = None
        if snap is None and not stored and self._damaged:
            text = "; ".join(f"step {step}: {why}" for step, why in self._damaged)
            self._fail(
                "CorruptCheckpointError", f"no step of the run can be restored: {text}", steps=[one for one, _ in self._damaged]
            )
            return
        if self._aside and self._set_aside():
            return
        aside = tuple(self._damaged)
        group = self._renew(group)
        if snap is not None:
            homes = snap.homes(group.hosts)
            self._choice = RestoreChoice(
                tier="memory",
                step=snap.step,
                begins=group.lineage,
                lineage=snap.lineage,
                again=snap.id.again,
                hosts=tuple(homes.items()),
                reason=f"step {snap.step} is complete in memory (lineage {snap.lineage}); newest durable step: "
                f"{self.journal.durable_step}",
                set_aside=aside,
            )
            self._discard(group, snap.lineage, snap.step)
            return
        if want is not None or stored:
            step = want if want is not None else stored[-1]
            tail = self.journal.tail
            assert tail is not None
            save = next((one.save for one in tail.live if one.step == step), None)
            best = self.memory.candidates()[:1]
            self._choice = RestoreChoice(
                tier="storage",
                step=step,
                begins=group.lineage,
                save=save,
                reason=f"step {step} is durable; newest complete in memory: {best[0].step if best else 'none'}",
                set_aside=aside,
            )
            self.saves.protect(step)
        else:
            self._choice = RestoreChoice(
                tier="none", step=-1, begins=group.lineage, reason="the run has no step yet", set_aside=aside
            )
        self._discard(group, "", -1)

    def _renew(self, group: Group) -> Group:
        """What the group stages from now on is of a lineage of its own: nothing of before can be taken for it."""
        if not self._renewed:
            self._renewed = True
            self._group = group = self.joins.renew()
        return group

    def _stored(self) -> list[int]:
        return [step for step in self.journal.published if ("storage", SnapshotId("", step)) not in self._excluded]

    def _is_behind(self, snap: Snap, stored: list[int]) -> bool:
        """Never an older memory step over a newer durable one; of equal bytes memory is faster.

        Other bytes under the same number could never become durable: a run that has them as its last step could not end.
        """
        return bool(stored) and (stored[-1] > snap.step or (stored[-1] == snap.step and not self._is_stored(snap)))

    def _is_stored(self, snap: Snap) -> bool:
        return self.journal.snapshots.get(snap.step) == snap.id

    def _memory_choice(self, want: int | None) -> Snap | None:
        found = [snap for snap in self.memory.candidates() if ("memory", snap.id) not in self._excluded]
        if want is not None:
            return next((snap for snap in found if snap.step == want), None)
        return found[0] if found else None

    def _not_found(self, want: int, stored: list[int]) -> None:
        held = sorted({snap.step for snap in self.memory.candidates()})
        damaged = [why for step, why in self._damaged if step == want]
        text = f"step {want} can't be restored: {damaged[-1]}" if damaged else f"step {want} does not exist"
        self._fail(
            "CorruptCheckpointError" if damaged else "StepNotFoundError",
            f"{text}; durable steps: {stored}, in memory: {held}",
            step=want,
            available=sorted({*stored, *held}),
        )

    def _roll_back(self, want: int) -> bool:
        """Retire the newer steps first. True while that has to be waited for."""
        newer = [step for step in sorted(self.journal.live) if step > want]
        if not newer:
            return False
        refused = [text for step in newer if (text := self.journal.refuse_retire(step)) is not None]
        if refused:
            self._fail("StorageError", f"rollback to step {want}: {refused[0]}", step=want)
            return True
        self.saves.abort_after(want, f"rolled back to step {want}")
        why = f"rollback to step {want}"
        self._retire("rollback", [(step, why) for step in newer], why)
        return True

    def _set_aside(self) -> bool:
        """Damaged stored steps leave the log, their data stays. True while that has to be waited for."""
        wanted = [(step, f"damaged: {why}") for step, why in self._aside if step in self.journal.live and self._may_retire(step)]
        self._aside = []
        if not wanted:
            return False
        self._retire("set aside", wanted, f"steps {[one[0] for one in wanted]} are damaged and are set aside")
        return True

    def _may_retire(self, step: int) -> bool:
        refused = self.journal.refuse_retire(step)
        if refused is not None:
            self.desk.log("warning", refused)
        return refused is None

    def _retire(self, kind: Literal["rollback", "set aside"], retires: list[tuple[int, str]], why: str) -> None:
        self._enter("retiring")
        self.journal.request(Request(kind=kind, why=why, retires=tuple(retires)))

    def change(self, request: Request) -> Change | None:
        """See journal.Editor."""
        left = [
            (step, request.kind == "set aside", why) for step, why in request.retires if self.journal.refuse_retire(step) is None
        ]
        return (None, left, request.why) if left else None

    def logged(self, request: Request, entry: LogEntry | None) -> None:  # noqa: ARG002 - see journal.Editor
        if self.phase == "retiring":
            self._enter("looking")

    def _discard(self, group: Group, lineage: str, step: int) -> None:
        choice = self._choice
        assert choice is not None
        self.desk.log("info", f"lineage {group.lineage} restores step {choice.step} from {choice.tier}: {choice.reason}")
        self.snapshots.rebase(group.lineage, lineage, step)
        self.saves.forget_unbelieved()
        self._enter("discarding")

    def _announce(self) -> None:
        choice = self._choice
        assert choice is not None
        base = SnapshotId(choice.lineage, choice.step, choice.again)
        if choice.tier == "memory" and self.memory.complete(base) is None:
            self.desk.log("warning", f"{self.joins.missing_text(base)} by now; choosing again")
            self._enter("looking")
            return
        self._tried = {}
        asks, self._asks = self._asks, Barrier(self.desk.now_s)
        self._enter("trying")
        for ask in asks.everybody():
            self.desk.answer(ask, choice)

    # ---------------------------------------------------------------- how it went

    def _judge(self, group: Group) -> None:
        choice = self._choice
        assert choice is not None
        bad = [one for _, one in sorted(self._tried.items()) if not one.ok]
        if not bad:
            self._settle(group, choice)
            return
        text = "; ".join(f"rank {one.rank}: {one.error}" for one in bad)
        self.desk.log("warning", f"step {choice.step} could not be restored from {choice.tier}: {text}")
        if choice.tier == "none" or (choice.tier == "storage" and not any(one.damaged for one in bad)):
            self._fail("StorageError", f"step {choice.step} could not be restored from {choice.tier}: {text}", step=choice.step)
            return
        self._excluded.add((choice.tier, SnapshotId(choice.lineage, choice.step, choice.again)))
        self._damaged.append((choice.step, f"{choice.tier}: {text}"))
        if choice.tier == "storage":
            self._aside.append((choice.step, text))
            self.saves.protect(-1)
        self._enter("looking")

    def _settle(self, group: Group, choice: RestoreChoice) -> None:
        group.decided = True
        step = choice.step
        self.saves.protect(-1)
        tier = max(
            (one.tier for one in self._tried.values()), key=lambda tier: TIERS.index(tier) if tier in TIERS else -1, default=""
        )
        settled = RestoreSettled(
            step=step,
            tier=tier,
            ahead=tuple(sorted(one for one in self.journal.live if one > step)),
            safe=choice.tier == "storage" or self._is_saved(SnapshotId(choice.lineage, step, choice.again)),
            durable_step=self.journal.durable_step,
            advice=(self.desk.attempt, self.snapshots.seq),
        )
        for ask in self._asks.everybody():
            self.desk.answer(ask, settled)
        self.desk.log("info", f"all {group.world} ranks have restored step {step} from {tier or choice.tier}")
        self._enter("idle")

    def _is_saved(self, base: SnapshotId) -> bool:
        """Whether the restored snapshot is durable, or is going to be."""
        durable, _ = self.saves.fate(base)
        return durable is True or base in self.saves.jobs

    def _fail(self, error: str, message: str, **details: object) -> None:
        self.desk.log("error", message)
        self.desk.fail(self._asks.everybody(), error, message, **details)
        self.saves.protect(-1)
        self._enter("idle")

    # ---------------------------------------------------------------- deadlines

    def tick(self) -> None:
        if self.phase == "idle":
            return
        group = self._group
        assert group is not None
        settings, waited_s = self.desk.settings, self.desk.now_s - self._since_s
        if self.phase == "asking" and waited_s >= settings.barrier_timeout_s:
            missing = self._asks.missing(group.world)
            who = self.joins.where(missing) if group.world is not None else "ranks of unknown number (no host reports this lineage)"
            self._fail(
                "BarrierTimeoutError",
                f"{who} did not call restore within {waited_s:.1f} s",
                missing_ranks=missing[:NAMED],
                phase="restore",
                waited_s=waited_s,
            )
        elif self.phase in ("looking", "retiring"):
            self._tick_looking(waited_s)
        elif self.phase == "discarding" and waited_s >= settings.host_timeout_s:
            while (view := self.snapshots.not_discarded()) is not None:
                self.snapshots.give_up_on(view.host, f"it has not discarded what the restore gives up within {waited_s:.1f} s")
            self.desk.stir = True
        elif self.phase == "trying" and waited_s >= settings.restore_timeout_s:
            missing = [rank for rank in range(group.world or 0) if rank not in self._tried]
            message = f"{self.joins.where(missing)} did not finish restoring within {waited_s:.1f} s"
            details = {"missing_ranks": missing[:NAMED], "phase": "restore", "waited_s": waited_s}
            self._fail("BarrierTimeoutError", message, **details)
            # A rank that has not heard of the restore goes on in a lineage that has been given up.
            self.snapshots.fail(Failure(error="BarrierTimeoutError", message=message, details=details))

    def _tick_looking(self, waited_s: float) -> None:
        settings = self.desk.settings
        self.desk.stir = True
        if waited_s >= settings.host_timeout_s:
            for view in list(self.memory.views):
                # One that has just come back is given the time to answer; one that speaks and has not heard the question yet, too.
                patient = self._is_on_its_way(view) and waited_s < 2 * settings.host_timeout_s
                if view.up and not self._is_fresh(view) and self.snapshots.had_its_time(view) and not patient:
                    why = "trainers of an older lineage are still there" if view.reported_s is not None else "no report"
                    self.snapshots.give_up_on(view.host, f"{why} after {waited_s:.1f} s of restoring")
        if self.desk.now_s - self._began_s >= settings.restore_timeout_s:
            waiting = self._waiting_for() or "the log"
            self._fail(
                "StorageError",
                f"restore waited {self.desk.now_s - self._began_s:.1f} s for {waiting}",
                phase="restore",
                waited_s=self.desk.now_s - self._began_s,
            )


def _has_passed(lineage: str, begun: str) -> bool:
    """Whether whoever asks from `lineage` has finished the restore with which `begun` began."""
    return lineage_order(lineage) >= lineage_order(begun)
