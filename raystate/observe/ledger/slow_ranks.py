"""Lines of a run's ledger about slow ranks: when each begins to be one, and when it ends."""

from __future__ import annotations

from collections.abc import Callable

from raystate.core.coordinator.machine import Coordinator
from raystate.core.coordinator.slow_ranks import SlowRank
from raystate.observe.ledger.lines import Line, Slowed


class SlowLines:
    """Compares those that the machine knows with those that were noted.

    Args:
        note: takes a line.
    """

    def __init__(self, machine: Coordinator, note: Callable[[Line], None]):
        self._machine = machine
        self._note = note
        self._noted: dict[tuple[int, str], SlowRank] = {}

    def look(self) -> None:
        """Note what has changed."""
        slow = {(one.rank, one.section): one for one in self._machine.slow_ranks.slow}
        for key, one in slow.items():
            if key not in self._noted:
                self._note(self._line(one, ends=False))
        for key, one in self._noted.items():
            if key not in slow:
                self._note(self._line(one, ends=True))
        self._noted = slow

    def _line(self, one: SlowRank, *, ends: bool) -> Slowed:
        machine = self._machine.memory.machines.get(one.host, "")
        return Slowed(
            rank=one.rank,
            host=one.host,
            section=one.section,
            by_s=one.by_s,
            since_step=one.since_step,
            ends=ends,
            machine=machine,
        )
