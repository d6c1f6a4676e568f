"""Durable saves: which snapshot is written next, and each save from its first byte to its commit.

A snapshot is due when all ranks have staged it and save() promised it. One save runs at a time. Dead ranks aren't needed: the hosts
have their pieces. Until the commit entry a save that fails is discarded and tried again under a new id, while its snapshot is still
complete; from the commit entry on there is only rolling forward, and that is the journal's.
"""

from __future__ import annotations

from typing import Literal

from raystate.core.desk import Desk
from raystate.core.group import Joins
from raystate.core.journal import Change, Journal, retry_delay_s
from raystate.core.memory import Key, Memory, Snap
from raystate.core.messages import BuildPackage, Discard, HostId, LiveStep, LogEntry, Packaged, SaveId, Write, Written
from raystate.core.retention import Keep, choose_retired
from raystate.core.slots import lineage_order

MAX_TRIES = 3
GIVES_WAY_S = 4.0  # for so long a save that is due may hold up snapshots while storage is busy with another one
REPEAT_S = 15.0
_REMEMBERED = 256


class Job:
    """One snapshot on its way to storage."""

    __slots__ = (
        "due_s", "gives_way", "hosts", "key", "next_s", "orders", "packaged", "phase", "refused", "save", "started_s", "told_s", "tries",
        "waiting", "why",
    )  # fmt: skip

    def __init__(self, key: Key, now_s: float, why: str):
        self.key = key
        self.why = why
        self.due_s = now_s
        self.next_s = now_s
        self.started_s = now_s
        self.tries = 0
        self.gives_way = False  # its snapshot may have been overwritten
        self.phase: Literal["queued", "writing", "packaging", "committing"] = "queued"
        self.save = SaveId("")
        self.hosts: tuple[HostId, ...] = ()
        self.waiting: set[HostId] = set()
        self.packaged: Packaged | None = None
        self.orders: tuple[Write, ...] = ()
        self.told_s = now_s
        self.refused = ""


class Saves:
    def __init__(self, desk: Desk, memory: Memory, joins: Joins, journal: Journal, keep: Keep):
        self.desk = desk
        self.keep = keep
        self.memory = memory
        self.joins = joins
        self.journal = journal
        self.jobs: dict[Key, Job] = {}
        self.running: Job | None = None
        self.failed: dict[Key, str] = {}  # promised steps that will not become durable, and why
        self.saved: dict[int, str] = {}  # step -> lineage whose snapshot it is, of this attempt's commits
        self.conflicts: dict[str, frozenset[int]] = {}  # lineage -> live steps that it will pass again, being of another past
        self.restoring = -1  # a stored step that is being read now
        self._counter = 0
        self._held_back = False  # retention chose a step that could not be retired then

    # ---------------------------------------------------------------- what is due

    def offer(self, snap: Snap) -> None:
        """A snapshot has become complete, and every rank's save() promised it."""
        self.want((snap.lineage, snap.step), "due")

    def want(self, key: Key, why: str, *, again: bool = False) -> None:
        """Make a complete snapshot durable. `again`: although it has failed before."""
        if again and key in self.failed:
            del self.failed[key]
        if key in self.jobs or key in self.failed or not self.memory.believed(*key):
            return
        if key[1] in self.journal.live:
            if key[1] in self.conflicts.get(key[0], ()):
                self._give_up(key, f"step {key[1]} exists already, from before the restore; restore with rollback=True retires it")
            return
        self.jobs[key] = Job(key, self.desk.now_s, why)
        self.desk.stir = True

    def lost(self, key: Key, why: str) -> None:
        """A promised step can never be complete."""
        if key not in self.failed and key[1] not in self.journal.live:
            self._give_up(key, why)

    def keys(self) -> list[Key]:
        """Snapshots that must stay in memory for a save.

        One slot is being filled and one holds the newest stable step. What is beyond that can wait for storage as long as it takes;
        other saves that are due wait for a moment, and then give way to new snapshots when these need the room. So whatever storage
        does, a crash costs no more than a few seconds.
        """
        if not self.jobs:
            return []
        waiting = sorted((key for key, job in self.jobs.items() if job.phase != "committing"), key=self._by_turn)
        room = max(1, self.desk.settings.snapshot_slots - 2)
        for key in waiting[room:]:
            job = self.jobs[key]
            job.gives_way = job.gives_way or self.desk.now_s - job.due_s >= GIVES_WAY_S
        return sorted(key for place, key in enumerate(waiting) if place < room or not self.jobs[key].gives_way)

    def _by_turn(self, key: Key) -> tuple[bool, int, str]:
        return (self.jobs[key] is not self.running, *_by_step(key))

    def forget_unbelieved(self) -> None:
        """After a recovery decision: what it discarded is not saved any more."""
        for key in [key for key in self.jobs if not self.memory.believed(*key)]:
            job = self.jobs[key]
            if job.phase == "committing":
                continue
            self._give_up(key, f"step {key[1]} of lineage {key[0]} was given up by a restore")

    # ---------------------------------------------------------------- running

    def turn(self) -> None:
        self._drop_overwritten()
        if self._held_back and not self.journal.publishing and not self.journal.busy:
            self._retire_held_back()
        if self.running is not None or not self.jobs:
            return
        now_s = self.desk.now_s
        for key in sorted(self.jobs, key=_by_step):
            job = self.jobs[key]
            if job.next_s > now_s:
                continue
            refused = self.journal.refuse_save(key[1])
            if refused is not None:
                if key[1] in self.journal.live and key[1] not in self.conflicts.get(key[0], ()):
                    del self.jobs[key]
                    self.desk.stir = True
                elif now_s - job.due_s >= self.desk.settings.save_timeout_s or key[1] in self.journal.live:
                    self._give_up(key, refused)
                elif job.refused != refused:
                    job.refused = refused  # it may be released in time
                    self.journal.trouble(refused)
                continue
            snap = self.memory.complete(key)
            if snap is not None:
                self._start(job, snap)
                return

    def _drop_overwritten(self) -> None:
        """Saves whose snapshot gave way to newer ones, of their own lineage or of one that has replaced it."""
        for key, job in list(self.jobs.items()):
            if job.gives_way and job.phase == "queued" and self.memory.complete(key) is None:
                place = (lineage_order(key[0]), key[1])
                if any(one.complete and (one.order, one.step) > place for one in self.memory.snaps.values()):
                    why = f"the snapshot of step {key[1]} gave way to newer ones: storage is slower than the steps between saves"
                    self._give_up(key, why)

    def _start(self, job: Job, snap: Snap) -> None:
        desk = self.desk
        group = self.joins.group
        homes = snap.homes(group.hosts if group is not None else {})
        by_host: dict[HostId, list[int]] = {}
        for rank, host in homes.items():
            by_host.setdefault(host, []).append(rank)
        self._counter += 1
        job.save = SaveId(f"a{desk.attempt}k{self._counter}")
        job.phase = "writing"
        job.started_s = desk.now_s
        job.tries += 1
        job.hosts = tuple(sorted(by_host))
        job.waiting = set(job.hosts)
        self.running = job
        desk.log("debug", f"save {job.save} of step {snap.step} ({job.why}, try {job.tries}) on {len(job.hosts)} hosts")
        job.told_s = desk.now_s
        job.orders = tuple(
            Write(host=host, save=job.save, lineage=snap.lineage, step=snap.step, ranks=tuple(by_host[host])) for host in job.hosts
        )
        desk.out.extend(job.orders)
        desk.stir = True

    def written(self, event: Written) -> None:
        job = self.running
        if job is None or job.save != event.save or job.phase != "writing" or event.host not in job.waiting:
            return
        if event.error:
            self._fail(job, f"host {event.host} could not write: {event.error}")
            return
        job.waiting.discard(event.host)
        if not job.waiting:
            job.phase = "packaging"
            self.desk.out.append(BuildPackage(save=job.save, lineage=job.key[0], step=job.key[1], hosts=job.hosts))

    def packaged(self, event: Packaged) -> None:
        job = self.running
        if job is None or job.save != event.save or job.phase != "packaging":
            return
        if event.error:
            self._fail(job, f"the package could not be built: {event.error}")
            return
        job.phase = "committing"
        job.packaged = event
        self.journal.request(lambda: self._commit(job), lambda entry: self._committed(job, entry))

    def _commit(self, job: Job) -> Change | None:
        step = job.key[1]
        if self.journal.refuse_save(step) is not None:
            return None
        packaged, tail = job.packaged, self.journal.tail
        assert packaged is not None and tail is not None
        new = LiveStep(step=step, save=job.save, metrics=dict(packaged.metrics), time_s=packaged.time_s)
        live = sorted((*tail.live, new), key=lambda one: one.step)
        return new, self._retirable(live), f"commit of step {step} ({job.why})"

    def _retirable(self, live: list[LiveStep]) -> list[tuple[int, bool, str]]:
        chosen = choose_retired(live, self.keep, {self.restoring})
        retires = [one for one in chosen if self.journal.refuse_retire(one[0]) is None]
        self._held_back = len(retires) < len(chosen)
        return retires

    def _retire_held_back(self) -> None:
        """What the last commit could not retire, because it was not published yet, must not wait for the next one: there may be none."""

        def build() -> Change | None:
            tail = self.journal.tail
            retires = self._retirable(list(tail.live)) if tail is not None else []
            self._held_back = False  # else it waits for whoever holds it, and for the next commit
            return (None, retires, "retention") if retires else None

        self._held_back = False
        self.journal.request(build, _nothing_more)

    def _committed(self, job: Job, entry: LogEntry | None) -> None:
        if entry is None:
            self._fail(job, self.journal.refuse_save(job.key[1]) or "refused")
            return
        if len(self.saved) >= _REMEMBERED:
            del self.saved[next(iter(self.saved))]
        self.saved[job.key[1]] = job.key[0]
        self.jobs.pop(job.key, None)
        self.running = None
        self.desk.stir = True

    # ---------------------------------------------------------------- going wrong

    def host_gone(self, host: HostId, why: str) -> None:
        """A host is down or has started anew: it will not finish its part."""
        job = self.running
        if job is not None and job.phase == "writing" and host in job.waiting:
            self._fail(job, f"host {host} is gone: {why}")

    def tick(self) -> None:
        now_s, limit_s = self.desk.now_s, self.desk.settings.save_timeout_s
        if any(not one.gives_way and now_s - one.due_s >= GIVES_WAY_S for one in self.jobs.values()):
            self.desk.stir = True  # what must stay in memory may be less now
        job = self.running
        if job is not None:
            waited_s = now_s - job.started_s
            if job.phase == "writing" and now_s - job.told_s >= min(REPEAT_S, limit_s / 4):
                # Its answer, or the order itself, may be lost; a host that has done it says so again.
                job.told_s = now_s
                self.desk.out.extend(order for order in job.orders if order.host in job.waiting)
            if waited_s >= limit_s and job.phase != "committing":
                what = "the package is not assembled"
                if job.phase == "writing":
                    late = [f"host {order.host} (ranks {list(order.ranks)})" for order in job.orders if order.host in job.waiting]
                    what = f"{', '.join(late)} did not write"
                self._fail(job, f"{what} within {waited_s:.1f} s")
            return
        for key, queued in list(self.jobs.items()):
            if queued.next_s <= now_s:
                self.desk.stir = True
            if now_s - queued.due_s >= limit_s and self.memory.complete(key) is None:
                self._give_up(key, f"{self.memory.missing_text(key, self.joins.where)} after {now_s - queued.due_s:.1f} s")

    def _fail(self, job: Job, why: str) -> None:
        """Before the commit entry: what the save has written is garbage."""
        step = job.key[1]
        self.desk.out.append(Discard(save=job.save, step=step))
        self.running = None
        self.desk.stir = True
        text = f"save {job.save} of step {step} failed (try {job.tries} of {MAX_TRIES}): {why}"
        if job.tries >= MAX_TRIES:
            self._give_up(job.key, text)
            return
        self.journal.trouble(text)
        job.phase = "queued"
        job.next_s = self.desk.now_s + retry_delay_s(job.tries)

    def _give_up(self, key: Key, why: str) -> None:
        job = self.jobs.pop(key, None)
        if job is not None and job is self.running:
            self.desk.out.append(Discard(save=job.save, step=key[1]))
            self.running = None
        if len(self.failed) >= _REMEMBERED:
            del self.failed[next(iter(self.failed))]
        self.failed[key] = why
        self.journal.trouble(f"step {key[1]} will not be durable: {why}")

    def abort_after(self, step: int, why: str) -> None:
        """Give up the saves of later steps, unless their commit is already being written."""
        for key in [key for key, job in self.jobs.items() if key[1] > step and job.phase != "committing"]:
            self._give_up(key, why)


def _nothing_more(_: LogEntry | None) -> None:
    """The journal carries the retirements out."""


def _by_step(key: Key) -> tuple[int, str]:
    return (key[1], key[0])
