"""How busy this machine is."""

from __future__ import annotations

import os


def load() -> str:
    """In words, for a line that says what is waited for."""
    return f"this machine has a load of {os.getloadavg()[0]:.0f} on {len(os.sched_getaffinity(0))} cores"
