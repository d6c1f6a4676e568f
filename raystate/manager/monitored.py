"""The events of Orbax's names that a run's process 0 records, see `raystate.arrays.monitoring`."""

from __future__ import annotations

from collections.abc import Callable

from raystate.arrays.monitoring import SaveEvents, reading
from raystate.restored import Restored


class RunEvents:
    """Only steps that become durable count as saves. A step's success is heard at the next call of
    `save`, `wait_until_finished` or `close`: its total duration is at most one step too long.

    Args:
        url: of the run's storage.
        rank: of this process; all but 0 are silent, as Orbax has it.
    """

    def __init__(self, url: str, *, rank: int):
        self._url = url
        self._silent = rank != 0
        self._under_way: dict[int, tuple[SaveEvents, int]] = {}

    def saved(self, step: int, begin_s: float, nbytes: int) -> None:
        """A call of `save` that began at `begin_s` is over, and its step will be durable. `nbytes`: this process's part."""
        if not self._silent:
            events = SaveEvents(self._url, background=True, begin_s=begin_s)
            events.unblocked()
            self._under_way[step] = events, nbytes

    def durable(self, newest: int) -> None:
        """The newest durable step is known. No event says that an older one succeeded: it may not
        have."""
        for step in [step for step in self._under_way if step <= newest]:
            events, nbytes = self._under_way.pop(step)
            if step == newest:
                events.done(nbytes)

    def restoring(self, restore: Callable[[], Restored | None]) -> Restored | None:
        """Carry a restore out, which gives up what was under way."""
        self._under_way.clear()
        if self._silent:
            return restore()
        with reading(self._url) as events:
            restored = restore()
            events.found = restored is not None
        return restored
