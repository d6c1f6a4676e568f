"""Lines of a run's ledger about troubles that no rank and no host has: storage fails, or the Coordinator itself stood still."""

from __future__ import annotations

from collections.abc import Callable

from raystate.core.coordinator.machine import Coordinator
from raystate.machine.own_time import wall_clock
from raystate.observe.ledger.lines import CoordinatorStood, Line, StorageChanged
from raystate.waits import HOST_SILENT_S


class TroubleLines:
    """Compares what the machine knows with what was noted.

    Args:
        note: takes a line.
        clock: seconds, also those in which this process stood still: the machine's own time leaves them out.
    """

    def __init__(self, machine: Coordinator, note: Callable[[Line], None], *, clock: Callable[[], float] = wall_clock):
        self._machine = machine
        self._note = note
        self._clock = clock
        self._fails = False
        self._looked_s: float | None = None

    def look(self) -> None:
        """After an event: of these one comes every second, at least."""
        now_s = self._clock()
        stood_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if stood_s >= HOST_SILENT_S:
            self._note(CoordinatorStood(seconds=stood_s))
        journal = self._machine.journal
        if journal.fails != self._fails:
            self._fails = journal.fails
            self._note(StorageChanged(works=not journal.fails, why=journal.problem if journal.fails else ""))
