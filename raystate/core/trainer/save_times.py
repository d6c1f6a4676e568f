"""The cost of a durable save to the steps, from the times of the calls of save(): those beside it are compared with those between saves.

It costs the time in which its save() blocks, and that by which storing it slows the steps. Snapshots are as frequent beside a save as
between two, so theirs is not counted twice. The comparison is of minutes, over which it doesn't matter that a loop runs ahead.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection

LEAST_CALLS, LEAST_SECONDS = 4, 1.0  # of a block of calls
LEAST_BLOCKS, RECENT_BLOCKS = 4, 32
RECENT_SAVES = 8
UNUSUAL = 2.0  # times the median: a compilation, an evaluation, a machine that does something else
LONGEST_SECONDS = 1800.0  # a save that takes longer is no measure: storage is out of reach, and much else happens meanwhile


class SaveTimes:
    """One rank's."""

    def __init__(self) -> None:
        self.cost_s: float | None = None  # seconds of training that a save takes; None: not known
        self._until = -1  # the newest step on its way to storage; -1: none is
        self._saves = 0  # on their way
        self._beside = (0, 0.0)  # steps and seconds since the first of them began
        self._block = (0, 0, 0.0)  # calls, steps and seconds of the block that is not full
        self._paces: deque[float] = deque(maxlen=RECENT_BLOCKS)  # seconds a step, of blocks between saves
        self._costs: deque[float] = deque(maxlen=RECENT_SAVES)

    def began(self, step: int) -> None:
        """This call of save() has promised its step."""
        if self._until < 0:
            self._saves, self._beside = 0, (0, 0.0)
            self._block = (0, 0, 0.0)
        self._saves += 1
        self._until = step

    def passed(self, steps: int, seconds: float, durable: int) -> None:
        """The time from one call of save() to the next. `durable`: the newest durable step at its end."""
        if self._until < 0:
            self._between(steps, seconds)
            return
        self._beside = self._beside[0] + steps, self._beside[1] + seconds
        if durable >= self._until:
            self._ended()
        elif self._beside[1] > LONGEST_SECONDS:
            self._until = -1

    def forget(self) -> None:
        """Other steps follow, as after a restore: what was begun is no measure."""
        self._until, self._block = -1, (0, 0, 0.0)

    def _between(self, steps: int, seconds: float) -> None:
        calls, all_steps, all_seconds = self._block[0] + 1, self._block[1] + steps, self._block[2] + seconds
        self._block = calls, all_steps, all_seconds
        if calls >= LEAST_CALLS and all_seconds >= LEAST_SECONDS:
            self._paces.append(all_seconds / all_steps)
            self._block = (0, 0, 0.0)

    def _ended(self) -> None:
        self._until = -1
        if len(self._paces) >= LEAST_BLOCKS:
            steps, seconds = self._beside
            self._costs.append((seconds - steps * _usual(self._paces)) / self._saves)
            self.cost_s = max(0.0, statistics.median(self._costs))


def _usual(paces: Collection[float]) -> float:
    """The mean of those that are usual."""
    most = UNUSUAL * statistics.median(paces)
    kept = [one for one in paces if one <= most]
    return sum(kept) / len(kept)
