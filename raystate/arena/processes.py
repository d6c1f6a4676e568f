"""Proof that a process is gone: never a guess from a number that may have been reused or belongs to another container."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """One process, recognizable later. Equal marks are the same process; pid alone would not be."""

    pid: int
    start_ticks: int  # since boot, from /proc; 0: could not be read
    boot: str  # kernel boot id
    namespace: str  # of process ids: the same number means another process in another container


def boot_id() -> str:
    """Random id of the running kernel's boot; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def mark_process(pid: int) -> ProcessMark:
    """Remember the process that has this number now."""
    return ProcessMark(pid=pid, start_ticks=_start_ticks(pid), boot=boot_id(), namespace=_namespace())


def is_gone(mark: ProcessMark) -> bool:
    """True only if that process provably does not run any more; False also when this process cannot know."""
    here = boot_id()
    if mark.boot and here and mark.boot != here:
        return True
    if mark.namespace != _namespace() or not mark.start_ticks:
        return False
    if not Path("/proc/self/stat").exists():
        return False
    return _start_ticks(mark.pid) != mark.start_ticks


def runs(mark: ProcessMark) -> bool:
    """True only if that process provably has not ended; False also when this process cannot know."""
    return bool(mark.boot == boot_id() and mark.namespace == _namespace() and mark.start_ticks == _start_ticks(mark.pid) != 0)


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_ticks(pid: int) -> int:
    """Start of a running process; 0 if there is none. A zombie has ended, unless other threads still close what all of them had open."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    fields = text.rpartition(")")[2].split()  # the command's name may hold blanks and brackets
    state, threads = fields[0], int(fields[17])
    return 0 if state == "X" or (state == "Z" and threads <= 1) else int(fields[19])
