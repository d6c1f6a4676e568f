"""What a run that was cut off has left in shared memory."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")


def arenas(*, run_hash: str = "*", node: str = "*") -> list[Path]:
    """Those that are there, of all users: of a run, of a node of Ray, or all."""
    return sorted(SHARED_MEMORY.glob(f"raystate-*/raystate-{run_hash}-{node[:12]}"))


def remove_arenas(node: str) -> None:
    """Remove all that runs have on this node of a Ray that is gone. Nothing is there if they have ended."""
    for arena in arenas(node=node):
        shutil.rmtree(arena, ignore_errors=True)
        with contextlib.suppress(OSError):  # others have theirs beside it
            arena.parent.rmdir()
