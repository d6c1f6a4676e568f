"""Refuse at the start what cannot fit, with the numbers and the setting that would fit."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from raystate.arena.files import PREFIX, SET_META, read_json
from raystate.arena.locks import FileLock
from raystate.arena.sizes import format_bytes
from raystate.core.formats.errors import CapacityError, RaystateError
from raystate.machine.memory import NodeMemory, node_memory
from raystate.waits import ARENA_LOCK_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What is about to be reserved, in bytes: `slots` copies of `slot_bytes`, and a little around
    them.

    Beside them the buffers for writing to storage, which are memory of the HostActor and not of the
    arena's file system. `copies_bytes`: what copies of other hosts' snapshots will take in time.
    """

    slot_bytes: int
    slots: int
    other_bytes: int = 0
    buffer_bytes: int = 0
    copies_bytes: int = 0

    @property
    def file_bytes(self) -> int:
        return self.slot_bytes * self.slots + self.other_bytes + self.copies_bytes

    @property
    def total_bytes(self) -> int:
        return self.file_bytes + self.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaBytes:
    """What one arena takes. Files are sized first and reserved after, so `promised` is never less than `reserved`."""

    promised: int  # of files
    reserved: int
    buffers: int  # for writing its snapshots


def arena_bytes(path: Path) -> ArenaBytes:
    promised = reserved = buffers = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                found = os.stat(os.path.join(directory, name), follow_symlinks=False)
            except OSError:  # gone, or somebody else's
                continue
            promised += max(found.st_size, found.st_blocks * 512)
            reserved += found.st_blocks * 512
            if name == SET_META:
                count = (read_json(Path(directory) / name) or {}).get("buffer_bytes")
                buffers += count if isinstance(count, int) else 0
    return ArenaBytes(promised=promised, reserved=reserved, buffers=buffers)


def all_arenas(root: Path) -> list[Path]:
    """Every arena under `root`, of all runs and nodes."""
    try:
        entries = [entry for entry in os.scandir(root) if entry.name.startswith(PREFIX)]
        return sorted(Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False))
    except OSError:
        return []


def lock_root(root: Path) -> FileLock:
    """Keep all other hosts of this user on this node from promising memory; the caller releases it. Others can't open the directory, so
    they can't hold its lock.

    Raises:
        RaystateError: somebody else has held it for `ARENA_LOCK_S` seconds.
    """
    lock = FileLock.take(root, shared=False, directory=True, timeout_s=ARENA_LOCK_S)
    if lock is None:
        raise RaystateError(f"{root} was locked by another process for {ARENA_LOCK_S:g} s", path=str(root), waited_s=ARENA_LOCK_S)
    return lock


def used_bytes(root: Path) -> int:
    """How much of `host_memory` the arenas of this node take: what is reserved for them, and the buffers of their writes."""
    return sum(size.promised + size.buffers for size in map(arena_bytes, all_arenas(root)))


def check_capacity(
    root: Path, need: Need, *, cap_bytes: int, memory_threshold: float | None = 0.95, node: NodeMemory | None = None
) -> None:
    """Check that `need` fits this node, before a byte of it is reserved.

    Args:
        root: directory with all arenas of this node.
        cap_bytes: the setting host_memory in bytes, over all arenas in `root`.
        memory_threshold: share of the node's memory above which Ray kills workers; None: Ray's monitor is off.
        node: this node's memory, read anew when None.

    Raises:
        CapacityError: with `needed_bytes`, `available_bytes`, `slot_bytes`, `slots`, `slots_that_fit`, `limit` ("host_memory",
            "mount" or "memory"), `cap_bytes`, `used_bytes`, `path`.
    """
    sizes = [arena_bytes(path) for path in all_arenas(root)]
    outstanding = sum(size.promised - size.reserved for size in sizes)  # promised to others who are still reserving
    buffers = sum(size.buffers for size in sizes)
    used = sum(size.promised for size in sizes) + buffers
    node = node or node_memory()
    free = cap_bytes - used
    if need.total_bytes > free:
        percent = -(-100 * (used + need.total_bytes) // node.total_bytes)
        enough = used + need.total_bytes
        setting = f'host_memory="{percent}%" ({enough} bytes)' if percent <= 90 else "more hosts, so that each holds less"
        taken = f", and the arenas of this node have {format_bytes(used)} already" if used else ""
        raise _refusal(
            need,
            free,
            limit="host_memory",
            cap_bytes=cap_bytes,
            used_bytes=used,
            path=root,
            says=f"host_memory allows {format_bytes(cap_bytes)}{taken}. What would fit: {setting}{_fewer(need, free)}.",
        )
    mount = os.statvfs(root)
    size = mount.f_blocks * mount.f_frsize
    free = mount.f_bavail * mount.f_frsize - outstanding
    if need.file_bytes > free:
        wanted = size + need.file_bytes - free
        raise _refusal(
            need,
            free,
            limit="mount",
            cap_bytes=cap_bytes,
            used_bytes=used,
            path=root,
            says=f"the file system at {root} ({format_bytes(size)}) has no more. What would fit: a mount of "
            f"{format_bytes(wanted)}{_fewer(need, free)}.\n"
            f"{mount_advice(root, wanted)}",
        )
    limit = int(node.total_bytes * (1.0 if memory_threshold is None else memory_threshold))
    free = limit - node.used_bytes - outstanding - buffers  # those of other runs may be empty now, and full in a moment
    if need.total_bytes > free:
        share = "" if memory_threshold is None else f", and above {memory_threshold:.0%} of it Ray ends workers"
        raise _refusal(
            need,
            free,
            limit="memory",
            cap_bytes=cap_bytes,
            used_bytes=node.used_bytes,
            path=root,
            says=f"{node.whose} has {format_bytes(node.total_bytes)} of memory with {format_bytes(node.used_bytes)} in use{share}. What "
            f"would fit: a memory limit {format_bytes(need.total_bytes - free)} larger{_fewer(need, free)}.",
        )


def reservation_failed(root: Path, need: Need, cap_bytes: int) -> CapacityError:
    """The error for a file system that said no in spite of the check: somebody else was quicker, or it counts otherwise."""
    mount = os.statvfs(root)
    free = mount.f_bavail * mount.f_frsize
    return _refusal(
        need,
        free,
        limit="mount",
        cap_bytes=cap_bytes,
        used_bytes=sum(arena_bytes(path).promised for path in all_arenas(root)),
        path=root,
        says=f"the file system at {root} ran out of space while it was being reserved.\n"
        f"{mount_advice(root, mount.f_blocks * mount.f_frsize + need.total_bytes)}",
    )


def mount_advice(root: Path, size_bytes: int) -> str:
    """How to give a container a mount of at least `size_bytes` under `root`: Kubernetes and KubeRay, and plain containers."""
    size = -(-size_bytes // 1024**3)  # GiB
    mounts = [path for path in (root, *root.parents) if os.path.ismount(path) and path != Path("/")]
    root = mounts[0] if mounts else root
    return (
        f"In Kubernetes (KubeRay: the pod template of the worker group) mount memory there, and let the container's memory limit "
        f"include it:\n"
        f"  spec:\n"
        f"    containers:\n"
        f"    - name: ray-worker\n"
        f"      volumeMounts: [{{name: raystate-memory, mountPath: {root}}}]\n"
        f"    volumes:\n"
        f"    - name: raystate-memory\n"
        f"      emptyDir: {{medium: Memory, sizeLimit: {size}Gi}}\n"
        f"With docker: --shm-size={size}g. On a machine of your own: mount -o remount,size={size}G {root}."
    )


def _fewer(need: Need, free: int) -> str:
    fit = _slots_that_fit(need, free)
    return f", or {fit} snapshot slot{'s' * (fit != 1)} instead of {need.slots}" if 0 < fit < need.slots else ""


def _slots_that_fit(need: Need, free: int) -> int:
    return max(free - need.other_bytes - need.buffer_bytes - need.copies_bytes, 0) // max(need.slot_bytes, 1)


def _refusal(need: Need, free: int, *, limit: str, cap_bytes: int, used_bytes: int, path: Path, says: str) -> CapacityError:
    return CapacityError(
        f"snapshots need {format_bytes(need.total_bytes)} of host memory ({need.slots} slots of {format_bytes(need.slot_bytes)}"
        f"{f', and {format_bytes(need.buffer_bytes)} to write them to storage' if need.buffer_bytes else ''}"
        f"{f', and {format_bytes(need.copies_bytes)} for copies of other hosts; replicas=0: none' if need.copies_bytes else ''}), "
        f"{format_bytes(max(free, 0))} are available: {says}",
        needed_bytes=need.total_bytes,
        available_bytes=max(free, 0),
        slot_bytes=need.slot_bytes,
        slots=need.slots,
        buffer_bytes=need.buffer_bytes,
        copies_bytes=need.copies_bytes,
        slots_that_fit=_slots_that_fit(need, free),
        limit=limit,
        cap_bytes=cap_bytes,
        used_bytes=used_bytes,
        path=str(path),
    )
