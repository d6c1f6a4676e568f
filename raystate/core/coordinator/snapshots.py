"""From the hosts' reports to advice: which step is stable, which is dead, what must be kept, and which ranks lag."""

from __future__ import annotations

from dataclasses import replace

from raystate.core.coordinator.context import Context, named
from raystate.core.coordinator.copying import Copying
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.interval import Interval
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.journal import Journal
from raystate.core.coordinator.laggards import Laggards
from raystate.core.coordinator.memory import HostView, Memory, Snap
from raystate.core.coordinator.notices import Notices
from raystate.core.coordinator.saves import Saves
from raystate.core.formats.declared import Failure
from raystate.core.formats.events import HostDown, HostReported
from raystate.core.formats.names import HostId, SnapshotId, lineage_order
from raystate.core.formats.orders import Advice, Proposal
from raystate.waits import RETRY_FIRST_S


class Snapshots:
    """Takes the hosts' reports, judges each snapshot by them, and advises the hosts."""

    def __init__(self, context: Context, memory: Memory, joins: Joins, journal: Journal, saves: Saves, notices: Notices):
        self.context = context
        self.memory = memory
        self.joins = joins
        self.journal = journal
        self.saves = saves
        self._laggards = Laggards(context, joins)
        self.copying = Copying(context, memory, joins, notices)
        self.stable = -1  # in the present lineage
        self.dead: set[int] = set()
        self.lost: set[int] = set()  # of these
        self.interval = Interval(context)
        self.proposal: Proposal | None = None  # what all ranks are asked to agree on
        self.failure: Failure | None = None  # why the present lineage can't go on: each trainer's next save() raises it
        self._lineage = ""
        self._advice: Advice | None = None  # the newest
        self._restored_keys: set[SnapshotId] = set()  # what the present lineage has restored
        self._moved: list[tuple[HostView, set[SnapshotId]]] = []  # hosts that have reported, with the snapshots that are new
        self._unadvised: list[HostView] = []  # hosts that need the present advice once more

    # ---------------------------------------------------------------- events

    def host_down(self, event: HostDown) -> None:
        """A node is lost."""
        view = self.memory.hosts.get(event.host)
        if view is not None:
            if view.up:
                self._fall(view, f"down: {event.reason}", level="warning")
            self.saves.absence.lost(view.host)

    def give_up_on(self, host: HostId, why: str) -> None:
        """Wait no longer for a host that answers too late; its next report brings it back."""
        self._fall(self.memory.hosts[host], f"not waited for: {why}")

    def _fall(self, view: HostView, why: str, *, level: str = "info") -> None:
        """A host that only says nothing is most often busy: no warning, and it isn't called down. Nor is one that was to go away."""
        announced = self.copying.notices.went(view.host)
        if announced:
            level, why = "info", f"gone, as announced: {announced}"
        self.context.log(level, f"host {view.host} is {why}")
        self.memory.forget(view, why)
        self.memory.gathering.discard(view.host)
        self.saves.host_gone(view.host, why)
        self.saves.absence.went(view.host)

    def reported(self, event: HostReported) -> None:
        """A host tells what it holds and what its trainers say. An older report than the last, or of a dead incarnation, is ignored."""
        summary = event.summary
        memory = self.memory
        view = memory.view(summary.host)
        is_new = memory.incarnate(view, summary.incarnation, summary.seq)
        if is_new is None or summary.seq <= view.summary_seq:
            return
        if is_new:
            self.saves.host_gone(view.host, f"another one: its HostActor started anew ({summary.incarnation})")
        is_back = view.rise(self.context.now_s)
        if is_back:
            self.context.log("info", f"host {view.host} is back")
            self.copying.notices.came(view.host)
        if is_new or is_back:
            self._unadvised.append(view)
            self.saves.absence.came(view.host)
        self.saves.absence.heard(view.host)
        touched = memory.take(view, summary)
        moved = self.joins.observe(view)
        self.memory.gathering.discard(summary.host)
        group = self.joins.group
        if group is not None:
            self._follow(group)
        self.copying.reported(view)
        if group is not None and (touched or moved):
            self._moved.append((view, {key for key, new in touched.items() if new}))
        if view.sent is not None and (view.advised is None or view.advised < (self.context.attempt, view.sent)):
            if self.context.now_s - view.sent_s >= RETRY_FIRST_S:
                view.tell_again()
                self._unadvised.append(view)
        # A host that was away when the others discarded hears of it before its pieces count again.
        # (test_recovery.test_what_a_restore_gave_up_is_not_believed_when_a_host_comes_back)
        self.memory.tell_discard(view)

    # ---------------------------------------------------------------- stable and dead

    def turn(self) -> None:
        """Judge what all hosts hold now: which snapshots are due, and which has become stable."""
        group = self.joins.group
        if group is not None:
            self._follow(group)
        self.copying.assign()
        for snap in self.memory.snaps.values():
            if snap.complete:
                self._judge(snap)
        moved, self._moved = self._moved, []
        if group is None:
            return
        for view, new in moved if group.alive else ():
            self._find_dead(group, view, new)
        if group.alive and group.all_seen and moved:
            words = [word for view, _ in moved for word in view.trainers if word.lineage == group.lineage]
            self.interval.measured(words, group.seen.values(), group.newest)
        if not group.decided and group.all_seen:
            if not self.memory.gathering and all(seen.newest_step >= 0 for seen in group.seen.values()):
                group.decide()

    def _follow(self, group: Group) -> None:
        """Begin anew, if this is another lineage than before."""
        if group.lineage == self._lineage:
            return
        self._lineage = group.lineage
        self.stable = -1
        self.dead, self.lost = set(), set()
        self.interval.begin()
        self._laggards.forget()
        self.failure = None
        if not group.adopted:
            self.proposal = None

    def _judge(self, snap: Snap) -> None:
        if snap.promised:
            self.saves.want(snap.id, "due")
        elif snap.unequal:  # making it durable tells which leaves, of which ranks, before there is much to lose
            self.saves.want(snap.id, "values of which a step has one differ between ranks")
        group, step = self.joins.group, snap.step
        if group is None or snap.lineage != group.lineage or step <= self.stable or step in self.dead:
            return
        # What is complete only after the choice was made is given up by it: no one may rely on it.
        # (test_recovery.test_what_becomes_complete_after_the_choice_is_not_called_stable)
        if group.restoring:
            return
        if not self.copying.is_on or (not self.memory.gathering and self.copying.is_safe(snap)):
            self._stable(group, step)

    def _stable(self, group: Group, step: int) -> None:
        self.stable = step
        group.decide()
        if self.dead:
            self.dead, self.lost = ({one for one in steps if one > step} for steps in (self.dead, self.lost))
        self.interval.stable(group.newest)

    def _find_dead(self, group: Group, view: HostView, new: set[SnapshotId]) -> None:
        """A snapshot is dead once a rank has passed its step and neither holds a piece nor is still staging one.

        A report shows a trainer's word and its slots together (the word is read first), so one
        report is enough to judge its ranks: of `view`, which has just reported, and of all hosts
        for a snapshot that is `new` here: the hosts that skipped it need not report again.
        (test_snapshots.test_what_two_ranks_of_one_host_have_reported_together_is_judged_for_all)
        """
        if self.memory.gathering:  # another host may have the copy
            return
        for key, snap in self.memory.snaps.items():
            known = self.lost if snap.promised_by_some else self.dead
            if key.lineage != group.lineage or key.step <= self.stable or key.step in known or snap.complete:
                continue
            for other in self.memory.views if key in new else (view,):
                rank = snap.skipper(other)
                if rank is not None:
                    self._dead(group, snap, rank, other)
                    break

    def _dead(self, group: Group, snap: Snap, rank: int, view: HostView) -> None:
        step, is_new = snap.step, snap.step not in self.dead
        self.dead.add(step)
        why = f"rank {rank} (host {view.host}) skipped step {step}"
        self.context.log("debug", why, step=step)
        if snap.promised_by_some:
            self.lost.add(step)
            # An earlier Coordinator may have seen that it had one, which made room. (test_ending.test_why_a_copy_is_gone_is_not_said)
            self.saves.lost(snap.id, f"rank {rank} (host {view.host}) has no copy of it, and newer steps came")
        if is_new:
            self.interval.skipped(step, group.newest, group.seen[rank].stride if rank in group.seen else 1, why)

    # ---------------------------------------------------------------- advice

    def keep(self) -> tuple[SnapshotId, ...]:
        """What must not be overwritten although another lineage is the current one."""
        keys: list[SnapshotId] = self.saves.keys()
        group, restore = self.joins.group, self.memory.restore
        if group is None or self.stable >= 0:
            return tuple(keys)
        if restore is not None and restore.by == group.lineage:
            if restore.lineage:
                # With those whose host is down: it may hear this before it has said what it holds.
                known = self._restored_keys.union(self.memory.snaps)
                self._restored_keys = {key for key in known if (key.lineage, key.step) == (restore.lineage, restore.step)}
                keys += [*self._restored_keys]
                keys += self.copying.kept_beside(restore, keys)
            return tuple(sorted(set(keys)))
        best = self.memory.candidates()[:1]
        keys += [snap.id for snap in best]
        if not group.decided:
            # Not known yet which one will be restored: one that a host still has to report about may turn out complete.
            for snap in self.memory.snaps.values():
                if lineage_order(snap.lineage) < group.order and (not best or snap.order > best[0].order):
                    if self.memory.believed(snap.lineage, snap.step):
                        keys.append(snap.id)
        return tuple(sorted(set(keys)))

    def advise(self) -> None:
        """Give the hosts new advice if it differs from the last, and those that have missed the last the same once more."""
        group = self.joins.group
        # Advice frees slots and shows a proposal: not before all hosts have said what they hold.
        # (test_agreement.test_a_new_coordinator_goes_on_with_the_newest_proposal_that_a_host_shows)
        if self.memory.gathering or (group is None and self._advice is None and not self.memory.asks_all):
            return
        if group is not None:
            self._follow(group)
            self.copying.turn()
        journal, restore = self.journal, self.memory.restore
        lineage = "" if group is None else group.lineage
        decided = group is not None and (group.decided or self.stable >= 0 or (restore is not None and restore.by == lineage))
        advice = Advice(
            attempt=self.context.attempt,
            seq=self.memory.advice_seq,
            lineage=lineage,
            decided=decided,
            stable=self.stable,
            dead=tuple(sorted(self.dead)),
            lost=tuple(sorted(self.lost)),
            keep=self.keep(),
            interval=self.interval.advised,
            proposal=self.proposal,
            failure=self.failure,
            durable_step=journal.durable_step,
            save_errors=tuple(journal.troubles),
            storage_fails=journal.fails,
        )
        self.saves.pace.say_if_held_up(advice.keep, lineage, self.stable)
        views = self._unadvised
        if advice != self._advice or self.memory.asks_all:
            self.memory.asks_all = False
            self.memory.advice_seq += 1
            advice = self._advice = replace(advice, seq=self.memory.advice_seq)
            views = self.memory.views
        self._unadvised = []
        for view in views:
            if view.up and view.sent != advice.seq:
                view.told(advice.seq, self.context.now_s)
                self.context.out.append(replace(advice, host=view.host))

    # ---------------------------------------------------------------- time

    def tick(self) -> None:
        """Count silent hosts as down, and look whether ranks have stopped saving, or stand still."""
        self._laggards.standing_still(saving=bool(self.saves.jobs))
        now_s, settings = self.context.now_s, self.context.settings
        for view in self.memory.views:
            if view.up and now_s - view.heard_s >= settings.host_timeout_s:
                self._fall(view, f"silent for {now_s - view.heard_s:.0f} s")
            elif view.up:
                self.memory.tell_discard(view)
        self.copying.tick()
        if self.memory.gathering and now_s - self.context.claimed_s >= settings.host_timeout_s:
            self.context.log("warning", f"hosts {named(sorted(self.memory.gathering))} have not reported; going on without them")
            self.memory.gathering = set()
        if self.failure is None:
            self.failure = self._laggards.not_saving()
