"""Waiting for durability, and the end of the run: flush, close(), release by the driver, and release when nobody is left."""

from __future__ import annotations

from typing import Literal

from raystate.core.agreement import Agreement
from raystate.core.desk import Barrier, Desk
from raystate.core.group import Group, Joins
from raystate.core.journal import Change, Journal
from raystate.core.memory import Key, Memory
from raystate.core.messages import (
    Ask,
    DeleteAsked,
    Finish,
    FlushAsked,
    FlushReply,
    LeaveAsked,
    LeaveReply,
    LogEntry,
    ReleaseAsked,
)
from raystate.core.saves import Saves

Phase = Literal["open", "asking", "saving", "closing", "finished"]


class Leaving:
    def __init__(self, desk: Desk, memory: Memory, joins: Joins, journal: Journal, saves: Saves, agreement: Agreement):
        self.desk = desk
        self.memory = memory
        self.joins = joins
        self.journal = journal
        self.saves = saves
        self.agreement = agreement
        self.phase: Phase = "open"
        self._flushes: list[tuple[FlushAsked, float]] = []
        self._deletes: list[tuple[DeleteAsked, float]] = []
        self._logged: set[Ask] = set()  # deletes that stand in the log
        self._deleted: set[int] = set()  # steps
        self._asks = Barrier(0.0)
        self._group: Group | None = None  # None: a release, no rank is asked
        self._step = -1
        self._key: Key | None = None
        self._tried_again = False
        self._why = ""
        self._since_s = 0.0
        self._idle_since_s = 0.0

    def is_finished(self) -> bool:
        return self.phase == "finished"

    # ---------------------------------------------------------------- flush

    def flush_asked(self, event: FlushAsked) -> None:
        if self.joins.check(event.ask, event.lineage, event.rank):
            self._flushes = [one for one in self._flushes if one[0].ask != event.ask]
            self._flushes.append((event, self.desk.now_s))
            self.desk.stir = True

    def _flush(self) -> None:
        left: list[tuple[FlushAsked, float]] = []
        for event, since_s in self._flushes:
            group = self.joins.group
            waiting, errors = self._unfinished(event)
            gone = group is None or not group.alive or group.lineage != event.lineage
            waited_s = self.desk.now_s - since_s
            if waiting and not gone and waited_s < self.desk.settings.save_timeout_s:
                left.append((event, since_s))
                continue
            errors += [f"{text} (after {waited_s:.1f} s)" for text in waiting]
            self.desk.answer(event.ask, FlushReply(durable_step=self.journal.durable_step, errors=tuple(errors)))
        self._flushes = left

    def _unfinished(self, event: FlushAsked) -> tuple[list[str], list[str]]:
        """(what is still under way, what has failed) of the steps that were promised up to the asked one."""
        if event.step < 0:
            return [], []
        group = self.joins.group
        seen = None if group is None else group.seen.get(event.rank)
        if seen is None or seen.newest_step < event.step:
            return [f"no report of rank {event.rank}'s save of step {event.step} yet"], []
        waiting: list[str] = []
        errors: list[str] = []
        due = {step for step in seen.durable_due if step <= event.step}
        due.update(key[1] for key in self.saves.jobs if key[0] == event.lineage and key[1] <= event.step)
        for step in sorted(due):
            failed = self.saves.failed.get((event.lineage, step))
            if failed is not None:
                errors.append(failed)
            elif step not in self.journal.live:
                if self.saves.saved.get(step) == event.lineage:
                    continue  # committed, and retired by now
                skipped = [] if (event.lineage, step) in self.saves.jobs else self._skipped(event.lineage, step)
                if skipped:
                    errors.append(f"step {step} is not durable: ranks {skipped} had no free slot for it before a newer step came")
                else:
                    waiting.append(
                        f"step {step} is not committed: {self.memory.missing_text((event.lineage, step), self.joins.where)}"
                    )
            elif step in self.journal.publishing:
                waiting.append(f"step {step} is committed but not published")
        return waiting, errors

    def _skipped(self, lineage: str, step: int) -> list[int]:
        """Ranks that are past the step and neither hold nor stage it: it can't become complete any more."""
        group = self.joins.group
        snap = self.memory.snaps.get((lineage, step))
        pieces = {} if snap is None else snap.pieces
        seen = {} if group is None else group.seen
        return [
            rank for rank, one in sorted(seen.items()) if one.newest_step > step and step not in one.pending and rank not in pieces
        ]

    # ---------------------------------------------------------------- delete

    def delete_asked(self, event: DeleteAsked) -> None:
        step = event.step
        if step not in self.journal.live and step in self._deleted:
            # Every process of a loop that deletes asks; the first one's call does it.
            self._logged.add(event.ask)
            self._deletes.append((event, self.desk.now_s))
            self.desk.stir = True
            return
        why = self.journal.refuse_retire(step)
        if why is not None:
            kind = "StorageError" if step in self.journal.live else "StepNotFoundError"
            self.desk.fail([event.ask], kind, why, step=step, available=sorted(self.journal.live))
            return
        if step == max(self.journal.live) or step == self.saves.restoring:
            what = "the newest durable step" if step == max(self.journal.live) else "in use"
            self.desk.fail([event.ask], "StorageError", f"step {step} is {what} and is not deleted", step=step)
            return

        def build() -> Change | None:
            refused = self.journal.refuse_retire(step) is not None or step == max(self.journal.live)
            return None if refused else (None, [(step, False, "delete")], f"delete of step {step}")

        def done(_: LogEntry | None) -> None:
            if any(waiting is event for waiting, _ in self._deletes):
                self._logged.add(event.ask)
            self._deleted.add(step)
            self.desk.stir = True

        self._deletes.append((event, self.desk.now_s))
        self.journal.request(build, done)

    def _delete(self) -> None:
        left: list[tuple[DeleteAsked, float]] = []
        for event, since_s in self._deletes:
            waited_s = self.desk.now_s - since_s
            logged = event.ask in self._logged
            if logged and event.step in self.journal.live:
                self.desk.fail(
                    [event.ask], "StorageError", f"step {event.step} is not deleted any more: it is in use", step=event.step
                )
            elif logged and event.step not in self.journal.retiring:
                self.desk.answer(event.ask, FlushReply(durable_step=self.journal.durable_step))
            elif (pinned := self.journal.pinned.get(event.step)) is not None:
                text = f"step {event.step} is retired, and removed when it is no longer pinned ({pinned})"
                self.desk.fail([event.ask], "StorageError", text, step=event.step)
            elif waited_s >= self.desk.settings.save_timeout_s:
                text = f"step {event.step} is not removed after {waited_s:.1f} s: {'; '.join(self.journal.troubles[-1:])}"
                self.desk.fail([event.ask], "StorageError", text, step=event.step, waited_s=waited_s)
            else:
                left.append((event, since_s))
                continue
            self._logged.discard(event.ask)
        self._deletes = left

    # ---------------------------------------------------------------- leaving

    def leave_asked(self, event: LeaveAsked) -> None:
        if not self.joins.check(event.ask, event.lineage, event.rank):
            return
        group = self.joins.group
        if self.phase == "open" or self._group is not group:
            self._open("asking")
            self._group = group
            self._step = -1
            self._why = "all ranks have closed"
        self._asks.add(event.rank, event.ask)
        self._step = max(self._step, event.step)
        self.desk.stir = True

    def release_asked(self, event: ReleaseAsked) -> None:
        if self.phase == "open" or self._group is not None:
            if self._group is not None and self.phase != "open":
                self._refuse("StaleAttemptError", f"the run is being released: {event.reason}")
            self._release(event.reason)
        self._asks.add(-1, event.ask)
        self.desk.stir = True

    def _release(self, why: str) -> None:
        self.joins.end(f"the run is released: {why}")
        self._open("saving")
        self._group = None
        self._why = why
        best = self.memory.candidates()[:1]
        self._step = best[0].step if best and best[0].step > self.journal.durable_step else -1
        self.desk.stir = True

    def _open(self, phase: Phase) -> None:
        self.phase = phase
        self._asks = Barrier(self.desk.now_s)
        self._key = None
        self._tried_again = False
        self._since_s = self.desk.now_s

    def _refuse(self, error: str, message: str, **details: object) -> None:
        """The run is not released: its next start recovers what is there."""
        self.desk.log("error", message)
        self.desk.fail(self._asks.everybody(), error, message, **details)
        self.phase = "open"
        self._key = None
        self._idle_since_s = self.desk.now_s

    def turn(self) -> None:
        if self._flushes:
            self._flush()
        if self._deletes:
            self._delete()
        if self.agreement.last_stable_wanted:
            self.agreement.last_stable_wanted = False
            for snap in self.memory.candidates()[:1]:
                if snap.step > self.journal.durable_step:
                    self.saves.want((snap.lineage, snap.step), "the stop came too late for a common step", again=True)
        if self.phase in ("open", "finished"):
            return
        group = self._group
        if group is not None and not group.alive and self.phase != "closing":
            self._refuse("StaleAttemptError", f"lineage {group.lineage} has ended: {group.why_ended}", replaced=True)
            return
        if self.phase == "asking" and group is not None and group.world is not None and not self._asks.missing(group.world):
            self.phase = "saving"
            self._since_s = self.desk.now_s
        if self.phase == "saving" and self._saved(group):
            self._since_s = self.desk.now_s
            self.phase = "closing"
        if self.phase == "closing" and not self.journal.busy and not self.journal.working:
            if self.journal.closable:
                self.journal.close(f"the run is released: {self._why}")
            else:
                self._finish()

    def _saved(self, group: Group | None) -> bool:
        """True once the step is durable, and everything else that was promised is settled."""
        journal = self.journal
        if self._step >= 0 and self._step not in journal.published and not self._retired(group):
            if self._step in journal.live:
                return False  # committed; its publication goes on
            self._key = self._find(group)
            if self._key is None:
                self._fall_back(group)
                return False
            if not self._tried_again:
                # What made it fail before may be over; a run that ends gives it another chance.
                self._tried_again = True
                self.saves.want(self._key, "the run ends", again=True)
                return False
            failed = self.saves.failed.get(self._key)
            if failed is not None:
                self._refuse(
                    "StorageError",
                    f"step {self._step} could not be made durable: {failed}; newest durable step: {journal.durable_step}",
                    step=self._step,
                    durable_step=journal.durable_step,
                )
                return False
            self.saves.want(self._key, "the run ends")
            return False
        return not self.saves.jobs and not journal.publishing

    def _retired(self, group: Group | None) -> bool:
        """The step was saved, and went when a newer one came."""
        return group is not None and self.saves.saved.get(self._step) == group.lineage and self._step not in self.journal.live

    def _find(self, group: Group | None) -> Key | None:
        """The complete snapshot of the step: the group's own, or the one that it has restored."""
        if self._key is not None and (self._key in self.saves.jobs or self._key in self.saves.failed):
            return self._key
        if group is not None:
            own = (group.lineage, self._step)
            if (own in self.saves.failed and self._tried_again) or self.memory.complete(own) is not None:
                return own
        for snap in self.memory.candidates():
            if snap.step == self._step:
                return (snap.lineage, snap.step)
        return None

    def _fall_back(self, group: Group | None) -> None:
        """The step is not complete in memory. Wait while it still may be; else take the newest that is, if nothing was promised."""
        if group is None:
            self._release(self._why)
            return
        waiting = [
            rank
            for rank in range(group.world or 0)
            if rank not in group.seen or group.seen[rank].newest_step < self._step or group.seen[rank].pending
        ]
        if waiting:
            return  # tick has the deadline
        promised = any(self._step in seen.durable_due for seen in group.seen.values())
        best = [snap for snap in self.memory.candidates() if snap.step < self._step]
        if promised or (not best and self.journal.durable_step < 0):
            text = self.memory.missing_text((group.lineage, self._step), self.joins.where)
            self._refuse(
                "StorageError",
                f"step {self._step} cannot be made durable: {text}; newest durable step: {self.journal.durable_step}",
                step=self._step,
                durable_step=self.journal.durable_step,
            )
            return
        newest = max(best[0].step if best else -1, self.journal.durable_step)
        self.desk.log("warning", f"step {self._step} was not staged on all ranks: the run ends with step {newest}")
        self._step = newest
        self.desk.stir = True

    def _finish(self) -> None:
        self.phase = "finished"
        step = self.journal.durable_step
        self.desk.log("info", f"the run is released with step {step}: {self._why}")
        for ask in self._asks.everybody():
            self.desk.answer(ask, LeaveReply(step=step))
        self.desk.out.append(Finish(reason=self._why))

    # ---------------------------------------------------------------- time

    def tick(self, last_trainer_s: float) -> None:
        now_s, settings = self.desk.now_s, self.desk.settings
        if self._flushes or self._deletes:
            self.desk.stir = True
        waited_s = now_s - self._since_s
        group = self._group
        if self.phase == "asking" and waited_s >= settings.barrier_timeout_s:
            missing = self._asks.missing(None if group is None else group.world)
            self._refuse(
                "BarrierTimeoutError",
                f"{self.joins.where(missing)} did not call close within {waited_s:.1f} s",
                missing_ranks=missing,
                phase="close",
                waited_s=waited_s,
            )
        elif self.phase == "saving" and waited_s >= settings.save_timeout_s:
            text = "; ".join(self.journal.troubles[-1:])
            if self._key is None and self._step >= 0 and group is not None:
                text = text or self.memory.missing_text((group.lineage, self._step), self.joins.where)
            self._refuse(
                "StorageError",
                f"step {self._step} is not durable after {waited_s:.1f} s: {text}",
                step=self._step,
                phase="close",
                waited_s=waited_s,
            )
        elif self.phase == "closing" and waited_s >= settings.barrier_timeout_s:
            # What is decided but not carried out is in the log: the next start finishes it.
            self.desk.log(
                "warning", f"released with unfinished removals after {waited_s:.1f} s: {'; '.join(self.journal.troubles[-1:])}"
            )
            self._finish()
        elif self.phase == "open":
            last_s = max(last_trainer_s, self._idle_since_s)
            if now_s - last_s >= settings.idle_timeout_s:
                self._idle_since_s = now_s
                self._release(f"no trainer for {now_s - last_s:.0f} s")
