"""Whose Ray it is that runs on this machine: a script joins its own user's, and no other unless that was named."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"  # a socket's state in /proc/net/tcp


def ray_folder() -> Path:
    """Where Ray keeps its files on this machine, by Ray's own rule: the address of the cluster that runs here, the sessions' folders."""
    return Path(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp") / "ray"


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
    """The Ray that `ray.init()` would join by itself, if it is another user's; None: it is ours,
    there is none, or nothing tells whose it is."""
    file = ray_folder() / "ray_current_cluster"
    try:
        address = file.read_text().strip()
        # The file keeps the user who has made it, even if another user's Ray writes its address
        # there.
        uid = _listener(address)
        uid = file.stat().st_uid if uid is None else uid
    except OSError:
        return None
    return None if uid == os.getuid() else StrangersRay(address, _name(uid))


def _listener(address: str) -> int | None:
    """The user id of the process of this machine that listens at host:port; None: none does, or the host is another machine."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if not port.isdecimal() or not _is_here(host):
        return None
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc/net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, uid, *_ = line.split()
            at, _, its_port = local.rpartition(":")
            if state == _LISTENS and int(its_port, 16) == int(port) and _takes(_parsed(at), host):
                return int(uid)
    return None


def _is_here(host: str) -> bool:
    """Whether it is an address of this machine: no socket can have another's."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return True
    return False


def _takes(at: ipaddress.IPv4Address | ipaddress.IPv6Address, host: str) -> bool:
    """Whether who listens there is reached by this address."""
    mapped = getattr(at, "ipv4_mapped", None) or at
    return mapped.is_unspecified or str(mapped) == host


def _parsed(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address of /proc/net/tcp: words of 32 bits, in this machine's order."""
    words = [int(text[begin : begin + 8], 16).to_bytes(4, sys.byteorder) for begin in range(0, len(text), 8)]
    return ipaddress.ip_address(b"".join(words))


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
