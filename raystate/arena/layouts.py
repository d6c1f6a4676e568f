"""Layouts are big and nearly always the same, so slots name them by their hash and the arena keeps each once."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path

from raystate.arena.files import LAYOUTS, replace_file
from raystate.core.errors import CorruptCheckpointError


def put_layout(arena: Path, data: bytes) -> str:
    """Keep `data` in the arena at that path; returns its name, which is the same for the same bytes."""
    ref = hashlib.sha256(data).hexdigest()[:32]
    path = arena / LAYOUTS / ref
    if not path.exists():
        replace_file(path, data)
    return ref


def get_layout(arena: Path, ref: str) -> bytes:
    """The bytes behind a name.

    Raises:
        CorruptCheckpointError: the arena does not have them, or they are not what was put.
    """
    path = arena / LAYOUTS / ref
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CorruptCheckpointError(f"layout {ref} is not in the arena {arena}", path=str(path)) from None
    if hashlib.sha256(data).hexdigest()[:32] != ref:
        raise CorruptCheckpointError(f"layout {ref} in the arena {arena} is damaged", path=str(path))
    return data


def prune_layouts(arena: Path, keep: Collection[str]) -> None:
    """Remove all others, and what an interrupted `put_layout` left. Only while no trainer could be about to name one."""
    for path in (arena / LAYOUTS).iterdir():
        if path.name not in keep:
            path.unlink(missing_ok=True)
