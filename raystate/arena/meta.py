"""Whose an arena is, and the lock that says who has it open."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from raystate.arena.files import FORMAT, HOST_LOCK, META, make_private_dir, read_bytes, read_form
from raystate.arena.locks import FileLock
from raystate.arena.processes import ProcessMark
from raystate.core.formats.errors import RaystateError
from raystate.machine.own_time import own_time
from raystate.waits import FILE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaMeta:
    """What `meta.json` says about an arena."""

    run: str
    storage: str
    node_id: str
    boot: str
    host: ProcessMark | None  # the process that opened it last
    node: ProcessMark | None  # the node's own process (Ray: the raylet), which lives exactly as long as the node
    format: int = FORMAT

    @classmethod
    def read(cls, arena: Path) -> ArenaMeta | None:
        return read_form(cls, arena / META)


def lock_arena(path: Path, timeout_s: float) -> FileLock:
    """Create the arena's directory if need be, and hold its lock.

    Raises:
        RaystateError: another process holds it (`pid`) after `timeout_s` seconds, or the directory is not this user's own.
    """
    deadline_s = own_time() + timeout_s
    holder = ""
    while True:
        if not os.path.lexists(path.parent):
            make_private_dir(path.parent)
        try:
            make_private_dir(path)
        except RaystateError:
            if os.path.lexists(path.parent):
                raise
            continue  # the last arena in it has gone just now
        # A sweep may take the directory away in between; then it is made anew.
        with contextlib.suppress(FileNotFoundError):
            lock = FileLock.take(path / HOST_LOCK, shared=False, create=True, timeout_s=max(deadline_s - own_time(), 0.0))
            if lock is not None:
                return lock
            holder = (read_bytes(path / HOST_LOCK) or b"unknown").decode(errors="replace")
            break
        if own_time() >= deadline_s + FILE_S:
            holder = "unknown, which removes it again and again"
            break
    raise RaystateError(
        f"arena {path} is in use by process {holder} (waited {timeout_s:g} s)",
        path=str(path),
        pid=int(holder) if holder.isdigit() else None,
        waited_s=timeout_s,
    )
