"""Named places where a test can hold a process, to kill it or another one exactly there. Needs nothing of raystate.

Without the environment variable nothing happens. With it, a process that reaches the point `writing` while the file `writing.hold` exists
in that folder writes `writing.<pid>.reached` there and waits until the hold is gone.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from raystate.waits import HELD_S, SOON_S

FOLDER = "RAYSTATE_FAULT_POINTS"  # a folder; read at every point, so that it can be set late


def reached(point: str) -> None:
    """Wait here while a test holds this point."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    hold = Path(folder) / f"{point}.hold"
    if not hold.exists():
        return
    (hold.parent / f"{point}.{os.getpid()}.reached").touch()
    deadline_s = time.monotonic() + HELD_S
    while hold.exists() and time.monotonic() < deadline_s:
        time.sleep(SOON_S)
