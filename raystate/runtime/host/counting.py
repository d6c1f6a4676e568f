"""A HostActor's counts, in its reports."""

from __future__ import annotations

from collections.abc import Callable

from raystate.arena import HostArena, used_bytes
from raystate.observe.counted import MEMORY_CAP, MEMORY_USED, process_counts
from raystate.waits import EXPORT_EVERY_S


class Counting:
    """Now and then there is news; most reports have none.

    Args:
        arena: this host's.
        clock: monotonic seconds.
    """

    def __init__(self, arena: HostArena, clock: Callable[[], float]):
        self._arena = arena
        self._clock = clock
        self._next_s = float("-inf")

    def news(self, *, at_once: bool = False) -> tuple[tuple[str, float], ...]:
        """The counts since this process began; nothing, where it isn't time yet."""
        now_s = self._clock()
        if now_s < self._next_s and not at_once:
            return ()
        self._next_s = now_s + EXPORT_EVERY_S
        memory = (MEMORY_USED, used_bytes(self._arena.path.parent)), (MEMORY_CAP, self._arena.cap_bytes)
        return (*process_counts(), *memory)
