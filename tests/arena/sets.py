"""What tests of the arena share: names, sizes, and what a trainer and a host do with slot sets."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raystate.arena import HostArena, TrainerArena
from raystate.core.formats.messages import HostId, Staged
from raystate.runtime.host.loop import HostLoop
from raystate.storage import open_storage
from raystate.storage.names import GUARD, GUARD_TEXT

NODE = "0a1b2c3d4e5f60718293a4b5c6d7e8f9"
SIZES: dict[str, Any] = {"data_bytes": 8192, "table_bytes": 100}
OpenHost = Callable[..., HostArena]
Child = Callable[..., tuple["subprocess.Popen[bytes]", bytes]]


def open_loop(root: Path, host: str = "h", *, cap_bytes: int = 1 << 40, **more: Any) -> HostLoop:
    """A HostActor's loop with an arena under this root, and a storage beside it."""
    arena = HostArena.open(
        root / f"raystate-0-{host}", run="r", storage="s", node_id=host, cap_bytes=cap_bytes, memory_threshold=None
    )
    storage = open_storage(root / "run")
    storage.create_or_same(GUARD, GUARD_TEXT)  # the run has begun
    return HostLoop(arena=arena, storage=storage, host=HostId(host), incarnation=os.urandom(4).hex(), **more)


def stage(path: Path, trainer: str = "t1", step: int = 1, rank: int = 0) -> str:
    """A trainer comes, fills its first slot, and goes; the reference of its layout."""
    with TrainerArena.attach(path, trainer=trainer) as arena:
        ref = arena.put_layout(b"layout")
        arena.slots[0].begin()
        arena.slots[0].data_mut[:] = step
        header = Staged(lineage="1.1.a", step=step, rank=rank, world=2, layout="l", promised=False, nbytes=8192)
        arena.slots[0].commit(header, b"")
        arena.trainer_cell.write(b"staged")
        return ref


def remove_gone(host: HostArena) -> list[int]:
    """Remove every set without a trainer, there or expected; their indices."""
    gone = [held for held in host.sets if host.trainer_state(held) == "gone"]
    for held in gone:
        host.remove_set(held)
    return [held.index for held in gone]
