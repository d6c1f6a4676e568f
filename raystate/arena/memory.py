"""How much memory this node has, and how much of it is spoken for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from raystate.core.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[_letter] = _UNITS[_letter + "ib"] = 1024**_power  # "4G" means what Linux and Kubernetes' Gi mean
    _UNITS[_letter + "i"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z%]*)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMemory:
    """Memory of this node as its tightest limit sees it, in bytes."""

    total_bytes: int  # of the machine, or of the control group if that is smaller
    used_bytes: int  # shared memory included, caches that can be dropped not
    source: str  # "machine", or the control group's path

    @property
    def whose(self) -> str:
        """In words: what the numbers are of."""
        return "this machine" if self.source == "machine" else f"the control group {self.source}"


def parse_memory(value: str | int, *, total_bytes: int | None = None, field: str = "host_memory") -> int:
    """Bytes meant by a setting.

    Args:
        value: bytes, "2GiB" / "512 MB" / "1.5G", or a percentage of the node's memory such as "40%".
        total_bytes: what 100% is; None: this node's memory, or its control group's limit if that is smaller.
        field: the setting's name, for the error.

    Raises:
        ConfigError: not a size above zero, or more than 100%.
    """
    size = value if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, str) and (match := _SIZE.match(value)):
        number, unit = float(match[1]), match[2].lower()
        if unit == "%" and number <= 100:
            size = int(number / 100 * (node_memory().total_bytes if total_bytes is None else total_bytes))
        elif unit in _UNITS:
            size = int(number * _UNITS[unit])
    if size is None or size <= 0:
        raise ConfigError(
            f'{field}: expected bytes, a size such as "2GiB", or a percentage such as "40%", got {value!r}', field=field, got=value
        )
    return size


def format_bytes(size_bytes: int) -> str:
    """A size for a person: "1.5 GiB"."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


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
        now = _number(directory / ("memory.current" if version == 2 else "memory.usage_in_bytes"))
        if limit is None or now is None or limit > total:
            continue  # no limit is written as a huge number in version 1, as "max" in version 2
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


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _fields(path: Path) -> dict[str, int]:
    """The "name number" lines of a file of the kernel's."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) >= 2 and line[1].isdigit()}
