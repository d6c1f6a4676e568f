"""What a run that was cut off has left in shared memory."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path


def remove_arenas(node: str) -> None:
    """Remove all that runs have on this node of a Ray that is gone. Nothing is there if they have ended."""
    for arena in Path("/dev/shm").glob(f"raystate-*/raystate-*-{node[:12]}"):
        shutil.rmtree(arena, ignore_errors=True)
        with contextlib.suppress(OSError):  # others have theirs beside it
            arena.parent.rmdir()
