"""What holds up a save: hosts that are away for a moment, or storage. Nothing can be written while a
host is away, and that is not storage's doing.

While storage makes progress the training waits for it, so that no promised step is lost. If storage
fails, stands still or is too slow for that, promised steps give way to new snapshots. So a crash
costs no more than without any of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from raystate.core.coordinator.context import Context, named
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.journal import STILL, Journal
from raystate.core.coordinator.memory import Memory
from raystate.core.formats.names import HostId, SnapshotId
from raystate.core.formats.settings import most_wait_s
from raystate.waits import AGAIN_S, HOST_AWAY_S, HOST_SILENT_S, SAID_AGAIN_S, STORAGE_STILL_S


class Absence:
    """Which hosts of the worker group are away. Others hold up nothing.

    Args:
        group: the one that trains now, if any.

    Attributes:
        changed_s: when one of them went away or came back last.
    """

    def __init__(self, context: Context, memory: Memory, group: Callable[[], Group | None]):
        self._context = context
        self._memory = memory
        self._group = group
        self._since_s: dict[HostId, float] = {}
        self._silent: list[HostId] = []
        self._look_s = 0.0
        self.changed_s = 0.0

    def went(self, host: HostId) -> None:
        """Its HostActor has died, or is silent."""
        if self._counts(host):
            self.changed_s = self._since_s[host] = self._context.now_s

    def came(self, host: HostId) -> None:
        """It has spoken, for the first time since it went away or as a new HostActor."""
        self._since_s.pop(host, None)
        if self._counts(host):
            self.changed_s = self._context.now_s

    def heard(self, host: HostId) -> None:
        """It has reported."""
        if host in self._since_s:
            self.came(host)

    def lost(self, host: HostId) -> None:
        """It is gone with its node: no decision waits for it."""
        self._since_s.pop(host, None)

    def _counts(self, host: HostId) -> bool:
        group = self._group()
        return group is None or not group.all_seen or host in group.hosts.values()

    def is_away(self, host: HostId) -> bool:
        """Whether it is down, and may soon be back."""
        return host in self._since_s and self._context.now_s - self._since_s[host] < HOST_AWAY_S

    def hosts(self) -> list[HostId]:
        """Those that are away, or have missed a report or two, and may soon be back."""
        group, now_s = self._group(), self._context.now_s
        if now_s >= self._look_s:
            self._look_s = now_s + AGAIN_S
            views = (self._memory.hosts.get(host) for host in ({} if group is None else group.hosts).values())
            self._silent = [view.host for view in views if view is not None and view.up and now_s - view.heard_s >= HOST_SILENT_S]
        return sorted({*filter(self.is_away, self._since_s), *self._silent})

    def has_waited(self, since_s: float, patience_s: float) -> bool:
        """Whether so many seconds have passed with all hosts there: these are waited for, but not without end."""
        now_s = self._context.now_s
        if now_s - since_s >= HOST_AWAY_S + patience_s:
            return True
        return now_s - max(since_s, self.changed_s) >= patience_s and not self.hosts()


class StorageWatch:
    """How storage goes on, while steps that are due wait for it in host memory."""

    def __init__(self, context: Context, journal: Journal, absence: Absence):
        self._context = context
        self._journal = journal
        self._absence = absence
        self._moved_s = 0.0  # when storage last got something, or got something to do
        self._crowded_s = 0.0  # since when steps that are due hold all slots but one, and none has got into the log
        self._said_s = float("-inf")

    @property
    def room(self) -> int:
        """How many steps that are due may stay in host memory where others need it: one slot is being filled, and one holds the newest."""
        return max(0, self._context.settings.snapshot_slots - 2)

    def moved(self) -> None:
        """Storage has got something."""
        self._moved_s = self._context.now_s

    def look(self, waiting: Collection[SnapshotId], *, loads: bool) -> None:
        """Storage that stands still, or that is too slow for others to wait for it, counts as failing until a step is published. A host
        that is away is not its doing.

        Args:
            waiting: steps that are due.
            loads: what builds packages may still be loading.
        """
        settings, now_s, logged_s = self._context.settings, self._context.now_s, self._journal.changed_s
        if not (waiting or self._journal.publishing):
            self._moved_s = now_s
        if len(waiting) <= self.room or logged_s > self._crowded_s:
            self._crowded_s = now_s
        if self._journal.fails or len(waiting) <= self.room:
            return
        most_s = most_wait_s(settings.barrier_timeout_s, settings.hang_timeout_s)
        stands_still = not loads and self._absence.has_waited(max(self._moved_s, logged_s), min(STORAGE_STILL_S, most_s / 2))
        if stands_still or now_s - self._crowded_s >= most_s:
            what = "stands still" if stands_still else "is slow"
            why = f" ({self._context.storage_error})" if self._context.storage_error else ""
            text = f"storage {what}{why}: until a step is durable, {_steps(waiting)} may give way to new snapshots"
            self._journal.trouble(text, cause=STILL if stands_still else "", is_told=False)

    def say_if_held_up(self, kept: tuple[SnapshotId, ...], lineage: str, stable: int) -> None:
        """A line for people, if no slot is left for a newer snapshot than the newest stable one."""
        waiting = [key for key in kept if key.lineage == lineage and key.step < stable]
        if len(waiting) > self.room and self._context.now_s - self._said_s >= SAID_AGAIN_S:
            self._said_s = self._context.now_s
            text = f"snapshots are held up after step {stable}: {_steps(waiting)} wait for storage in all other slots"
            self._context.log("warning", f"{text}; save less often, or set more snapshot_slots")


def _steps(keys: Iterable[SnapshotId]) -> str:
    return named([f"step {step}" for step in sorted({key.step for key in keys})])
