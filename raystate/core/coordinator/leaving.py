"""Answers wait_until_finished(), and ends the run: by close(), by the driver, or when no trainer is left."""

from __future__ import annotations

from typing import Literal

from raystate.core.coordinator.context import NAMED, Barrier, Context, named, step_text
from raystate.core.coordinator.fresh_reports import FreshReports
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.journal import Journal
from raystate.core.coordinator.memory import HostView, Memory
from raystate.core.coordinator.promises import Promises
from raystate.core.coordinator.saves import Saves
from raystate.core.coordinator.snapshots import Snapshots
from raystate.core.formats.commands import Finish
from raystate.core.formats.entries import WHY_CHARS, is_made, kept_steps
from raystate.core.formats.names import SnapshotId, group_of
from raystate.core.formats.questions import LeaveAsked, ReleaseAsked
from raystate.core.formats.replies import LeaveReply
from raystate.core.formats.texts import of_step
from raystate.waits import HEARD_S, STARTS_S

UNFINISHED = "the trainers ended before all ranks had copied it"

Phase = Literal["open", "asking", "hearing", "saving", "closing", "finished"]


class Leaving:
    """The phases of an end:

    asking    the ranks of the group arrive (close)
    hearing   reports of what everybody had saved when it asked; of a release, of what all hosts hold now
    saving    the last step, and everything else that was promised, becomes durable or fails
    closing   what is decided is carried out
    """

    def __init__(self, context: Context, memory: Memory, joins: Joins, journal: Journal, saves: Saves, snapshots: Snapshots):
        self.context = context
        self.memory = memory
        self.joins = joins
        self.journal = journal
        self.saves = saves
        self.snapshots = snapshots
        self.phase: Phase = "open"
        self.promises = Promises(context, memory, joins, journal, saves)
        self._fresh_reports = FreshReports(context, memory)
        self._asks = Barrier()
        self._group: Group | None = None  # None: a release, no rank is asked
        self._left: dict[int, LeaveAsked] = {}  # by rank
        self._speaker: tuple[int, int] | None = None  # (rank, word) of a failed trainer that has asked for the release
        self._last: SnapshotId | None = None  # becomes durable
        self._tried_again = False
        self._why = ""
        self._since_s = 0.0
        self._idle_since_s = 0.0

    def is_finished(self) -> bool:
        """Whether the run is released: nothing is decided any more."""
        return self.phase == "finished"

    @property
    def is_settled(self) -> bool:
        """Whether this Coordinator will end, even if a trainer comes now."""
        return self.phase in ("closing", "finished") or (self.phase != "open" and self._group is None)

    @property
    def have_all_closed(self) -> bool:
        """Whether all ranks of the present group have called close."""
        return self._group is not None and self.phase not in ("open", "asking")

    # ---------------------------------------------------------------- who wants it to end

    def leave_asked(self, event: LeaveAsked) -> None:
        """A rank has called close()."""
        if not self.joins.check(event.ask, event.lineage, event.rank):
            return
        group = self.joins.group
        if self.phase != "open" and self._group is None and self._asks.asks:
            # The release did not know of this group, which it would have ended: so it does now.
            # (test_ending.test_a_close_does_not_overtake_a_release)
            why = f"the run is being released: {self._why}"
            self.joins.end(why)
            self.context.fail([event.ask], "StaleAttemptError", why, rank=event.rank, lineage=event.lineage, replaced=True)
            return
        if self.phase == "open" or self._group is not group:
            if self.phase != "open" and self._group is not None:
                self._refuse(
                    "StaleAttemptError", f"lineage {self._group.lineage} has been replaced by {event.lineage}", replaced=True
                )
            self._open("asking")
            self._group = group
            self._why = "all ranks have closed"
        self._asks.add(event.rank, event.ask)
        self._left[event.rank] = event
        for key, why in event.broken:
            self.saves.copy_broke(key, event.rank, why)
        if event.last is not None:
            self._last = event.last if self._last is None else max(self._last, event.last, key=lambda key: key.order)

    def release_asked(self, event: ReleaseAsked) -> None:
        """The driver, or a trainer that has failed, ends the run without asking the ranks."""
        if self.phase == "open" or self._group is not None:
            if self._group is not None and self.phase != "open":
                self._refuse("StaleAttemptError", f"the run is being released: {event.reason}")
            self._release(event.reason, event)
        self._asks.add(-1, event.ask)

    def _release(self, why: str, event: ReleaseAsked | None = None) -> None:
        """No rank trains any more: ask the hosts what they hold; the newest step becomes
        durable."""
        group = self.joins.group
        known = event is not None and group is not None and group.lineage == event.lineage
        self._speaker = (event.rank, event.word) if event is not None and known else None
        self.joins.end(f"the run is released: {why}")
        self._open("hearing")
        self._group = None
        self._why = why
        self._fresh_reports.begin()

    def _open(self, phase: Phase) -> None:
        self.phase = phase
        self._left = {}
        self._last = None
        self._tried_again = False
        self._since_s = self.context.now_s

    def _refuse(self, error: str, message: str, **details: object) -> None:
        """The run is not released: its next start recovers what is there."""
        self.context.log("debug", message)  # those who asked raise it
        self.context.fail(self._asks.everybody(), error, message, **details)
        self._asks = Barrier()
        self.phase = "open"
        self._idle_since_s = self.context.now_s

    def _refuse_last(self, error: str, last: SnapshotId, text: str) -> None:
        """The last step can't become durable: the error names all promises of the group."""
        durable_step = self.journal.durable_step
        text = "; ".join((text, f"newest durable step: {step_text(durable_step)}", *self._others_late(last.step)))
        self._refuse(error, text, step=last.step, durable_step=durable_step)

    def _others_late(self, told: int) -> tuple[str, ...]:
        """Why other promised steps are not durable, each once."""
        if self._group is None:
            return self._texts_of_release(told)
        fates = self.promises.fates()
        return tuple(dict.fromkeys(text for one in self._left.values() for text in fates.late(one, but=told)))

    def _texts_of_release(self, told: int = -1) -> tuple[str, ...]:
        texts = {key.step: why for key, why in self._lost_at_release(told).items()}
        return tuple(of_step(step, why) for step, why in sorted(texts.items()))

    def _lost_at_release(self, told: int = -1) -> dict[SnapshotId, str]:
        """The steps that the last group was promised and that are not durable, but for `told`, which
        is named already: why, oldest first."""
        group, fate = self.joins.group, self.saves.fate
        name = "" if group is None else group.name
        lost = {key: why for key, why in self.journal.facts.given_up.items() if group_of(key.lineage) == name}
        for snap in self.memory.snaps.values():
            if snap.promised_by_some and self.memory.believed(snap.lineage, snap.step):
                lost.setdefault(snap.id, "it is in host memory and waits for storage" if snap.complete else UNFINISHED)
        made = kept_steps(self.journal.tail)  # perhaps in a later lineage
        lost = {key: why for key, why in lost.items() if key.step != told and not is_made(key, made)}
        late = {key: (fate(key)[1] or why)[:WHY_CHARS] for key, why in lost.items() if fate(key)[0] is not True}
        return dict(sorted(late.items(), key=lambda one: one[0].order))

    def turn(self) -> None:
        """Answer ranks that wait for what they were promised, and go on as far as what is known and the time allow."""
        self.promises.answer(self.snapshots.failure)
        self._go_on()
        self._look_at_deadlines()

    def _go_on(self) -> None:
        if self.phase in ("open", "finished"):
            return
        group = self._group
        if group is not None and not group.alive and self.phase != "closing":
            self._refuse("StaleAttemptError", f"lineage {group.lineage} has ended: {group.why_ended}", replaced=True)
            return
        if self.phase == "asking" and group is not None and self._asks.is_full(group.world):
            self.phase = "hearing"
            self._since_s = self.context.now_s
        if self.phase == "hearing" and not self._unheard_of(group):
            if group is None:
                best = self.memory.candidates()[:1]
                self._last = best[0].id if best and best[0].step > self.journal.durable_step else None
            self.phase = "saving"
            self._since_s = self.context.now_s
        if self.phase == "saving" and self._saved(group):
            self._close()
        if self.phase == "closing" and not self.journal.busy and not self.journal.working:
            if self.journal.closable:
                self.journal.close(f"the run is released: {self._why}")
            else:
                self._finish()

    def _unheard_of(self, group: Group | None) -> str:
        """Which report has to come before anything is decided about the end; "": none."""
        if group is not None:
            # A rank that has saved nothing since its restore has no word to be heard.
            # (test_ending.test_a_new_coordinator_hears_all_hosts_before_it_ends_a_run)
            if gathering := self.memory.gathering:
                return f"no report of hosts {named(sorted(gathering))}"
            rank = group.first_unheard(lambda rank: self._left[rank].word)
            return "" if rank is None else f"no report of what {self.joins.where([rank])} has saved"
        if self._fresh_reports.gathered():
            return "no report of hosts that have just been found"
        ended = self.joins.group
        if self._speaker is not None and ended is not None and not ended.heard(*self._speaker):
            return f"no report of what {self.joins.where([self._speaker[0]])} has saved"
        view = self._fresh_reports.first_late(self._is_late)
        return "" if view is None else f"no report of host {view.host}"

    def _is_late(self, view: HostView) -> bool:
        if view.up:
            return not self._fresh_reports.is_answered(view)
        has_time = self.context.now_s - self._since_s < self.context.settings.host_timeout_s
        # It may be back in a moment
        # (test_ending.test_a_release_waits_a_while_for_a_host_that_is_away).
        return has_time and self.saves.absence.is_away(view.host)

    def _saved(self, group: Group | None) -> bool:
        """True once the step is durable, and everything else that was promised is settled."""
        journal, last = self.journal, self._last
        if last is not None and not self._is_durable(last):
            if last.step in journal.publishing:
                return False  # committed; its publication goes on
            if last in self.saves.failed and self.saves.mistake is not None and self.saves.mistake[0] == last:
                self._give_up_mistaken(group, last, self.saves.mistake[1])
                return False
            key = self._find(last)
            if key is None:
                # The rest of it may come with a host that is away.
                # (test_ending.test_a_close_waits_for_the_host_that_has_the_rest_of_the_last_step)
                if not self.saves.absence.hosts():
                    self._fall_back(group, last)
                return False
            if not self._tried_again:
                # The cause of its failure may be over: a run that ends tries it once more.
                self._tried_again = True
                self.saves.want(key, "the run ends", again=True)
                return False
            failed = self.saves.failed.get(key)
            if failed is not None:
                self._refuse_last("StorageError", last, f"step {last.step} could not be made durable: {failed}")
                return False
            self.saves.want(key, "the run ends")
            return False
        return not self.saves.jobs and not journal.publishing

    def _close(self) -> None:
        """Nothing becomes durable any more: what the group was promised in vain is a fact of the log."""
        self._since_s = self.context.now_s
        self.phase = "closing"
        fates, facts = self.promises.fates(), self.journal.facts
        if self._group is None:
            lost = self._lost_at_release()
        else:
            lost = {key: fates.fate(key)[1] for event in self._left.values() for key in fates.unfinished(event)[2]}
        for key, why in lost.items():
            if key not in facts.given_up:
                facts.give_up(key, why)
        if facts.has_news:  # at once: a retirement that storage holds up may last until the deadline
            self.journal.close(f"what is lost at the run's end: {self._why}")

    def _give_up_mistaken(self, group: Group | None, last: SnapshotId, mistake: str) -> None:
        """No try can make the last step durable. Ranks that close are told. A release goes on
        without the step: the next start, of a corrected script, must not go on from it.
        (test_ending.test_a_mistake_of_the_caller_is_not_what_the_next_start_goes_on_from)"""
        if group is not None:
            self._refuse_last("ConfigError", last, mistake)
            return
        step = step_text(self.journal.durable_step)
        self.context.log("error", f"the run ends without step {last.step}: {mistake}; newest durable step: {step}", step=last.step)
        self._last = None

    def _is_durable(self, last: SnapshotId) -> bool:
        """It was restored from storage, or has been saved (and perhaps retired since)."""
        return not last.lineage or self.saves.fate(last)[0] is True

    def _find(self, last: SnapshotId) -> SnapshotId | None:
        """The snapshot, if it can still be saved or the save is over."""
        if last in self.saves.jobs or (last in self.saves.failed and self._tried_again) or self.memory.complete(last) is not None:
            return last
        return None

    def _fall_back(self, group: Group | None, last: SnapshotId) -> None:
        """The last step is not complete in memory: take the newest one that is, if nothing was promised."""
        if group is None:
            self._release(self._why)
            return
        best = [snap for snap in self.memory.candidates() if snap.order < last.order]
        promised = any(last in one.promised for one in self._left.values())
        if promised or (not best and self.journal.durable_step < 0):
            text = self.saves.failed.get(last) or self.joins.missing_text(last)
            self._refuse_last("StorageError", last, f"step {last.step} cannot be made durable: {text}")
            return
        newest = best[0].id if best and best[0].step > self.journal.durable_step else None
        step = newest.step if newest is not None else self.journal.durable_step
        self.context.log("warning", f"step {last.step} was not staged on all ranks: the run ends with step {step_text(step)}")
        self._last = newest

    def _finish(self) -> None:
        self.phase = "finished"
        step = self.journal.durable_step
        self.context.log("debug", f"the run is released {'without a step' if step < 0 else f'with step {step}'}: {self._why}")
        fates, mistake = self.promises.fates(), self.saves.mistake
        told: dict[str, None] = {}
        level = "debug"  # if all is well, rank 0 warns
        for rank, asks in sorted(self._asks.asks.items()):
            event = self._left.get(rank)  # a release has no rank
            errors = self._texts_of_release() if event is None else tuple(fates.late(event))
            told.update(dict.fromkeys(errors))
            lost = event is not None and (
                fates.is_newest_lost(event, self._last) or (mistake is not None and mistake[0] in event.promised)
            )
            level = "error" if lost or event is None else level
            for ask in asks:
                self.context.answer(ask, LeaveReply(step=step, errors=errors, newest_lost=lost))
        if told:  # a process that has closed may be gone before it reads its answer
            self.context.log(level, f"promised by save(), and not durable: {named([*told])}")
        self.context.out.append(Finish(reason=self._why))

    # ---------------------------------------------------------------- time

    def _look_at_deadlines(self) -> None:
        """Of the present phase; a run without trainers is released."""
        now_s, settings = self.context.now_s, self.context.settings
        waited_s = now_s - self._since_s
        group = self._group
        if self.phase == "asking":
            missing = self._asks.missing(None if group is None else group.world)
            if why := self.joins.why_not_here(missing, "call close", waited_s, settings.barrier_timeout_s):
                self._refuse("BarrierTimeoutError", why, missing_ranks=missing[:NAMED], phase="close", waited_s=waited_s)
        elif self.phase == "hearing" and waited_s >= settings.host_timeout_s:
            self._stop_hearing(group, waited_s)
        elif self.phase == "saving" and waited_s >= settings.save_timeout_s:
            self._stop_saving(waited_s)
        elif self.phase == "closing" and waited_s >= settings.barrier_timeout_s:
            # The log has the removals that are not carried out: the next start finishes them.
            self.context.log(
                "warning", "; ".join((f"released after {waited_s:.1f} s with work for the next start", *self.journal.troubles[-1:]))
            )
            self._finish()
        elif self.phase == "open":
            # It may be a while before a host reports a trainer that has just joined.
            # (test_ending.test_a_trainer_that_has_just_joined_is_a_sign_of_life)
            unseen = self.joins.is_joining or (self.joins.group is not None and not self.joins.group.seen)
            starts_s = STARTS_S if unseen else 0.0
            last_s = max(self.joins.heard_s + starts_s, self.context.claimed_s, self._idle_since_s)
            if now_s - last_s >= settings.idle_timeout_s:
                self._idle_since_s = now_s
                self._release(f"no trainer for {now_s - last_s:.0f} s")
            elif now_s - self.joins.heard_s >= HEARD_S and self._has_come_to_nothing():
                self._release("its trainers are gone, and it has no step")

    def _has_come_to_nothing(self) -> bool:
        """Whether ranks were there and are gone, and no step of the run was ever complete: nothing is worth keeping for the next start."""
        group = self.joins.group
        are_gone = not self.joins.is_joining and group is not None and (not group.alive or len(group.left) == group.world)
        return are_gone and not self.journal.live and not self.memory.keeps

    def _stop_saving(self, waited_s: float) -> None:
        last, journal = self._last, self.journal
        late = [*([] if last is None or self._is_durable(last) else [last]), *self.saves.jobs]
        if not late and not journal.publishing:
            return  # the last of them has just been given up, by the same deadline
        if self._group is not None and last is not None and self._is_durable(last):
            self.context.log("warning", f"the run ends with step {last.step}: older steps are not durable after {waited_s:.1f} s")
            self.saves.give_up_rest(f"it was not durable {waited_s:.1f} s after the run's end had begun")
            self._close()
            return
        step = late[0].step if late else journal.publishing[0]
        text = f"step {step} is committed but not published"
        if late and step not in journal.publishing:
            text = self.saves.fate(late[0])[1] or self.saves.waits_for(late[0])
        if journal.troubles and journal.troubles[-1] not in text:  # it may be of another step, which storage has held up as well
            text = f"{text}; {journal.troubles[-1]}"
        self._refuse(
            "StorageError",
            "; ".join((f"step {step} is not durable after {waited_s:.1f} s: {text}", *self._others_late(step))),
            step=step,
            phase="close",
            waited_s=waited_s,
        )

    def _stop_hearing(self, group: Group | None, waited_s: float) -> None:
        """Reports don't come. A release goes on with those that have; a close may not be judged on older ones."""
        why = self._unheard_of(group)
        if group is None:
            self._speaker = None
            for view in list(self.memory.views):
                if self._is_late(view) and self.memory.had_its_time(view):
                    self.snapshots.give_up_on(view.host, f"no report after {waited_s:.1f} s of the release")
        elif waited_s >= self.context.settings.barrier_timeout_s:
            self._refuse("BarrierTimeoutError", f"{why} after {waited_s:.1f} s", phase="close", waited_s=waited_s)
