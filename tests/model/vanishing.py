"""What a cleaner, or systemd-logind at a user's last logout, may remove of the snapshots in host memory."""

from __future__ import annotations

import shutil
from pathlib import Path


def everything(arena: Path) -> None:
    """Of all hosts."""
    shutil.rmtree(arena.parent)


def a_slot(arena: Path) -> None:
    slots = sorted(arena.glob("set-*/slot-1"))
    (slots[0] if slots else arena / "bell").unlink()


def the_layouts(arena: Path) -> None:
    shutil.rmtree(arena / "layouts")


def the_bell(arena: Path) -> None:
    (arena / "bell").unlink()


REMOVALS = (everything, a_slot, the_layouts, the_bell)
