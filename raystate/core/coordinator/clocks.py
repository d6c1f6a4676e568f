"""The clocks of the hosts, by what they say when they report: so that what several have seen has an order."""

from __future__ import annotations

from raystate.core.formats.names import HostId

_REPORTS = 64  # clocks run apart by some millionths: what so many reports have shown is forgotten when as many have come after it


class HostClocks:
    """Each host's clock beside the Coordinator's. A report takes time, and the quickest one least: its host's clock is known as well as
    that took. So two hosts compare as well as their quickest reports took equally long, about a millisecond within a cluster."""

    def __init__(self) -> None:
        self._found: dict[HostId, tuple[float, float, int]] = {}  # (least of the reports before, of these, how many these are)

    def heard(self, host: HostId, clock_s: float, now_s: float) -> None:
        """A report has come that was made at this time of its host."""
        ahead_s = now_s - clock_s
        before_s, least_s, count = self._found.get(host, (float("inf"), float("inf"), 0))
        if count >= _REPORTS:
            before_s, least_s, count = least_s, float("inf"), 0
        self._found[host] = before_s, min(least_s, ahead_s), count + 1

    def here(self, host: HostId, clock_s: float) -> float:
        """The Coordinator's time at that time of the host, which has reported."""
        before_s, least_s, _ = self._found[host]
        return clock_s + min(before_s, least_s)
