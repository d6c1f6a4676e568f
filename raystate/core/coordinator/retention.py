"""Which committed steps go when a new one is committed: those that the policy does not keep, but
never the newest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from raystate.core.formats.entries import LiveStep

Keep = Callable[[Sequence[LiveStep]], Collection[int]]
"""The retention policy: of the live steps (ascending, the last one the newest), the ones to keep. It must not fail."""


def choose_retired(live: Sequence[LiveStep], kept: Collection[int], in_use: Collection[int] = ()) -> list[tuple[int, str]]:
    """The steps to retire, each with its reason, oldest first; never the newest.

    Args:
        live: committed steps, ascending.
        kept: what the policy keeps.
        in_use: further steps to keep.
    """
    if not live:
        return []
    left = {*kept, *in_use, live[-1].step}
    return [(one.step, f"retention: not among {len(left)} kept steps") for one in live if one.step not in left]
