"""What earlier attempts have committed: a trainer that has outlived them asks about all that it was promised.

A claim reads back the newest entries of the log. A promised step may have been committed by an
older entry, and retired by now: so it is looked for before a rank is told that it is lost.
"""

from __future__ import annotations

from raystate.core.desk import Desk, retry_delay_s
from raystate.core.messages import Claimed, CommitsFound, FindCommits, SnapshotId, lineage_order


class Past:
    """The commits that are known of it, and what is looked for further back."""

    def __init__(self, desk: Desk):
        self._desk = desk
        self.committed: set[SnapshotId] = set()  # some are retired by now
        self._unread = 0  # the newest log entry that the claim has not read back; 0: none
        self._wanted: dict[SnapshotId, str] = {}  # and why it is lost unless the log has a commit of it; "": not known
        self._looked: set[SnapshotId] = set()  # for these, found or not
        self._looking = False
        self._tries = 0
        self._next_s = 0.0

    def start(self, event: Claimed) -> None:
        """This attempt owns the run."""
        self.committed = set(event.committed)
        self._unread = event.unread

    def has(self, key: SnapshotId) -> bool:
        """Whether an earlier attempt is known to have committed it; it may be retired by now."""
        return key in self.committed

    @property
    def looking(self) -> bool:
        """Whether something is still looked for."""
        return bool(self._wanted)

    def is_open(self, key: SnapshotId) -> bool:
        """Whether an entry may have committed it that was neither read back nor searched for it."""
        is_older = bool(key.lineage) and lineage_order(key.lineage).attempt < self._desk.attempt
        return bool(self._unread) and is_older and key not in self._looked

    def look_for(self, key: SnapshotId, why: str = "") -> None:
        """Find out, with the next turn. `why`: the reason, if its loss is known."""
        self._wanted[key] = self._wanted.get(key) or why

    def turn(self) -> None:
        """Look for all that is wanted by now at once: it costs the same."""
        if self._wanted and not self._looking and self._desk.now_s >= self._next_s:
            self._looking = True
            self._desk.out.append(FindCommits(up_to=self._unread, snapshots=tuple(sorted(self._wanted))))

    def found(self, event: CommitsFound) -> dict[SnapshotId, str]:
        """The log has been read back, or could not be. Gives what is lost by that, and why."""
        self._looking = False
        self._desk.stir = True
        if event.error:
            # An unread entry may name the commit: nothing is called lost before it has been read.
            # (test_recovery.test_nothing_is_called_lost_before_the_whole_log_was_looked_at)
            self._tries += 1
            self._next_s = self._desk.now_s + retry_delay_s(self._tries)
            self._desk.log("warning", f"the log could not be read back: {event.error}; it is tried again")
            return {}
        self._tries = 0
        self.committed.update(event.found)
        self._looked.update(event.snapshots)
        asked = {key: self._wanted.pop(key, "") for key in event.snapshots}
        return {key: why for key, why in asked.items() if why and key not in self.committed}

    def tick(self) -> None:
        """Try again what is due."""
        if self._wanted and not self._looking:
            self._desk.stir = True
