"""When a host reports: soon after a change, at once when somebody waits, and now and then in any case."""

from __future__ import annotations


class Reporting:
    """Counts the reports of one HostActor.

    Args:
        interval_s: at most one report per interval, unless somebody waits for one.
        heartbeat_s: a report at least so often.

    Attributes:
        changed: a report would tell something new.
        at_once: somebody waits for one.
        seq: of the last report.
    """

    def __init__(self, interval_s: float, heartbeat_s: float):
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s
        self._last_s = float("-inf")
        self.seq = 0
        self.changed = True
        self.at_once = False

    @property
    def next_s(self) -> float:
        """When the next one is due, if nothing happens before."""
        return self._last_s + (self._interval_s if self.changed else self._heartbeat_s)

    def is_due(self, now_s: float) -> bool:
        """Whether to report now. If so, the report counts as made."""
        since_s = now_s - self._last_s
        if not (self.at_once or (self.changed and since_s >= self._interval_s) or since_s >= self._heartbeat_s):
            return False
        self.seq += 1
        self._last_s = now_s
        self.changed = self.at_once = False
        return True
