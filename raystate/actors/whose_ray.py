"""Whose Ray it is that runs on this machine: a script joins its own user's, and no other unless that was named."""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass
from pathlib import Path

from raystate.ray_version import ray_internals

with ray_internals():
    from ray._common.utils import get_ray_address_file

_LISTENS = "0A"  # a socket's state in /proc/net/tcp


@dataclass(frozen=True, slots=True)
class StrangersRay:
    """A Ray of another user.

    Attributes:
        address: host:port.
        user: its user's name, or the number where this machine knows no name.
    """

    address: str
    user: str


def strangers_ray() -> StrangersRay | None:
    """The Ray that `ray.init()` would join by itself, if it is another user's; None: it is ours, there is none, or nobody can tell."""
    file = Path(get_ray_address_file(None))
    try:
        address = file.read_text().strip()
        # The file keeps the user who has made it, whoever writes another Ray's address into it later.
        uid = _listener(address)
        uid = file.stat().st_uid if uid is None else uid
    except OSError:
        return None
    return None if uid == os.getuid() else StrangersRay(address, _name(uid))


def _listener(address: str) -> int | None:
    """The user id of the process of this machine that listens at the address's port; None: none does."""
    port = address.rpartition(":")[2]
    if not port.isdecimal():
        return None
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            if state == _LISTENS and int(local.rpartition(":")[2], 16) == int(port):
                return int(uid)
    return None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
