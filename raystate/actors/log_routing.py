"""What an actor prints, and whose driver shows it.

Ray shows what an actor prints in the driver of the job that created it. The run's actors outlive that job, and the next one would read
nothing of them. Ray's log monitor follows a mark in a process's output that says which job it works for; Ray's own workers print it.
"""

from __future__ import annotations

import re
import sys

from raystate import log_lines

MARK = ":job_id:"  # `ray._private.ray_constants.LOG_PREFIX_JOB_ID`; tests/cluster/test_train_internals.py holds it against Ray's
_JOB = re.compile(r"[0-9a-f]{1,64}")


def show_to(job_id: str, level: int) -> None:
    """From now on this process's lines are shown by the driver of this job, from that level on."""
    log_lines.follow(level)
    if _JOB.fullmatch(job_id):
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"{MARK}{job_id}\n")
            stream.flush()
