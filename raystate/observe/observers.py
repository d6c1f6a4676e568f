"""What people look at later: fed by the Coordinator's loop, and read by nothing that decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from raystate.core.coordinator.machine import Coordinator
from raystate.core.formats.messages import CarriedOut, Command, Event
from raystate.observe.counted import process_counts
from raystate.observe.ledger.ledger import Ledger
from raystate.observe.long_waits import LongWaits
from raystate.observe.pace import Pace
from raystate.observe.progress import Going
from raystate.observe.record import Recorder
from raystate.observe.status import RunStatus, status_of, under_way
from raystate.storage import Storage


class Observers:
    """Ledger, record, what takes long, and what metrics need.

    Args:
        storage: the run's.
        machine: whose events are followed.
        recorder: None: no record is kept.
    """

    def __init__(self, storage: Storage, machine: Coordinator, recorder: Recorder | None):
        self.ledger = Ledger(storage, machine)
        self._machine = machine
        self._recorder = recorder
        self._long_waits = LongWaits()
        self._pace = Pace()

    def begin(self, attempt: int, now_s: float) -> None:
        """The attempt's first event is about to come."""
        self._pace.begin(now_s)
        self.ledger.begin(attempt)
        if self._recorder is not None:
            self._recorder.begin(attempt, self._machine.settings)

    def record(self, event: Event, commands: Sequence[Command], now_s: float, *, more: bool) -> None:
        """The machine was given an event, whatever came of it."""
        if self._recorder is not None:
            self._recorder.record(event, commands, now_s, more=more)

    def look(self, event: Event, now_s: float) -> None:
        """The machine has taken an event."""
        if isinstance(event, CarriedOut) and not event.error and event.intent.kind == "commit":
            self.ledger.saved(event.intent, self._long_waits.since_s(event.intent.save), now_s)
        self._pace.look(self._machine, now_s)
        self.ledger.look(event, now_s)
        self._long_waits.look(under_way(self._machine), event, now_s)

    def going(self, now_s: float) -> tuple[Going, ...]:
        """Saves and restores under way."""
        return self._long_waits.going(now_s)

    def status(self, now_s: float) -> RunStatus:
        """The run as it is now."""
        return status_of(self._machine, now_s, self._pace, process_counts())

    def with_goodput(self, status: RunStatus) -> RunStatus:
        """The status, how often the trainers began again, and where the time went.

        It may compute: on the thread of who asks, never on the Coordinator's.
        """
        return dataclasses.replace(status, goodput=self.ledger.goodput.shares(), restarts=self.ledger.restarts)

    def close(self, timeout_s: float = 10.0) -> None:
        """End the record, all of it written, or what is written after `timeout_s`."""
        if self._recorder is not None:
            self._recorder.close(timeout_s)
