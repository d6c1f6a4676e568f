"""Which committed steps go when a new one is committed: whatever the policy does not keep, but never the newest or a pinned one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from raystate.core.messages import LiveStep

Keep = Callable[[Sequence[LiveStep]], Collection[int]]
"""The retention policy: of the live steps (ascending, the last one the newest), the ones to keep. It must not fail."""


def keep_newest(count: int | None) -> Keep:
    """Keep so many; None: all."""
    return lambda live: [one.step for one in (live if count is None else live[-count:])]


def choose_retired(live: Sequence[LiveStep], keep: Keep, in_use: Collection[int] = ()) -> list[tuple[int, bool, str]]:
    """The steps to retire as (step, aside, reason), oldest first; never the newest.

    Args:
        live: committed steps, ascending.
        keep: the policy.
        in_use: further steps to keep.
    """
    if not live:
        return []
    kept = {*keep(live), *in_use, live[-1].step}
    return [(one.step, False, f"retention: not among {len(kept)} kept steps") for one in live if one.step not in kept]
