"""Durable saves: which snapshot is written next, and each save from its first byte to its commit.

A snapshot is due when all ranks have staged it and save() promised it. One save runs at a time.
Dead ranks aren't needed: the hosts have their pieces. Until the commit entry a save that fails is
discarded, and tried again under a new id while its snapshot is complete. From the commit entry on
there is only rolling forward, and that is the journal's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from raystate.core.coordinator.context import Context, named, ranks_text, retry_delay_s
from raystate.core.coordinator.facts import remember
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.journal import Change, Journal, Request, Retirement
from raystate.core.coordinator.memory import Memory, Snap
from raystate.core.coordinator.retention import choose_retired
from raystate.core.coordinator.save_job import Job, Steps
from raystate.core.coordinator.storage_watch import Absence, StorageWatch
from raystate.core.formats.commands import BuildPackage, Discard
from raystate.core.formats.entries import LiveStep, LogEntry
from raystate.core.formats.events import Packaged, Progress, Written
from raystate.core.formats.names import HostId, SaveId, SnapshotId, short
from raystate.waits import ASKED_AGAIN_S

MAX_TRIES = 3
GAVE_WAY = "gave way to newer ones: saves take longer than the steps between them"
_CAUSE_CHARS = 200
_REMEMBERED = 256


class Saves:
    """Which snapshots are to become durable, and the one save that is running."""

    def __init__(self, context: Context, memory: Memory, joins: Joins, journal: Journal):
        self.context = context
        self.memory = memory
        self.joins = joins
        self.journal = journal
        self.jobs: dict[SnapshotId, Job] = {}
        self.running: Job | None = None
        self.failed: dict[SnapshotId, str] = {}  # snapshots that will not become durable, and why
        self.mistake: tuple[SnapshotId, str] | None = None  # the newest snapshot that is the caller's mistake, and which
        self.has_saved = False  # this attempt has committed a step
        self.restoring = -1  # a stored step that is being read now
        self.absence = Absence(context, memory, lambda: joins.group)
        self.pace = StorageWatch(context, journal, self.absence)
        self._counter = 0
        self._kept: Steps | None = None  # what the policy keeps, of the newest commit; None: nothing is to be retired

    # ---------------------------------------------------------------- what is due

    def want(self, key: SnapshotId, why: str, *, again: bool = False) -> None:
        """Make a complete snapshot durable. `again`: although it has failed before."""
        if again and key in self.failed:
            del self.failed[key]
        if key in self.jobs or key in self.failed or self._is_kept(key) or not self.memory.believed(key.lineage, key.step):
            return
        snap = self.memory.snaps.get(key)
        self.jobs[key] = Job(key, why, snap is not None and snap.promised, due_s=self.context.now_s, next_s=self.context.now_s)
        if key.step in self.journal.live:
            self._give_up(key, self._other_bytes(key))

    def _is_kept(self, key: SnapshotId) -> bool:
        """Whether its step is durable, or was: in its lineage, or in the one that this lineage went on from at that very step."""
        restore, stored = self.memory.restore, self.journal.live.get(key.step)
        lineages = [key.lineage]
        if restore is not None and (restore.by, restore.step) == (key.lineage, key.step) and restore.lineage:
            lineages.append(restore.lineage)
        if stored is not None and stored.lineage in lineages:
            return True
        return any((lineage, key.step) in self.journal.facts.retired for lineage in lineages)

    def _other_bytes(self, key: SnapshotId) -> str:
        return f"step {key.step} lies in storage from another past; restore(step=…, rollback=True) retires it"

    def protect(self, step: int) -> None:
        """This stored step is being read: retention spares it. -1: none is."""
        self.restoring = step

    def owes(self, step: int) -> bool:
        """Whether a step of that number is promised, and may still become durable."""
        snaps = self.memory.snaps.values()
        return any(one.step == step and one.promised and self.fate(one.id)[0] is None for one in snaps)

    def fate(self, key: SnapshotId) -> tuple[bool | None, str]:
        """What has become of a promised snapshot: (True, ""): durable; (False, why not); (None, ""): undecided, see `waits_for`."""
        if key in self.jobs:
            return None, ""
        if self._is_kept(key):
            return (None, "") if key.step in self.journal.publishing else (True, "")
        if (why := self.failed.get(key) or self.journal.facts.given_up.get(key)) is not None:
            return False, why
        if not self.memory.believed(key.lineage, key.step):
            return False, f"step {key.step} was given up by a restore"
        return (False, self._other_bytes(key)) if key.step in self.journal.live else (None, "")

    def waits_for(self, key: SnapshotId) -> str:
        """What keeps a snapshot undecided, for messages. It looks at all ranks."""
        if key.step in self.journal.publishing and key not in self.jobs:
            return "; ".join((f"step {key.step} is committed but not published", *self.journal.troubles[-1:]))
        return f"step {key.step} is not committed: {self.joins.missing_text(key)}"

    def lost(self, key: SnapshotId, why: str) -> None:
        """A promised snapshot can never become complete."""
        if key not in self.jobs and self.fate(key)[0] is None:
            self._give_up(key, why)

    def copy_broke(self, key: SnapshotId, rank: int, why: str) -> None:
        """A rank could not make its copy of a promised step, which can't become durable then."""
        text = f"its copy on {self.joins.where([rank])} came to nothing: {why}"
        if self.failed.get(key, text) != text and self.fate(key)[0] is False:  # a report has said only that the rank lacks it
            self.failed[key] = text
            self.journal.facts.give_up(key, text)
        self.lost(key, text)

    def keys(self) -> list[SnapshotId]:
        """Snapshots that must stay in memory for a save.

        While storage makes progress these are all that are due: trainers wait for it. If it fails,
        there is room for few: training must go on, and needs slots for newer snapshots.
        (test_saves.test_a_due_save_gives_way_to_new_snapshots_while_storage_is_slow)
        """
        waiting = sorted(self.jobs, key=self._by_turn)  # a commit that is not in the log yet may have to be made again
        kept = waiting[: self.pace.room] if self.journal.fails else waiting
        for key in waiting[len(kept) :]:
            self.jobs[key].gives_way = True
        return sorted(kept)

    def _by_turn(self, key: SnapshotId) -> tuple[bool, int, str]:
        return (self.jobs[key] is not self.running, *_by_step(key))

    def forget_unbelieved(self) -> None:
        """After a recovery decision: what it discarded is not saved any more."""
        for key in [key for key in self.jobs if not self.memory.believed(key.lineage, key.step)]:
            job = self.jobs[key]
            if job.phase == "committing":
                continue
            self._give_up(key, "it was given up by a restore", by_restore=True)

    # ---------------------------------------------------------------- running

    def turn(self) -> None:
        """Begin the next save if none is running, and give up those that can't be made any more, or not in time."""
        self._go_on()
        self._look_at_deadlines()

    def _go_on(self) -> None:
        self._drop_gone()
        if self._kept is not None and not self.journal.publishing and not self.journal.busy:
            self._retire_the_rest()
        for key in [key for key, job in self.jobs.items() if job.phase == "queued" and self._is_kept(key)]:
            del self.jobs[key]  # its lineage began with that step, which has become durable since
        if self.running is not None or not self.jobs:
            return
        now_s = self.context.now_s
        for key in sorted(self.jobs, key=_by_step):
            job = self.jobs[key]
            if job.next_s > now_s:
                continue
            refused = self.journal.refuse_save(key.step)
            if refused is not None:  # a superseded attempt may still remove a step of this number
                if key.step in self.journal.live:
                    self._give_up(key, self._other_bytes(key))
                elif now_s - job.due_s >= self.context.settings.save_timeout_s:
                    self._give_up(key, refused)
                elif job.refused != refused:
                    job.refused = refused  # it may be released in time
                    self.journal.trouble(refused, of_storage=False)
                continue
            snap = self.memory.complete(key)
            if snap is not None:
                self._start(job, snap)
                return

    def _drop_gone(self) -> None:
        """Saves whose snapshot has given way to newer ones, or whose host has lost it."""
        gone = [key for key, job in self.jobs.items() if job.phase == "queued" and self.memory.complete(key) is None]
        for key in gone:
            if self.jobs[key].gives_way and any(one.complete and one.order > key.order for one in self.memory.snaps.values()):
                cause = (self.context.storage_error or self.journal.cause)[:_CAUSE_CHARS]
                why = f"gave way to newer ones while storage fails: {cause}" if cause else GAVE_WAY
                self._give_up(key, f"the snapshot of step {key.step} {why}")
            # A host that is down may come back with its piece.
            # (test_deadlines.test_flush_of_a_step_whose_host_is_down_does_not_call_it_unstaged)
            elif all(view.up for view in self.memory.views):
                self._give_up(key, self.joins.lost_text(key))

    def _start(self, job: Job, snap: Snap) -> None:
        context, group = self.context, self.joins.group
        self._counter += 1
        save = SaveId(f"a{context.attempt}k{self._counter}")
        job.begin(save, snap, {} if group is None else group.hosts, context.now_s)
        self.running = job
        text = f"save {save} of step {snap.step} ({job.why}, try {job.tries}) on {len(job.orders)} hosts"
        context.log("debug", text, step=snap.step, kind="Write")
        context.out.extend(job.orders)

    def written(self, event: Written) -> None:
        """A host has written its pieces, or could not."""
        job = self.running
        if job is None or job.save != event.save or job.phase != "writing" or event.host not in job.waiting:
            return
        if event.away:
            self.absence.went(event.host)
        if event.error:
            # An absent host costs no try: after three the step would be given up.
            # (test_storage_watch.test_a_write_of_an_absent_host_is_no_failure_of_storage)
            what = "is away" if event.away else "could not write"
            self._fail(job, f"host {short(event.host)} {what}: {event.error}", of_storage=not event.away, counts=not event.away)
            return
        self.pace.moved()
        job.waiting.discard(event.host)
        if not job.waiting:
            job.phase = "packaging"
            key, live = job.key, tuple(self.journal.live.values())
            hosts = tuple(order.host for order in job.orders)
            self.context.out.append(BuildPackage(save=job.save, lineage=key.lineage, step=key.step, hosts=hosts, live=live))

    def progressed(self, event: Progress) -> None:
        """A host has written some of its pieces, if it is one that does."""
        if (job := self.running) and event.of == job.save and job.moves(event.who, event.done_bytes):
            self.pace.moved()

    def packaged(self, event: Packaged) -> None:
        """The package of the running save is built, or could not be."""
        job = self.running
        if job is None or job.save != event.save or job.phase != "packaging":
            return
        if event.error:
            if event.hopeless:
                job.tries = MAX_TRIES  # the caller's mistake: no try can mend it
                self.mistake = (job.key, event.error)
            self._fail(job, f"the package could not be built: {event.error}", of_storage=not event.hopeless)
            return
        self.pace.moved()
        job.phase = "committing"
        job.packaged = event
        self.journal.request(Request(kind="commit", why=f"commit of step {job.key.step} ({job.why})", snapshot=job.key))

    # ---------------------------------------------------------------- its entries in the log

    def change(self, request: Request) -> Change | None:
        """A commit's step with this save's retention choice, or only what an earlier choice could not retire yet."""
        live = [*self.journal.live.values()]
        if request.kind == "retention":
            assert self._kept is not None
            retires, _ = self._retirable(live, self._kept)
            self._kept = None  # refused retirements wait for the next commit
            return (None, retires) if retires else None
        job = self.running
        assert job is not None and job.key == request.snapshot and job.packaged is not None
        step, packaged = job.key.step, job.packaged
        if self.journal.refuse_save(step) is not None:
            return None
        key = job.key
        new = LiveStep(step=step, save=job.save, metrics=dict(packaged.metrics), time_s=packaged.time_s, lineage=key.lineage)
        retires, job.kept = self._retirable(sorted((*live, new), key=lambda one: one.step), self._kept_at(packaged.kept, step))
        return new, retires

    @staticmethod
    def _kept_at(kept: Collection[int], step: int) -> Steps:
        """What stays when this step is committed: a policy must not take it although another past has a newer step."""
        return frozenset((*kept, step))

    def _retirable(self, live: Sequence[LiveStep], kept: Steps) -> tuple[list[Retirement], Steps | None]:
        """What can go now, and `kept` again if there is more that can't go yet."""
        chosen = choose_retired(live, kept, {self.restoring} if self.restoring >= 0 else ())
        retires = self.journal.retirable(chosen)
        return retires, None if len(retires) == len(chosen) else kept

    def _retire_the_rest(self) -> None:
        """Ask for the retirements that the last commit could not take: it may be the last one.
        (test_saves.test_retention_does_not_wait_for_a_next_commit)"""
        if not any(request.kind == "retention" for request in self.journal.waiting):
            self.journal.request(Request(kind="retention", why="retention"))

    def logged(self, request: Request, entry: LogEntry | None, refused: str = "") -> None:
        """The commit is in the log: the save is done. Without an entry it has failed."""
        if request.kind == "retention":
            return  # the journal carries the retirements out
        job = self.running
        assert job is not None and job.key == request.snapshot
        if entry is None:
            step = job.key.step
            why = refused or (
                self._other_bytes(job.key) if step in self.journal.live else self.journal.refuse_save(step) or "refused"
            )
            self._fail(job, why, of_storage=bool(refused))
            return
        self.has_saved = True
        self._kept = job.kept
        self.jobs.pop(job.key, None)
        self.running = None

    # ---------------------------------------------------------------- going wrong

    def host_gone(self, host: HostId, why: str) -> None:
        """A host is down or has started anew: it will not finish its part."""
        job = self.running
        if job is not None and job.phase == "writing" and host in job.waiting:
            self._fail(job, f"host {host} is {why}", of_storage=False, counts=False)

    def _look_at_deadlines(self) -> None:
        """Orders whose answer may be lost are repeated, too."""
        now_s, limit_s = self.context.now_s, self.context.settings.save_timeout_s
        job = self.running
        self.pace.look(self.jobs, loads=not self.has_saved and job is not None and job.phase == "packaging")
        if job is not None:
            waited_s = now_s - job.started_s
            if job.phase == "writing" and now_s - job.told_s >= min(ASKED_AGAIN_S, limit_s / 4):
                # Its answer, or the order itself, may be lost; a host that has done it says so again.
                job.told_s = now_s
                self.context.out.extend(order for order in job.orders if order.host in job.waiting)
            if waited_s >= limit_s and job.phase != "committing":
                what = "the package is not assembled"
                if job.phase == "writing":
                    late = [
                        f"host {order.host} ({ranks_text(order.ranks, {})})" for order in job.orders if order.host in job.waiting
                    ]
                    what = f"{named(late)} did not write"
                self._fail(job, f"{what} within {waited_s:.1f} s", of_storage=True)
            return
        for key, queued in list(self.jobs.items()):
            if now_s - queued.due_s >= limit_s and self.memory.complete(key) is None:
                self._give_up(key, f"{self.joins.missing_text(key)} after {now_s - queued.due_s:.1f} s")

    def _fail(self, job: Job, why: str, *, of_storage: bool, counts: bool = True) -> None:
        """Before the commit entry: the save's objects are garbage. `counts`: the try does."""
        self.context.out.append(Discard(save=job.save, step=job.key.step))
        self.running = None
        text = f"save {job.save} of step {job.key.step} failed (try {job.tries} of {MAX_TRIES}): {why}"
        if counts and job.tries >= MAX_TRIES:
            self._give_up(job.key, text, of_storage=of_storage)
            return
        self.journal.trouble(text, cause=why, step=job.key.step, of_storage=of_storage)
        job.phase = "queued"
        job.next_s = self.context.now_s + retry_delay_s(job.tries)
        if not counts:
            job.tries -= 1

    def _give_up(self, key: SnapshotId, why: str, *, of_storage: bool = False, by_restore: bool = False) -> None:
        job = self.jobs.pop(key, None)
        if job is not None and job is self.running:
            self.context.out.append(Discard(save=job.save, step=key.step))
            self.running = None
        remember(self.failed, key, why, most=_REMEMBERED)
        if not by_restore and (job is None or job.promised):  # else it is made again
            self.journal.facts.give_up(key, why)
        group = self.joins.group
        is_past = group is not None and key.lineage != group.lineage  # who was promised it has died, or has restored since
        text = f"step {key.step} will not be durable: {why}"
        self.journal.trouble(text, cause=why, step=key.step, is_told=not is_past, of_storage=of_storage)

    def abort_after(self, step: int, why: str) -> None:
        """Give up the saves of later steps, unless their commit is already being written: its entry
        may be in the log, so a rollback waits for it and retires the step.
        (test_recovery.test_a_rollback_waits_for_the_commit_that_is_being_written)"""
        for key in [key for key, job in self.jobs.items() if key.step > step and job.phase != "committing"]:
            self._give_up(key, why, by_restore=True)

    def give_up_rest(self, why: str) -> None:
        """The run ends without the saves that are left, but for one whose entry may be in the log."""
        for key in [key for key, job in self.jobs.items() if job.phase != "committing"]:
            self._give_up(key, why)


def _by_step(key: SnapshotId) -> tuple[int, str]:
    return (key.step, key.lineage)
