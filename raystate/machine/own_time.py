"""Time as this process has lived it. What it stood still itself (a SIGSTOP, a frozen cgroup, a moved machine) counts against no other."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable

from raystate.waits import HOST_SILENT_S, LOOK_EVERY_S


class OwnTime:
    """A monotonic clock that leaves out each gap between two readings, and the moment behind it in which others are heard again.

    So marks of what others did last, and deadlines for them, move by as much as their judge was late. (test_own_time)

    Args:
        clock: monotonic seconds. The reader sees to it that readings are never as far apart as a gap.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self._lock = threading.RLock()  # a signal handler may ask while its thread does
        self._read_s = clock()
        self._left_out_s = 0.0
        self._listens_until_s = float("-inf")

    def __call__(self) -> float:
        with self._lock:
            now_s = self._clock()
            gap_s = now_s - self._read_s
            if gap_s >= HOST_SILENT_S:
                self._listens_until_s = now_s + HOST_SILENT_S
            if gap_s >= HOST_SILENT_S or now_s < self._listens_until_s:
                self._left_out_s += gap_s
            self._read_s = now_s
            return now_s - self._left_out_s


def own_time() -> float:
    """Monotonic seconds of this process, as above: in place of `time.monotonic` wherever another
    process is judged, or waited for."""
    return _clock()()


@functools.cache
def _clock() -> OwnTime:
    """Made by the first reading: one made at the import would take all until then for a gap."""
    clock = OwnTime(time.monotonic)

    def read() -> None:
        while True:
            time.sleep(LOOK_EVERY_S)
            clock()

    threading.Thread(target=read, name="raystate-own-time", daemon=True).start()
    return clock


os.register_at_fork(after_in_child=_clock.cache_clear)  # a child has no such thread, and perhaps a lock that stays held


def wall_clock() -> float:
    """Seconds since 1970, for what is written down. It goes on steadily in this process, also where the machine's clock is set."""
    return _BEGAN + time.clock_gettime(time.CLOCK_BOOTTIME)


_BEGAN = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
