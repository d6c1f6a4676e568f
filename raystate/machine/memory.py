"""How much memory this node has, and how much of it is free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from raystate.core.formats.errors import StorageError

# Of a file that is read whole: metadata, packages, log entries. A writer of such a file must not be
# able to fill a reader's memory.
MOST_READ_BYTES = 1 << 30


class TooLargeError(StorageError):
    """It has more than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Memory of this node as its tightest limit sees it, in bytes."""

    total_bytes: int  # of the machine, or of the control group if that is smaller
    used_bytes: int  # shared memory included, caches that can be dropped not
    source: str  # "machine", or the control group's path

    @property
    def free_bytes(self) -> int:
        """What can still be had."""
        return max(0, self.total_bytes - self.used_bytes)

    @property
    def whose(self) -> str:
        """In words: what the numbers are of."""
        return "this machine" if self.source == "machine" else f"the control group {self.source}"


def node_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> NodeMemory:
    """The memory of the machine, or of the control group that leaves this process the least room.

    Args:
        proc, cgroup: where the kernel's files are; tests put their own there. What cannot be read sets no limit.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    info = _fields(proc / "meminfo")
    total = info.get("MemTotal:", total // 1024) * 1024
    used = max(total - info.get("MemAvailable:", info.get("MemFree:", total // 1024)) * 1024, 0)
    tightest = NodeMemory(total_bytes=total, used_bytes=used, source="machine")
    for directory, version in _groups(proc, cgroup):
        limit = _number(directory / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit is None or limit > total:
            continue  # no limit is written as a huge number in version 1, as "max" in version 2
        now = _number(directory / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if now is None:
            continue
        droppable = _fields(directory / "memory.stat").get("inactive_file" if version == 2 else "total_inactive_file", 0)
        group = NodeMemory(total_bytes=limit, used_bytes=max(now - droppable, 0), source=str(directory))
        if group.total_bytes - group.used_bytes < tightest.total_bytes - tightest.used_bytes:
            tightest = group
    return tightest


def _groups(proc: Path, cgroup: Path) -> list[tuple[Path, int]]:
    """This process's memory control groups and all above them: each one's limit counts."""
    found: list[tuple[Path, int]] = []
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            base, version = cgroup, 2
        elif "memory" in controllers.split(","):
            base, version = cgroup / "memory", 1
        else:
            continue
        # In a container the path is often one of the machine outside, of which only the root is mounted here.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [(base.joinpath(*parts[:depth]), version) for depth in range(len(parts), -1, -1)]
    return found


def _read(path: Path) -> bytes:
    """A file of the kernel's: it is short, and asked for so often that a Python file around it would be most of the time."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(fd, 1 << 16), b""))
    finally:
        os.close(fd)


def _number(path: Path) -> int | None:
    try:
        return int(_read(path))
    except (OSError, ValueError):  # absent, or "max"
        return None


def _fields(path: Path) -> dict[str, int]:
    """The "name number" lines of a file of the kernel's."""
    try:
        lines = [line.split() for line in _read(path).splitlines()]
    except OSError:
        return {}
    return {line[0].decode(): int(line[1]) for line in lines if len(line) >= 2 and line[1].isdigit()}
