"""Who gives way to training."""

from __future__ import annotations

import os
import threading

WORK_NICENESS = 10  # more than the process's own


def niceness() -> int:
    """This process's own: 0 is ordinary, 19 the last to run."""
    return os.getpriority(os.PRIO_PROCESS, os.getpid())


def give_way() -> None:
    """Lower the priority of the calling thread, and of those it starts: writing a step must not take processor time from training.

    Ray starts its workers, trainers among them, at niceness 15 unless it is told otherwise. On Linux
    niceness is a thread's own; elsewhere it may be the process's, which would slow down answers
    too, so nothing is done.
    """
    if os.uname().sysname == "Linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(19, niceness() + WORK_NICENESS))
