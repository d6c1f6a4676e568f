"""What an actor prints, and whose driver shows it.

Ray shows what an actor prints in the driver of the job that created it. The run's actors outlive that job, and the next one would read
nothing of them. Ray's log monitor follows a mark in a process's output that says which job it works for; Ray's own workers print it.
"""

from __future__ import annotations

import logging
import re
import sys

from raystate.core.formats.texts import printable

MARK = ":job_id:"  # `ray._private.ray_constants.LOG_PREFIX_JOB_ID`; tests/cluster/test_train_internals.py holds it against Ray's
_JOB = re.compile(r"[0-9a-f]{1,64}")


def show_to(job_id: str) -> None:
    """From now on this process's lines are shown by the driver of this job."""
    if _JOB.fullmatch(job_id):
        for stream in (sys.stdout, sys.stderr):
            stream.write(f"{MARK}{job_id}\n")
            stream.flush()


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def log_to_stderr() -> None:
    """Ray shows an actor's stderr in the driver: calm, one line each."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("raystate %(levelname)s %(message)s"))
    root = logging.getLogger("raystate")
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
