"""Which steps are live, and which are kept: what the tests of the run log, of retention and of storage ask alike."""

from __future__ import annotations

from raystate.core.messages import LogEntry
from raystate.core.retention import Keep


def live_steps(entry: LogEntry | None) -> tuple[int, ...]:
    """Committed steps, ascending; some may not be published yet."""
    return () if entry is None else tuple(one.step for one in entry.live)


def keep_newest(count: int | None) -> Keep:
    """A policy that keeps the newest `count` steps; None: all."""
    return lambda live: [one.step for one in (live if count is None else live[-count:])]
