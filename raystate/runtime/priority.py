"""Who gives way to training."""

from __future__ import annotations

import os
import threading

WORK_NICENESS = 10


def give_way() -> None:
    """Lower the priority of the calling thread, and of those it starts: writing a step must not take processor time from training.

    On Linux niceness is a thread's own; elsewhere it may be the process's, which would slow down answers too, so nothing is done.
    """
    if os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), WORK_NICENESS)
