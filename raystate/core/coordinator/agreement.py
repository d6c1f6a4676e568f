"""All ranks act at the same step: stop there, or make it durable. No message is sent until a step
is proposed.

A rank that has acknowledged a proposal waits at its step until it is confirmed or withdrawn. A rank
that is already there, or past it, refuses, or is seen to have made that step without an answer.
Then a later step is proposed under a new id.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

from raystate.core.coordinator.context import Context
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.journal import Journal
from raystate.core.coordinator.notices import Notices
from raystate.core.coordinator.saves import Saves
from raystate.core.coordinator.snapshots import Snapshots
from raystate.core.formats.orders import Proposal
from raystate.core.formats.reports import TrainerWord
from raystate.waits import FIRST_STEP_AGAIN_S

IDS_PER_ATTEMPT = 1_000_000
_OUTCOMES = {"proposed": "not all have answered", "confirmed": "all have agreed", "withdrawn": "it was withdrawn"}
TO_AGREE = 0.5  # of the time until a stop: the rest is for making the step durable, or what is newest in memory


@dataclass(slots=True)
class _Stop:
    """A stop that was asked for.

    Attributes:
        reason: why.
        only: the one worker group that is meant; "": any that trains.
        agree_until_s: a common step must be agreed on by then.
        gone_s: then some trainers may be gone; inf: none goes away.
        is_late: half of the time has passed; the newest snapshot was made durable, if need be.
    """

    reason: str
    only: str
    agree_until_s: float
    gone_s: float
    is_late: bool = False


class Agreement:
    """One proposal at a time: made, answered by all ranks, and confirmed or withdrawn."""

    def __init__(self, context: Context, joins: Joins, journal: Journal, saves: Saves, snapshots: Snapshots, notices: Notices):
        self.saves = saves
        self.context = context
        self.joins = joins
        self.journal = journal
        self.snapshots = snapshots
        self.notices = notices
        self._counter = 0
        self._tries = 0
        self._group: Group | None = None
        self._until_s = 0.0
        self._stop: _Stop | None = None
        self._stopping: Group | None = None  # the group that has been asked to stop
        self._last_save_s = 0.0
        self._newest_at_save = -1
        self._released = 0
        self._agreed = ("", -1)  # lineage and step of the last proposal by which all ranks have promised a save

    def start(self) -> None:
        """This attempt owns the run: time-based saves count from now."""
        self._last_save_s = self.context.now_s

    def stop(self, reason: str, within_s: float | None, only: Group | None) -> None:
        """All ranks are to stop at one step. The earliest deadline counts.

        Args:
            reason: why.
            within_s: as in StopAsked.
            only: the one worker group that is meant; None: any that trains.
        """
        self._forget_stop_of_others(self.joins.group)
        now_s = self.context.now_s
        gone_s = now_s + (math.inf if within_s is None else within_s)
        if self._stop is None or gone_s < self._stop.gone_s:
            to_agree_s = self.context.settings.barrier_timeout_s if within_s is None else within_s * TO_AGREE
            agree_until_s = now_s + to_agree_s
            if self._stop is not None:
                agree_until_s = min(agree_until_s, self._stop.agree_until_s)
            self._stop = _Stop(reason, "" if only is None else only.name, agree_until_s, gone_s)
            when = "" if within_s is None else f", within {within_s:.1f} s"
            self.context.log("info", f"stop asked{when}: {reason}")

    def _forget_stop_of_others(self, group: Group | None) -> None:
        stop = self._stop
        if stop is not None and stop.only and group is not None and group.name != stop.only:
            self._stop = None

    # ---------------------------------------------------------------- progress

    def turn(self) -> None:
        """Go on as far as the ranks' answers and the time allow."""
        for reason, within_s in self.notices.news():
            self.stop(reason, within_s, self.joins.group)
        self._go_on()
        self._look_at_time()

    def _go_on(self) -> None:
        proposal, group = self.snapshots.proposal, self.joins.group
        self._forget_stop_of_others(group)
        if group is None or not group.alive:
            if proposal is not None and proposal.state == "proposed":
                self._end(proposal, "the group has ended")
            if self._stop is not None and group is not None and (self._stopping is group or self._stop.only):
                self._stop = None  # the group that was to stop is gone
            return
        if self._group is not group and not self._inherit(group):
            return
        proposal = self.snapshots.proposal
        if proposal is None or proposal.state == "withdrawn":
            self._release_waiting(group)
            if self._stop is not None:
                self._propose(group, "stop", self._stop.reason, self._stop.agree_until_s)
            return
        if group.world is None:
            return
        words = group.seen.values()
        if proposal.state == "proposed":
            if self._stop is not None and proposal.kind == "save":
                self._end(proposal, "a stop comes first")
            elif any(_refuses(word, proposal) for word in words):
                self._tries += 1
                self._propose(group, proposal.kind, proposal.reason, self._until_s)
            elif sum(word.ack_id == proposal.id for word in words) == group.world:
                self.snapshots.proposal = replace(proposal, state="confirmed")
                acts = proposal.kind if group.world > 1 else f"{proposal.kind}s"
                text = f"{_all_ranks(group)} {acts} at step {proposal.step}: {proposal.reason}"
                self.context.log(_level(proposal.kind), text)
                if proposal.kind == "stop":
                    self._last_save_s = self.context.now_s  # the common step becomes durable: the next save by time counts from it
        elif proposal.kind == "save" and sum(word.newest_step >= proposal.step for word in words) == group.world:
            self._tries = 0
            self._released = proposal.id
            self._agreed = (group.lineage, proposal.step)
            self.snapshots.proposal = None

    def _inherit(self, group: Group) -> bool:
        """Go on with what an earlier attempt has proposed to this group. False while that is not known yet.

        Its outcome may have reached some hosts and not others. So every host has to say what it has shown to its trainers, after it
        has heard of this attempt: from then on nothing older reaches it.
        """
        if group.adopted:
            if not group.all_seen:
                return False
            views = [self.snapshots.memory.hosts.get(host) for host in sorted(set(group.hosts.values()))]
            for view in views:
                if view is None or not view.up or (view.heard_of is not None and view.heard_of < self.context.attempt):
                    return False
            acked = group.acked
            shown = [view.proposal_seen for view in views if view is not None and view.proposal_seen is not None]
            known = [one for one in shown if one.id >= acked]
            if acked and known:
                # A rank that is shown a newer one than it has agreed to may go past the older one's step.
                # An outcome that one host knows is the outcome.
                inherited = max(known, key=lambda one: (one.id, one.state != "proposed"))
                self.snapshots.proposal = inherited
                self._until_s = self.context.now_s + self.context.settings.barrier_timeout_s
                asked = f"{_all_ranks(group)} to {inherited.kind} at step {inherited.step}"
                self.context.log("info", f"an earlier attempt had asked {asked}, and {_OUTCOMES[inherited.state]}")
        if self._group is None or self._group.name != group.name:
            self._released = 0  # its hosts may still show what was withdrawn from the group before, and its ranks agree to that
        self._group = group
        self._tries = 0
        self._newest_at_save = -1  # it may have gone back: what was saved before says nothing of its steps
        return True

    def _release_waiting(self, group: Group) -> None:
        """A trainer that has acknowledged a forgotten proposal must not wait for its outcome."""
        proposal = self.snapshots.proposal
        acked = group.acked
        if acked <= self._released or (proposal is not None and proposal.id >= acked):
            return
        self._released = acked
        self.snapshots.proposal = Proposal(id=acked, kind="save", step=-1, state="withdrawn", reason="it is not known any more")

    def _propose(self, group: Group, kind: Literal["stop", "save"], reason: str, until_s: float) -> None:
        if not group.all_seen or group.restoring:
            return
        newest = max(group.newest, max((seen.ack_step for seen in group.seen.values()), default=-1))
        margin = self.context.settings.stop_margin_steps * 2 ** min(self._tries, 10)
        old = self.snapshots.proposal
        self._counter += 1
        number = self.context.attempt * IDS_PER_ATTEMPT + self._counter
        if old is not None and old.id >= number:
            number = old.id + 1
        if kind == "stop":
            self._stopping = group
        self._until_s = until_s
        step = max(0, newest) + max(1, margin)
        self.snapshots.proposal = Proposal(id=number, kind=kind, step=step, state="proposed", reason=reason)
        self.context.log(_level(kind), f"asks {_all_ranks(group)} to {kind} at step {step}: {reason}")

    def _every_s(self) -> float:
        """Between saves by time; inf: there are none. A first save that was lost is one, too: the trainers count it as made."""
        every_s = self.snapshots.interval.durable.every_s
        is_lost = self.context.settings.save_first and self.saves.failed and not self.journal.live
        return min(FIRST_STEP_AGAIN_S, every_s or FIRST_STEP_AGAIN_S) if is_lost else every_s

    def _why(self, every_s: float) -> str:
        if self.context.settings.save_every_s is None:
            return "the first save of the run was lost"
        least = f", {every_s:g} s after the one before" if every_s else ""
        return f"no save is under way{least}" if self.context.settings.save_when_idle else f"every {every_s:.6g} s"

    def _is_saving(self, group: Group) -> bool:
        """Whether a save is under way, or one that all ranks have agreed on is still being staged."""
        if self.saves.jobs:
            return True
        if self.context.now_s - self._last_save_s > self.context.settings.save_timeout_s:
            return False
        if self.journal.publishing:
            return True
        lineage, step = self._agreed
        # The ranks act at the first step from the agreed one on for which they call save(), so that one or a later one has to be over.
        live = ((one.lineage, one.step) for one in reversed(self.journal.live.values()))
        lost = ((key.lineage, key.step) for key in reversed(self.saves.failed))
        over = itertools.chain(live, lost, reversed(self.journal.facts.retired))
        return lineage == group.lineage and not any(one == lineage and at >= step for one, at in over)

    def _end(self, proposal: Proposal, why: str) -> None:
        self.snapshots.proposal = replace(proposal, state="withdrawn", reason=why)
        self._tries = 0
        self.context.log("warning", f"the request to {proposal.kind} at step {proposal.step} is withdrawn: {why}")

    def _unanswered(self, proposal: Proposal) -> str:
        group = self.joins.group
        seen = {} if group is None else group.seen
        return f"{self.joins.where([rank for rank, one in seen.items() if one.ack_id != proposal.id])} did not answer"

    # ---------------------------------------------------------------- time

    def _stop_is_late(self, stop: _Stop, proposal: Proposal | None) -> None:
        """The time to agree has passed.

        If no trainer goes away, training goes on: until the step that all have agreed on, or
        without a stop. Otherwise the newest step in memory becomes durable, unless all hold the
        common step. Ranks that have not agreed get half of the rest of the time. Then the group is
        ended: without an agreement as soon as that save is over, else at the end of the notice.
        """
        group = self.joins.group
        agreed = group is not None and proposal is not None and proposal.kind == "stop" and proposal.state == "confirmed"
        if stop.gone_s == math.inf:
            if agreed:
                # They stop when they get there: a rank that has stopped there can't be called back.
                # (test_simulator.test_planted_bug_of_peer_copies_is_found, "a growth taken back")
                stop.agree_until_s = math.inf
            else:
                self._give_up_stop(stop, proposal)
            return
        now_s, was_late = self.context.now_s, stop.is_late
        if not was_late:
            stop.is_late = True
            common = proposal.step if agreed and proposal is not None else None
            if common is None or group is None or any(seen.newest_step < common for seen in group.seen.values()):
                self._save_last_stable()
            if common is None:
                stop.agree_until_s = self._until_s = now_s + (stop.gone_s - now_s) * TO_AGREE
        if now_s >= stop.gone_s or (was_late and not (agreed or self.saves.jobs or self.journal.publishing)):
            why = self._give_up_stop(stop, proposal)
            if group is not None and len(group.left) < (group.world or 1):
                self.joins.end(why, announced=True)

    def _save_last_stable(self) -> None:
        for snap in self.snapshots.memory.candidates()[:1]:
            if snap.step > self.journal.durable_step:
                self.saves.want(snap.id, "the stop came too late for a common step", again=True)

    def _give_up_stop(self, stop: _Stop, proposal: Proposal | None) -> str:
        """Forget it. Returns why it did not work."""
        self._stop = None
        if proposal is not None and proposal.kind == "stop" and proposal.state == "confirmed":
            return f"it should have stopped at step {proposal.step}, and still runs when it has to be gone: {stop.reason}"
        why = "not all ranks train yet"
        if proposal is not None and proposal.state == "proposed":
            why = f"{self._unanswered(proposal)} in time"
            self._end(proposal, f"{why}: {stop.reason}")
        return f"no step to stop at together, {why}: {stop.reason}"

    def _look_at_time(self) -> None:
        """Withdraw what was not answered in time, and propose a save when one is due by time."""
        proposal, now_s = self.snapshots.proposal, self.context.now_s
        if self._stop is not None and now_s >= self._stop.agree_until_s:
            self._stop_is_late(self._stop, proposal)
        elif proposal is not None and proposal.state == "proposed" and now_s >= self._until_s:
            self._end(proposal, f"{self._unanswered(proposal)} within {self.context.settings.barrier_timeout_s:.1f} s")
            self._last_save_s = now_s
        every_s, group = self._every_s(), self.joins.group
        if group is None or not group.alive or now_s - self._last_save_s < every_s:
            return
        if self._stop is not None or self._group is not group or (proposal is not None and proposal.state != "withdrawn"):
            return
        settings = self.context.settings
        if (settings.save_when_idle or settings.save_measured) and self._is_saving(group):
            return
        if group.newest > self._newest_at_save:
            self._last_save_s = now_s
            self._newest_at_save = group.newest
            self._tries = 0
            self._propose(group, "save", self._why(every_s), now_s + self.context.settings.barrier_timeout_s)


def _level(kind: Literal["stop", "save"]) -> str:
    """Of the lines about a proposal. A save has one for people once its step is durable."""
    return "info" if kind == "stop" else "debug"


def _all_ranks(group: Group) -> str:
    return f"all {group.world} ranks" if group.world != 1 else "the only rank"


def _refuses(word: TrainerWord, proposal: Proposal) -> bool:
    """A rank has refused, or has passed the step unasked. The second kind can't answer: its next step needs ranks that wait."""
    return not word.ack_ok if word.ack_id == proposal.id else word.ack_id < proposal.id and word.newest_step >= proposal.step
