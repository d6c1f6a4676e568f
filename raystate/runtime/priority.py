"""Who gives way to training."""

from __future__ import annotations

import os
import threading

LESS = 10  # niceness that is added
LEAST = 19  # the lowest priority that Linux has


def give_way() -> None:
    """Lower the priority of the calling thread, and of those it starts: writing a step must not take processor time from training.

    Only a lower one is everybody's to set: Ray starts its workers at niceness 15, and who isn't
    root may not go back from there. On Linux niceness is a thread's own; elsewhere it may be the
    process's, which would slow down answers too, so nothing is done.
    """
    if os.uname().sysname == "Linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(LEAST, os.getpriority(os.PRIO_PROCESS, thread) + LESS))
