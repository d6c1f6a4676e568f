"""What a host does about slot sets that nobody holds any more."""

from __future__ import annotations

from raystate.arena import HostArena


def remove_gone(host: HostArena) -> list[int]:
    """Remove every set without a trainer, there or expected; their indices."""
    gone = [held for held in host.sets if host.trainer_state(held) == "gone"]
    for held in gone:
        host.remove_set(held)
    return [held.index for held in gone]
