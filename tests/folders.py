"""Folders of the tests' own that outlive a killed process, until the next run of tests finds that nobody holds them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

MODEL_NAME = "raystate-model-"  # in shared memory


def hold(folder: str | Path) -> int | None:
    """A descriptor that holds the folder until it is closed or this process ends; None if another process holds it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def remove_unheld(root: Path, name: str) -> None:
    """Remove the folders under `root` whose name begins so, and that no living process holds."""
    for folder in root.glob(f"{name}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            young = time.time() - folder.stat().st_mtime < 60  # its maker may not hold it yet
            held = None if young else hold(folder)
            if held is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(held)
