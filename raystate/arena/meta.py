"""Whose an arena is, and the lock that says who has it open."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raystate.arena.files import FORMAT, HOST_LOCK, META, make_private_dir, read_json
from raystate.arena.locks import FileLock
from raystate.arena.processes import ProcessMark
from raystate.core.errors import RaystateError


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
        raw = read_json(arena / META)
        try:
            return (
                cls(**{**raw, "host": ProcessMark.from_json(raw["host"]), "node": ProcessMark.from_json(raw["node"])})
                if raw
                else None
            )
        except (KeyError, TypeError):  # another format's
            return None


def lock_arena(path: Path, timeout_s: float) -> FileLock:
    """Create the arena's directory if need be, and hold its lock.

    Raises:
        RaystateError: another process holds it (`pid`) after `timeout_s` seconds, or the directory is not this user's own.
    """
    while True:
        make_private_dir(path)
        try:
            lock = FileLock.take(path / HOST_LOCK, shared=False, create=True, timeout_s=timeout_s)
        except FileNotFoundError:  # a sweep took the directory away in between
            continue
        if lock is not None:
            return lock
        try:
            holder = (path / HOST_LOCK).read_text() or "unknown"
        except FileNotFoundError:
            continue
        raise RaystateError(
            f"arena {path} is in use by process {holder} (waited {timeout_s:g} s)",
            path=str(path),
            pid=int(holder) if holder.isdigit() else None,
            waited_s=timeout_s,
        )
