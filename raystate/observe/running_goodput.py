"""Where the time of this attempt of the Coordinator goes, while it goes on: from its own lines of the ledger, without storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from raystate.machine.own_time import wall_clock
from raystate.observe.goodput import goodput
from raystate.observe.ledger.lines import GroupJoined, GroupRestored, Noted, Sampled
from raystate.observe.ledger.thinning import every_second_sample
from raystate.observe.timeline import OF_INTEREST, timeline_of
from raystate.waits import GOODPUT_EVERY_S

MOST_LINES = 1000  # computing takes the other threads' time, too: about 30 ms for so many


class RunningGoodput:
    """Keeps the lines that goodput is made of, and computes it for those who ask.

    Of more than `MOST_LINES` lines every second sample is dropped. If hardly any of them are samples, the oldest quarter is, after
    about two hundred worker groups: their time counts no more.

    Args:
        clock: monotonic seconds.
        wall_clock: seconds since 1970, as the lines have them.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, wall_clock: Callable[[], float] = wall_clock):
        self._clock = clock
        self._wall_clock = wall_clock
        self._lines: list[Noted] = []
        self._guard = threading.Lock()  # of the lines; not held while they are computed
        self._computing = threading.Lock()
        self._shares: tuple[tuple[str, float], ...] = ()
        self._due_s = float("-inf")

    def note(self, noted: Noted) -> None:
        """One more line. For the Coordinator's thread: it never waits for the thread that computes."""
        if not isinstance(noted.what, OF_INTEREST):
            return
        with self._guard:
            self._lines.append(noted)
            if len(self._lines) > MOST_LINES:
                self._lines = _fewer(self._lines)

    def shares(self) -> tuple[tuple[str, float], ...]:
        """(cause, share of the time since the attempt began), of all causes; empty: nothing is known yet. Computed every 10 s at most.

        Of the steps since the last sample nothing is known: while a group trains, the time ends there.
        """
        with self._computing:
            if self._clock() >= self._due_s:
                self._shares = self._computed()
                self._due_s = self._clock() + GOODPUT_EVERY_S
            return self._shares

    def _computed(self) -> tuple[tuple[str, float], ...]:
        with self._guard:
            lines = list(self._lines)
        if not lines:
            return ()
        last, now_s = lines[-1], self._wall_clock()
        starts, trains = isinstance(last.what, GroupJoined | GroupRestored), isinstance(last.what, Sampled)
        found = goodput(timeline_of(lines, until_s=now_s if starts else None), begin_s=lines[0].t)  # a group may be older
        seconds = dict(found.seconds_by_cause)
        if not starts and not trains:  # only the next group tells since when it was asked for
            seconds["unknown"] += max(0.0, now_s - last.t)
        whole_s = sum(seconds.values())
        return tuple((cause, one / whole_s) for cause, one in seconds.items()) if whole_s > 0 else ()


def _fewer(lines: Sequence[Noted]) -> list[Noted]:
    gone = set(map(id, every_second_sample(lines)))
    kept = [one for one in lines if id(one) not in gone]
    return kept if len(kept) <= MOST_LINES * 3 // 4 else kept[len(kept) // 4 :]
