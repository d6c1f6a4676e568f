"""The doorbell: a Unix socket between a trainer and its HostActor.

It carries no state, only "look at the control words". Its end-of-file tells that a process is gone:
the kernel closes a dead process's socket at once, so neither side has to poll for a death.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from raystate.arena.files import remove_entry
from raystate.core.formats.codec import dumps, loads
from raystate.core.formats.errors import BarrierTimeoutError
from raystate.machine.own_time import own_time
from raystate.waits import AGAIN_S, CONNECT_S, SOON_S

logger = logging.getLogger("raystate.doorbell")

RING = b"\n"
BYE = b"B"  # the trainer detaches on purpose
MAX_LINE_BYTES = 4096

_MAX_PATH_BYTES = 107  # what a Unix socket's address has room for
_READ_BYTES = 4096  # of one caller at a time, so that one who talks without end does not keep the others waiting
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The first line on a connection. `set_index` is -1 until the trainer has been allotted slots."""

    rank: int
    world: int
    lineage: str
    incarnation: str
    set_index: int = -1

    def to_line(self) -> bytes:
        return dumps(self) + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Hello | None:
        """What `to_line` gave; None for anything else."""
        try:
            hello = loads(cls, line)
        except ValueError:
            return None
        return hello if 0 <= hello.rank < hello.world and hello.set_index >= -1 else None


def socket_path(arena_path: Path) -> Path:
    return arena_path / "bell"


# ---------------------------------------------------------------- the HostActor's side


@dataclass(slots=True, eq=False)
class Caller:
    """One connection, as the HostActor sees it. Nothing that a caller sends can raise here."""

    connection: socket.socket
    pid: int  # of the process at the other end
    hello: Hello | None = None  # the newest; None until it has said who it is
    said_bye: bool = False
    trouble: str = ""  # why `read` said False, if the caller talked nonsense
    _rest: bytes = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def read(self) -> bool:
        """Take in what has come, without waiting.

        Returns:
            False: the connection has ended, or the caller sent what no trainer sends (`trouble`). Close it then.
        """
        try:
            data = self.connection.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError:
            data = b""
        if not data:
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line == BYE:
                self.said_bye = True
            elif line and not self._hear(line):
                return False
        if len(self._rest) > MAX_LINE_BYTES:
            self.trouble = f"process {self.pid} sent a line of more than {MAX_LINE_BYTES} bytes"
        return not self.trouble

    def _hear(self, line: bytes) -> bool:
        hello = Hello.from_line(line) if len(line) <= MAX_LINE_BYTES else None
        if hello is None:
            self.trouble = f"process {self.pid} sent a line that is no hello: {line[:60]!r}"
            return False
        self.hello = hello
        return True

    def has_hung_up(self) -> bool:
        """Whether the other end is closed, even if something of what it sent is still unread."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))

    def close(self) -> None:
        self.connection.close()


class Door:
    """Where callers come in. Register it with a selector for reading; `accept` when it is ready."""

    def __init__(self, arena_path: Path):
        """Listen. A predecessor's socket file is replaced (the arena's lock says that it is dead).

        Raises:
            OSError: the file system has no room for the socket's name, or this process has no file descriptor left.
        """
        self.path = socket_path(arena_path)
        # Given up for a moment when there are no others: then a call that can't be answered is
        # ended instead of ringing for ever.
        self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._full = False
        self._server = listen(arena_path)

    def fileno(self) -> int:
        return self._server.fileno()

    def accept(self) -> Caller | None:
        """The next caller. None: there is none after all, or no file descriptor for it is left; it will come again.

        Never waits and never raises.
        """
        try:
            connection, _ = self._server.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return None
        except OSError as error:
            self._turn_away(error)
            return None
        if self._full:
            self._full = False
            logger.warning("there are file descriptors again: trainers are heard again")
        connection.setblocking(False)
        return Caller(connection=connection, pid=peer_pid(connection))

    def _turn_away(self, error: OSError) -> None:
        if not self._full:
            self._full = True
            logger.error("a trainer rings and cannot be heard (%s): raise this process's limit of open files", error)
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1
            with contextlib.suppress(OSError):
                self._server.accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        if self._spare < 0:
            time.sleep(0.01)  # another thread took it: at least don't turn in circles

    def close(self) -> None:
        self._server.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


class Waker:
    """What ends a selector's wait from another thread. Register it for reading."""

    def __init__(self) -> None:
        self._reading, self._writing = socket.socketpair()
        self._reading.setblocking(False)

    def fileno(self) -> int:
        return self._reading.fileno()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # closed meanwhile
            self._writing.send(b"x")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._reading.recv(_READ_BYTES)

    def close(self) -> None:
        self._reading.close()
        self._writing.close()


def listen(arena_path: Path) -> socket.socket:
    """A socket at the arena's door, for this user only. An entry of that name is replaced."""
    path = socket_path(arena_path)
    remove_entry(path)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _with_address(path, server.bind)
        path.chmod(0o600)
        server.listen(64)
        server.setblocking(False)
    except BaseException:
        server.close()
        raise
    return server


def peer_pid(connection: socket.socket) -> int:
    """The pid at the other end, as the kernel knows it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[0]


def _with_address(path: Path, call: Callable[[str], _Result]) -> _Result:
    """`call` with an address of the socket at `path`: a long one is named through a descriptor of its directory."""
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        return call(str(path))
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return call(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


# ---------------------------------------------------------------- the trainer's side

_bells: weakref.WeakSet[Bell] = weakref.WeakSet()


class Bell:
    """Rings, and reconnects by itself when the HostActor is restarted."""

    def __init__(self, arena_path: Path, hello: Hello):
        self._path = socket_path(arena_path)
        self._hello = hello
        self._lock = threading.RLock()  # a signal handler may ring while its thread holds it
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._keeper = threading.Thread(target=self._keep, name="raystate-bell", daemon=True)

    def connect(self, timeout_s: float) -> None:
        """Connect, as soon as the HostActor is there. However this ends, `close` leaves nothing open.

        Raises:
            BarrierTimeoutError: no HostActor answers at the arena's door for `timeout_s` seconds.
        """
        deadline_s = own_time() + timeout_s
        _bells.add(self)
        while True:
            try:
                self._connect()
                break
            except OSError as error:
                if own_time() >= deadline_s:
                    raise BarrierTimeoutError(
                        f"rank {self._hello.rank}: the HostActor does not answer at {self._path} for {timeout_s:g} s: {error}",
                        rank=self._hello.rank,
                        path=str(self._path),
                        phase="start",
                        waited_s=timeout_s,
                    ) from None
            time.sleep(SOON_S)
        self._keeper.start()

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(CONNECT_S)
            _with_address(self._path, connection.connect)
            said = b""
            while not self._take(connection, said):  # the hello may change while it is being said
                said = self._hello.to_line()
                connection.sendall(said)
        except BaseException:
            connection.close()
            raise

    def _take(self, connection: socket.socket, said: bytes) -> bool:
        """Use this connection from now on, if `said` is all there is to say first."""
        with self._lock:
            if self._closed.is_set():
                connection.sendall(BYE + b"\n")
                raise ConnectionAbortedError("closed while it connected")
            if said != self._hello.to_line():
                return False
            connection.settimeout(None)
            # Of sending only: the keeper's recv waits for as long as the connection lives.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(CONNECT_S), 0))
            self._socket = connection
            return True

    def _keep(self) -> None:
        """Sits on the connection; when it ends, makes a new one."""
        while not self._closed.is_set():
            connection = self._socket
            if connection is None:
                # First a pause: somebody who hangs up on each call must not be called without end.
                if not self._closed.wait(AGAIN_S):
                    with contextlib.suppress(OSError):
                        self._connect()
                        self.ring()
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
        """Tell the HostActor more about this trainer (its slots); remembered for reconnects. Waits at most `CONNECT_S`."""
        with self._lock:
            self._hello = hello
            connection = self._socket
        self._say(connection, hello.to_line())

    def ring(self) -> None:
        """Never waits and never fails: a HostActor that is away looks at the words by itself when it is back."""
        with self._lock:
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.send(RING, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    @staticmethod
    def _say(connection: socket.socket | None, line: bytes) -> None:
        """Say what must not get lost, as a ring may. If it can't be said, a new connection begins with a hello."""
        if connection is not None:
            try:
                connection.sendall(line, socket.MSG_NOSIGNAL)
            except OSError:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Detach on purpose: the HostActor doesn't take it for a death."""
        with self._lock:
            self._closed.set()
            connection = self._socket
        self._say(connection, BYE + b"\n")
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self._keeper.is_alive():
            self._keeper.join(timeout=CONNECT_S)
        with self._lock:
            if self._socket is not None:
                self._socket.close()
                self._socket = None


def _drop_in_child() -> None:
    """A forked child (a data loader, say) must not keep its dead parent's connection open."""
    for bell in list(_bells):
        if bell._socket is not None:
            bell._socket.close()
            bell._socket = None
        bell._lock = threading.RLock()  # a thread that is not in the child may have held it


os.register_at_fork(after_in_child=_drop_in_child)
