"""How long a process has been there."""

from __future__ import annotations

import os
import time
from pathlib import Path


def process_age_s() -> float | None:
    """Seconds since this process started, also what it was before `exec`; None: the system doesn't tell."""
    try:
        text = Path("/proc/self/stat").read_text()
    except OSError:
        return None
    started_ticks = int(text.rpartition(")")[2].split()[19])  # since boot; the command's name may hold blanks and brackets
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK"))
