"""How long the copy of a snapshot takes beside the steps: as short as it can, or, where that slows them, most of the time to the next."""

from __future__ import annotations

from raystate.waits import COPY_SPREAD_S

SLOWS = 0.04  # more is too much, of the steps beside a copy
FILLS = 0.8  # of the time from one snapshot to the next


def spread_s(is_slowing: bool, step_s: float, interval: int) -> float:
    """Seconds that a copy is to take; 0.0: as few as it can.

    Args:
        is_slowing: a copy that took as few as it could has slowed the steps by more than `SLOWS`.
        step_s: seconds that an undisturbed step takes.
        interval: steps from one snapshot to the next.
    """
    return min(COPY_SPREAD_S, FILLS * step_s * interval) if is_slowing else 0.0
