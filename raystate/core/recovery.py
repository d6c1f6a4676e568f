"""Which step a group restores: chosen once for all ranks, over memory and storage together.

The phases of one restore:
    asking        the ranks arrive
    looking       fresh reports of all hosts, publications and commits under way come to an end
    retiring      rollback only: the newer steps are retired in the log
    discarding    every host discards what the choice gives up
    trying        the ranks restore and say how it went; if one fails, choose again without that copy
"""

from __future__ import annotations

from typing import Literal

from raystate.core.desk import Barrier, Desk
from raystate.core.group import Group, Joins
from raystate.core.journal import Change, Journal
from raystate.core.memory import Memory, Snap
from raystate.core.messages import TIERS, HostId, LogEntry, RestoreAsked, RestoreChoice, RestoreSettled, RestoreTried, Tier
from raystate.core.saves import Saves
from raystate.core.snapshots import Snapshots

Phase = Literal["idle", "asking", "looking", "retiring", "discarding", "trying"]


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
        self._want: int | None = None
        self._rollback = False
        self._resumed = -1  # the step that an earlier attempt had chosen for this group
        self._tried: dict[int, RestoreTried] = {}
        self._since_s = 0.0  # when this phase began
        self._began_s = 0.0  # when all ranks had asked
        self._fresh_seq = -1
        self._homes: dict[int, HostId] = {}
        self._choice: RestoreChoice | None = None
        self._excluded: set[tuple[Tier, str, int]] = set()
        self._damaged: list[tuple[int, str]] = []
        self._aside: list[tuple[int, str]] = []  # damaged in storage, to be set aside once an older step is chosen

    # ---------------------------------------------------------------- events

    def asked(self, event: RestoreAsked) -> None:
        if not self.joins.check(event.ask, event.lineage, event.rank):
            return
        group = self.joins.group
        assert group is not None
        if self._group is not group or self.phase == "idle":
            self._begin(group)
        elif self.phase == "trying" and event.ask not in self._asks.everybody():
            # The rank never got the choice, or has begun anew: it gets the same one.
            assert self._choice is not None
            self.desk.answer(event.ask, self._choice)
            return
        self._asks.add(event.rank, event.ask)
        self._asked[event.rank] = (event.step, event.rollback)
        self.desk.stir = True

    def tried(self, event: RestoreTried) -> None:
        if not self.joins.check(event.ask, event.lineage, event.rank):
            return
        choice, group = self._choice, self.joins.group
        assert group is not None
        if group.adopted and (self.phase in ("idle", "asking") or self._group is not group):
            # An earlier attempt made the choice, and its ranks have tried it: choose once more, the same step if it is good.
            if self._group is not group or self.phase == "idle":
                self._begin(group)
            self._resumed = event.step if event.ok and event.step >= 0 else self._resumed
            self._asks.add(event.rank, event.ask)
            self.desk.stir = True
            return
        if self.phase != "trying" or choice is None or self._group is not group:
            self.desk.fail(
                [event.ask],
                "StaleAttemptError",
                f"rank {event.rank} reports a restore of step {event.step}, but none is under way",
                rank=event.rank,
                step=event.step,
            )
            return
        if event.step != choice.step:
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

    def _begin(self, group: Group) -> None:
        self._group = group
        self._asks = Barrier(self.desk.now_s)
        self._asked = {}
        self._resumed = -1
        self._tried = {}
        self._choice = None
        self._excluded = set()
        self._damaged = []
        self._aside = []
        self.saves.restoring = -1
        self._enter("asking")

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        self._since_s = self.desk.now_s
        self.snapshots.awaited = phase == "looking"
        self.desk.stir = True

    def turn(self) -> None:
        if self.phase == "idle":
            return
        group = self._group
        assert group is not None
        if not group.alive or self.joins.group is not group:
            self._fail("StaleAttemptError", f"lineage {group.lineage} has ended: {group.why_ended or 'replaced'}")
            return
        if self.phase == "asking" and group.world is not None and not self._asks.missing(group.world):
            self._all_asked()
        if self.phase == "looking" and not self._waiting_for():
            self._choose(group)
        if self.phase == "discarding" and not self._not_discarded():
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
        if snapshots.gathering:
            return f"reports of hosts {sorted(snapshots.gathering)}"
        if self._fresh_seq < 0:
            self._fresh_seq = snapshots.demand_fresh()
        late = [view.host for view in memory.hosts.values() if view.up and not self._is_fresh(view.host)]
        late += [view.host for view in memory.hosts.values() if not view.up and view.back_until_s > self.desk.now_s]
        if late:
            return f"reports of hosts {sorted(late)}"
        job = self.saves.running
        committing = job is not None and job.phase in ("packaging", "committing")
        best = self._memory_choice(None) if self._want is None else None
        if best is not None and not self._is_behind(best, self._stored()):
            on_the_way = [*self.journal.publishing, *([job.key[1]] if job is not None and committing else [])]
            if all(step <= best.step for step in on_the_way):
                return ""  # whatever becomes of them, memory has something newer: storage that is slow or out holds nobody up
        if self.journal.publishing:
            return (
                f"the publication of steps {list(self.journal.publishing)} ({'; '.join(self.journal.troubles[-1:]) or 'under way'})"
            )
        if self.journal.busy or committing:
            return f"the commit of step {job.key[1]}" if job is not None else "a log entry"
        return ""

    def _is_fresh(self, host: HostId) -> bool:
        """The host's last report was made after all ranks had asked, and no trainer of an older lineage is left there."""
        view = self.memory.hosts[host]
        if view.reported_s is None or view.reported_s < self._began_s:
            return False
        if view.advised is not None and view.advised < (self.desk.attempt, self._fresh_seq):
            return False
        group = self._group
        assert group is not None
        return all(one.lineage == group.lineage for one in view.trainers)

    # ---------------------------------------------------------------- the choice

    def _choose(self, group: Group) -> None:
        want = self._want
        snap = self._memory_choice(want)
        stored = self._stored()
        if want is not None:
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
        if snap is not None:
            homes = snap.homes(group.hosts)
            self._homes = homes
            self._choice = RestoreChoice(
                tier="memory",
                step=snap.step,
                lineage=snap.lineage,
                hosts=tuple(homes.items()),
                reason=f"step {snap.step} is complete in memory (lineage {snap.lineage}); newest durable step: "
                f"{self.journal.durable_step}",
                set_aside=aside,
            )
            self._discard(group, snap.lineage, snap.step)
            return
        self._homes = {}
        if want is not None or stored:
            step = want if want is not None else stored[-1]
            tail = self.journal.tail
            assert tail is not None
            save = next((one.save for one in tail.live if one.step == step), None)
            best = self.memory.candidates()[:1]
            self._choice = RestoreChoice(
                tier="storage",
                step=step,
                save=save,
                reason=f"step {step} is durable; newest complete in memory: {best[0].step if best else 'none'}",
                set_aside=aside,
            )
            self.saves.restoring = step
        else:
            self._choice = RestoreChoice(tier="none", step=-1, reason="the run has no step yet", set_aside=aside)
        self._discard(group, "", -1)

    def _stored(self) -> list[int]:
        return [step for step in self.journal.published if ("storage", "", step) not in self._excluded]

    def _is_behind(self, snap: Snap, stored: list[int]) -> bool:
        """Never an older memory step over a newer durable one; of equals memory is faster."""
        return bool(stored) and stored[-1] > snap.step

    def _memory_choice(self, want: int | None) -> Snap | None:
        found = [snap for snap in self.memory.candidates() if ("memory", snap.lineage, snap.step) not in self._excluded]
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
        self._retire([(step, False, why) for step in newer], why)
        return True

    def _set_aside(self) -> bool:
        """Damaged stored steps leave the log, their data stays. True while that has to be waited for."""
        wanted = [
            (step, True, f"damaged: {why}") for step, why in self._aside if step in self.journal.live and self._may_retire(step)
        ]
        self._aside = []
        if not wanted:
            return False
        self._retire(wanted, f"steps {[one[0] for one in wanted]} are damaged and are set aside")
        return True

    def _may_retire(self, step: int) -> bool:
        refused = self.journal.refuse_retire(step)
        if refused is not None:
            self.desk.log("warning", refused)
        return refused is None

    def _retire(self, retires: list[tuple[int, bool, str]], why: str) -> None:
        self._enter("retiring")

        def build() -> Change | None:
            left = [one for one in retires if self.journal.refuse_retire(one[0]) is None]
            return (None, left, why) if left else None

        def done(_: LogEntry | None) -> None:
            if self.phase == "retiring":
                self._enter("looking")

        self.journal.request(build, done)

    def _discard(self, group: Group, lineage: str, step: int) -> None:
        choice = self._choice
        assert choice is not None
        self.desk.log("info", f"lineage {group.lineage} restores step {choice.step} from {choice.tier}: {choice.reason}")
        self.snapshots.rebase(group.lineage, lineage, step)
        self.saves.forget_unbelieved()
        self._enter("discarding")

    def _not_discarded(self) -> list[HostId]:
        return sorted(view.host for view in self.memory.hosts.values() if view.up and not self.snapshots.has_base(view))

    def _announce(self) -> None:
        choice = self._choice
        assert choice is not None
        if choice.tier == "memory" and self.memory.complete((choice.lineage, choice.step)) is None:
            self.desk.log(
                "warning", f"{self.memory.missing_text((choice.lineage, choice.step), self.joins.where)} by now; choosing again"
            )
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
        self._excluded.add((choice.tier, choice.lineage if choice.tier == "memory" else "", choice.step))
        self._damaged.append((choice.step, f"{choice.tier}: {text}"))
        if choice.tier == "storage":
            self._aside.append((choice.step, text))
            self.saves.restoring = -1
        self._enter("looking")

    def _settle(self, group: Group, choice: RestoreChoice) -> None:
        group.decided = True
        step = choice.step
        self.saves.conflicts[group.lineage] = frozenset(one for one in self.journal.live if one > step)
        if (choice.tier == "memory" and choice.lineage == group.lineage) or group.newest > step:
            self.snapshots.rewind(step)
        self.saves.restoring = -1
        tier = max(
            (one.tier for one in self._tried.values()), key=lambda tier: TIERS.index(tier) if tier in TIERS else -1, default=""
        )
        for ask in self._asks.everybody():
            self.desk.answer(ask, RestoreSettled(step=step, tier=tier))
        self.desk.log("info", f"all {group.world} ranks have restored step {step} from {tier or choice.tier}")
        self._enter("idle")

    def _fail(self, error: str, message: str, **details: object) -> None:
        self.desk.log("error", message)
        self.desk.fail(self._asks.everybody(), error, message, **details)
        self.saves.restoring = -1
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
                missing_ranks=missing,
                phase="restore",
                waited_s=waited_s,
            )
        elif self.phase in ("looking", "retiring"):
            self._tick_looking(waited_s)
        elif self.phase == "discarding" and waited_s >= settings.host_timeout_s:
            for host in self._not_discarded():
                self.snapshots.give_up_on(host, f"it has not discarded what the restore gives up within {waited_s:.1f} s")
            self.desk.stir = True
        elif self.phase == "trying" and waited_s >= settings.restore_timeout_s:
            missing = [rank for rank in range(group.world or 0) if rank not in self._tried]
            self._fail(
                "BarrierTimeoutError",
                f"{self.joins.where(missing)} did not finish restoring within {waited_s:.1f} s",
                missing_ranks=missing,
                phase="restore",
                waited_s=waited_s,
            )

    def _tick_looking(self, waited_s: float) -> None:
        settings = self.desk.settings
        self.desk.stir = True
        if waited_s >= settings.host_timeout_s:
            for view in list(self.memory.hosts.values()):
                if view.up and not self._is_fresh(view.host):
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
