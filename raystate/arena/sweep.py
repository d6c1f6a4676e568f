"""Remove arenas whose node is provably dead.

A crashed HostActor's arena is exactly what recovery needs, so neither a free lock nor a dead
HostActor is proof. It takes all of: the host's lock is free, no trainer holds one in any set, and
the *node* is gone for good: Ray says so (its ids are never reused), its own process is gone, or the
machine has booted since. "Ray doesn't know the node" is no proof: another cluster on the same
machine, and every test that simulates one, has nodes that this one has never heard of.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection
from pathlib import Path

from raystate.arena.capacity import all_arenas
from raystate.arena.files import HOST_LOCK, LAYOUTS, META, SET_PREFIX, is_private_dir, leave_root, remove_tree
from raystate.arena.locks import FileLock
from raystate.arena.meta import ArenaMeta
from raystate.arena.processes import boot_id, is_gone
from raystate.arena.slot_set import release_all, seize
from raystate.core.formats.errors import RaystateError


def sweep(
    root: Path,
    *,
    dead_nodes: Collection[str] = (),
    is_dead: Callable[[ArenaMeta], str | None] | None = None,
    keep: Path | None = None,
) -> list[str]:
    """Remove every provably dead arena of this user under `root`.

    Args:
        root: from `default_root`: what lies there is raystate's.
        dead_nodes: ids of the nodes that Ray reports as dead.
        is_dead: more proof, from a caller who knows: the reason why that arena's run or node is over, or None.
        keep: never this one.

    Returns:
        One line per removed arena: its name and the reason.
    """
    removed: list[str] = []
    for path in all_arenas(Path(root)):
        if path != keep and is_private_dir(path) and _looks_like_an_arena(path):
            with contextlib.suppress(OSError, RaystateError):  # gone meanwhile, or it holds what this process may not touch
                removed += _sweep_one(path, dead_nodes, is_dead)
    leave_root(Path(root))
    return removed


def _sweep_one(path: Path, dead_nodes: Collection[str], is_dead: Callable[[ArenaMeta], str | None] | None) -> list[str]:
    lock = FileLock.take(path / HOST_LOCK, shared=False, create=True)
    if lock is None:
        return []
    with lock:
        reason = _why_dead(path, dead_nodes, is_dead)
        if not reason or _has_trainer(path):
            return []
        remove_tree(path, last=HOST_LOCK)
    return [f"{path.name}: {reason}"]


def _looks_like_an_arena(path: Path) -> bool:
    """A user's directory may have such a name. Without a meta.json it is one of ours only if it
    holds no more than a HostActor that was killed in its first moment leaves."""
    with contextlib.suppress(OSError):
        names = set(os.listdir(path))
        return META in names or all(name in (HOST_LOCK, LAYOUTS) or name.startswith(f".{META}.") for name in names)
    return False


def _why_dead(path: Path, dead_nodes: Collection[str], is_dead: Callable[[ArenaMeta], str | None] | None) -> str | None:
    meta = ArenaMeta.read(path)
    if meta is None:
        # Not even opened once, by somebody who is gone now. A meta.json of another format is another version's to judge.
        return None if os.path.lexists(path / META) else "it was never finished"
    if meta.boot and meta.boot != boot_id():
        return "the machine has booted since"
    if meta.node_id in dead_nodes:
        return f"node {meta.node_id} is dead"
    if meta.node and is_gone(meta.node):
        return f"node {meta.node_id} is dead: its process {meta.node.pid} is gone"
    return is_dead(meta) if is_dead else None


def _has_trainer(path: Path) -> bool:
    for entry in path.glob(f"{SET_PREFIX}*"):
        locks = seize(entry)
        if locks is None:
            return True
        release_all(locks)
    return False
