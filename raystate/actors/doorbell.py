"""The doorbell: a Unix socket between a trainer and its HostActor.

It carries no state, only "look at the control words" and, by its end-of-file, the news that a process is gone: the kernel closes a
dead process's socket at once, so that neither side has to poll for the other's death.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import socket
import struct
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

RING = b"\n"
BYE = b"B"  # the trainer detaches on purpose
CONNECT_TIMEOUT_S = 5.0
RECONNECT_INTERVAL_S = 0.1

# A forked child, such as a data loader's, shares its parent's sockets: it would keep the connection open after the parent's death.
_bells: weakref.WeakSet[Bell] = weakref.WeakSet()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first line on a connection. `set_index` is -1 until the trainer has been allotted slots."""

    rank: int
    world: int
    lineage: str
    incarnation: str
    set_index: int = -1

    def to_line(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Hello:
        return cls(**json.loads(line))


def socket_path(arena_path: Path) -> Path:
    return arena_path / "bell"


def listen(arena_path: Path) -> socket.socket:
    """The HostActor's side. A predecessor's socket file is replaced (the arena's lock says that it is dead)."""
    path = socket_path(arena_path)
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(path))
    path.chmod(0o600)
    server.listen(64)
    server.setblocking(False)
    return server


def peer_pid(connection: socket.socket) -> int:
    """The pid at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[0]


def has_hung_up(connection: socket.socket) -> bool:
    """Whether the other end is closed, even if something of what it sent is still unread."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


class Bell:
    """The trainer's side: rings, and reconnects by itself when the HostActor is restarted."""

    def __init__(self, arena_path: Path, hello: Hello):
        self._path = socket_path(arena_path)
        self._hello = hello
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        _bells.add(self)
        self._connect()
        self._keeper = threading.Thread(target=self._keep, name="raystate-bell", daemon=True)
        self._keeper.start()

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_TIMEOUT_S)
            connection.connect(str(self._path))
            connection.sendall(self._hello.to_line())
            connection.settimeout(None)
        except OSError:
            connection.close()
            raise
        with self._lock:
            self._socket = connection

    def _keep(self) -> None:
        """Sits on the connection; when it ends, makes a new one."""
        while not self._closed.is_set():
            connection = self._socket
            if connection is None:
                with contextlib.suppress(OSError):
                    self._connect()
                    self.ring()
                    continue
                self._closed.wait(RECONNECT_INTERVAL_S)
                continue
            try:
                ended = connection.recv(1) == b""
            except OSError:
                ended = True
            if ended:
                with self._lock:
                    if self._socket is connection:
                        self._socket = None
                connection.close()

    def introduce(self, hello: Hello) -> None:
        """Tell the HostActor more about this trainer (its slots); remembered for reconnects."""
        self._hello = hello
        self._send(hello.to_line())

    def ring(self) -> None:
        """Never waits and never fails: a HostActor that is away looks at the words by itself when it is back."""
        self._send(RING)

    def _send(self, data: bytes) -> None:
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """Detach on purpose: the HostActor doesn't take it for a death."""
        self._closed.set()
        self._send(BYE + b"\n")
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
        self._keeper.join(timeout=CONNECT_TIMEOUT_S)

    def drop_in_child(self) -> None:
        """After a fork: give up the child's copy of the connection. No lock, its holder may not exist in the child."""
        connection, self._socket = self._socket, None
        self._closed.set()
        if connection is not None:
            connection.close()  # the parent's copy stays open


def _drop_in_child() -> None:
    for bell in list(_bells):
        bell.drop_in_child()


os.register_at_fork(after_in_child=_drop_in_child)
