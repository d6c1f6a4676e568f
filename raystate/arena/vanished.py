"""Files of an arena that somebody removes in the midst of a run: which are missing, who does such things, and what a user does."""

from __future__ import annotations

import contextlib
import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from raystate.arena.files import HOST_CELL, LAYOUTS, META, SET_META, TRAINER_CELL
from raystate.arena.locks import FileLock
from raystate.arena.slot_set import SlotSet

_FIRST_USER = 1000  # logind leaves system users alone
_ADVICE = (
    "systemd-logind removes a user's files from shared memory at the last logout, by default: `loginctl enable-linger` or RemoveIPC=no "
    "in /etc/systemd/logind.conf turn it off"
)


def missing_file(arena: Path, lock: FileLock, sets: Iterable[SlotSet], others: Iterable[Path]) -> Path | None:
    """A file of an open arena that is not at its place any more.

    Args:
        lock: the arena's, which is held.
        others: further files.
    """
    if not lock.is_there:
        return lock.path
    files = [arena / META, arena / LAYOUTS, *others]
    for held in sets:
        files += [held.path / name for name in (SET_META, TRAINER_CELL, HOST_CELL)]
        files += [slot.path for slot in held.slots]
    return next((path for path in files if not os.path.lexists(path)), None)


def vanished_text(path: Path, arena: Path) -> str:
    """What is told where a file of an arena is found removed."""
    return (
        f"somebody has removed {path}, of the snapshots in host memory: what this host held is lost, and snapshots begin anew. {_ADVICE}. "
        f"If a cleaner has done it, spare {arena.parent}"
    )


def why_files_may_vanish(root: Path, *, system: Path = Path("/")) -> str:
    """What to do where logind may remove what lies under `root`; "": it does not.

    Args:
        system: the root directory of the machine.
    """
    user, is_shared = os.geteuid(), Path("/dev/shm") in (root, *root.parents)
    if user < _FIRST_USER or not is_shared or not (system / "run/systemd/seats").is_dir():
        return ""
    configured = sorted([system / "etc/systemd/logind.conf", *(system / "etc/systemd/logind.conf.d").glob("*.conf")])
    lines: list[str] = []
    for path in configured:
        with contextlib.suppress(OSError):  # absent, or not for this user's eyes
            lines += path.read_text(errors="replace").replace(" ", "").splitlines()
    if any(line.lower() in ("removeipc=no", "removeipc=false", "removeipc=0", "removeipc=off") for line in lines):
        return ""
    name = _user_name(user)
    return "" if (system / "var/lib/systemd/linger" / name).exists() else _ADVICE


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
