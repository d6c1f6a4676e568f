"""What became of the steps for which save() has returned True: whoever flushes waits for it, and whoever closes is told."""

from __future__ import annotations

from raystate.core.desk import Desk
from raystate.core.group import Group, Joins
from raystate.core.journal import Journal
from raystate.core.memory import Memory
from raystate.core.messages import FlushAsked, FlushReply, LeaveAsked, SnapshotId
from raystate.core.saves import Saves
from raystate.core.snapshots import Snapshots


class Promises:
    """Waits for durability on behalf of the ranks that have called wait_until_finished()."""

    def __init__(self, desk: Desk, memory: Memory, joins: Joins, journal: Journal, saves: Saves, snapshots: Snapshots):
        self._desk = desk
        self._snapshots = snapshots
        self._memory = memory
        self._joins = joins
        self._journal = journal
        self._saves = saves
        self._waiting: list[tuple[FlushAsked, float]] = []  # with the time when it was asked

    def flush_asked(self, event: FlushAsked) -> None:
        """A rank waits until everything that it was promised is durable, or known to be lost."""
        if self._joins.check(event.ask, event.lineage, event.rank):
            for key, why in event.broken:
                self.copy_broke(key, event.rank, why)
            if all(
                one.ask != event.ask for one, _ in self._waiting
            ):  # who asks again, because the answer may be lost, waits no longer
                self._waiting.append((event, self._desk.now_s))
            self._desk.stir = True

    def turn(self) -> None:
        """Answer those whose promises are all settled, whose group is gone, or who have waited long enough."""
        if not self._waiting:
            return
        left: list[tuple[FlushAsked, float]] = []
        for event, since_s in self._waiting:
            group = self._joins.group
            waiting, errors, lost = self.unfinished(event)
            gone = group is None or not group.alive or group.lineage != event.lineage
            waited_s = self._desk.now_s - since_s
            if waiting and not gone and event.wait and waited_s < self._desk.settings.save_timeout_s:
                left.append((event, since_s))
                continue
            if waiting:
                errors += [f"{text} (after {waited_s:.1f} s)" for text in dict.fromkeys(waiting.values())]
            mistake = self._saves.mistake
            if event.wait and mistake is not None and mistake[0] in lost:
                self._desk.fail([event.ask], "ConfigError", mistake[1], step=mistake[0].step)
                continue
            durable_step = self._journal.durable_step
            reply = FlushReply(durable_step=durable_step, errors=tuple(errors), lost=tuple(lost), undecided=tuple(waiting))
            self._desk.answer(event.ask, reply)
        self._waiting = left

    def copy_broke(self, key: SnapshotId, rank: int, why: str) -> None:
        """A rank could not make its copy of what it had promised: nobody can make it durable."""
        self._saves.lost(key, f"its copy on {self._joins.where([rank])} came to nothing: {why}")

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def tick(self) -> None:
        """Look at the deadlines of those who wait."""
        if self._waiting:
            self._desk.stir = True

    # ---------------------------------------------------------------- what became of them

    def unfinished(self, event: FlushAsked | LeaveAsked) -> tuple[dict[SnapshotId, str], list[str], list[SnapshotId]]:
        """(what is still under way, and how far; why others have failed; which these are) of what was promised to a rank."""
        group = self._joins.group
        if event.promised and (group is None or not group.heard(event.rank, event.word)):
            return dict.fromkeys(event.promised, f"no report yet of what {self._joins.where([event.rank])} has saved"), [], []
        waiting: dict[SnapshotId, str] = {}
        errors: list[str] = []
        lost: list[SnapshotId] = []
        for key in event.promised:
            durable, why = self._fate(key)
            if (durable is False or self._is_unheard_of(key)) and key not in self._saves.failed and self._saves.past.is_open(key):
                durable, why = None, f"the log of the run is not read back yet to what became of step {key.step}"
            if durable is None:
                waiting[key] = why
            elif not durable:
                errors.append(why if why.startswith("step ") else f"step {key.step}: {why}")
                lost.append(key)
        return waiting, errors, lost

    def is_lost(self, key: SnapshotId) -> bool:
        """Whether a promised snapshot can't become durable any more."""
        return self._fate(key)[0] is False

    def _fate(self, key: SnapshotId) -> tuple[bool | None, str]:
        """As `Saves.fate`; also of a snapshot that nobody will complete."""
        durable, why = self._saves.fate(key)
        if durable is None and key not in self._saves.jobs and key.step not in self._journal.live:
            skipped = self._skipped(key)
            if skipped:
                return False, f"{self._joins.where(skipped)} had no free slot for it before a newer step came"
            if self._is_over(key):
                return False, f"it was not staged on all ranks before a restore: {why}"
        return durable, why

    def _is_unheard_of(self, key: SnapshotId) -> bool:
        """Whether this attempt has seen nothing of it, and a newer step is durable."""
        journal = self._journal
        is_known = key in self._saves.jobs or key in self._memory.snaps or key.step in journal.live
        return not is_known and key.step < journal.newest and not self._saves.past.has(key)

    def _is_over(self, key: SnapshotId) -> bool:
        """Its lineage has been replaced by a restore, so nobody stages it any more, and no host is away that could hold the rest."""
        group = self._joins.group
        assert group is not None
        if key.lineage == group.lineage or self._memory.complete(key) is not None:
            return False
        return not self._snapshots.gathering and all(view.up and view.reported_s is not None for view in self._memory.views)

    def _skipped(self, key: SnapshotId) -> list[int]:
        """Ranks that are past the snapshot and neither hold nor stage it: it can't become complete any more.

        What a host that is down holds isn't known: it may be back with it.
        """
        group = self._joins.group
        snap = self._memory.snaps.get(key)
        pieces = {} if snap is None else snap.pieces
        seen = {} if group is None or group.lineage != key.lineage else group.seen
        return [
            rank
            for rank, one in sorted(seen.items())
            if one.place > key.place and key.step not in one.pending and rank not in pieces and self._is_up(group, rank)
        ]

    def _is_up(self, group: Group | None, rank: int) -> bool:
        return group is not None and self._memory.hosts[group.hosts[rank]].up
