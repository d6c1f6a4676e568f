"""The doorbell over real sockets: whatever a caller sends, and whatever this process runs out of, the HostActor goes on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import raystate
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import HostId, JoinReply
from raystate.manager import session as session_module
from raystate.manager.session import Session
from raystate.runtime.host import doorbell
from raystate.runtime.host.doorbell import BYE, MAX_LINE_BYTES, RING, Bell, Caller, Door, Hello, socket_path
from tests.arena.sets import Child
from tests.interrupting import interrupted, needs_instructions
from tests.patience import PATIENCE_S

HELLO = Hello(rank=1, world=2, lineage="1.1.a", incarnation="i1")


@pytest.fixture
def door(root: Path) -> Iterator[Door]:
    door = Door(root)
    yield door
    door.close()


@pytest.fixture
def ring_up(door: Door) -> Iterator[Callable[[], tuple[socket.socket, Caller]]]:
    """A connection of our own, and how the HostActor sees it."""
    opened: list[socket.socket] = []

    def ring_up() -> tuple[socket.socket, Caller]:
        mine = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        opened.append(mine)
        mine.connect(str(door.path))
        caller = accepted(door)
        opened.append(caller.connection)
        return mine, caller

    yield ring_up
    for one in opened:
        one.close()


def connected(arena_path: Path) -> Bell:
    bell = Bell(arena_path, HELLO)
    bell.connect(PATIENCE_S)
    return bell


def ready(what: Door | Caller) -> None:
    assert select.select([what], [], [], PATIENCE_S)[0], "nothing came"


def accepted(door: Door) -> Caller:
    ready(door)
    caller = door.accept()
    assert caller is not None
    return caller


def read_until(caller: Caller, done: Callable[[], bool]) -> bool:
    """Read until `done`, or until the caller is to be closed; returns what the last read said."""
    while True:
        ready(caller)
        if not caller.read():
            return False
        if done():
            return True


# ---------------------------------------------------------------- lines


@given(st.builds(Hello, rank=st.integers(0, 5), world=st.integers(6, 9), lineage=st.text(), incarnation=st.text()))
def test_a_hello_comes_back_as_it_was(hello: Hello):
    assert Hello.from_line(hello.to_line()) == hello


GOOD = {"rank": 0, "world": 1, "lineage": "l", "incarnation": "i", "set_index": -1}
NONSENSE = [
    b"",
    b"nonsense",
    b"\xff\xfe\x00",
    b"{}",
    b"[]",
    b"null",
    b"7",
    b'"B"',
    b"[" * 4000,
    *(
        json.dumps({**GOOD, **bad}).encode()
        for bad in (
            {"rank": "0"},
            {"rank": -1},
            {"rank": True},
            {"rank": 1.0},
            {"rank": 1},
            {"world": 0},
            {"world": None},
            {"set_index": -2},
            {"set_index": "1"},
            {"lineage": 7},
            {"incarnation": None},
            {"more": 1},
        )
    ),
]


@pytest.mark.parametrize("line", NONSENSE, ids=lambda line: line[:40].decode(errors="replace"))
def test_nonsense_is_no_hello(line: bytes):
    assert Hello.from_line(json.dumps(GOOD).encode()) is not None
    assert Hello.from_line(line) is None


@given(st.binary(max_size=200))
def test_no_line_raises(line: bytes):
    assert Hello.from_line(line) is None


# ---------------------------------------------------------------- one caller


def test_lines_may_come_in_any_pieces(ring_up: Callable[[], tuple[socket.socket, Caller]]):
    mine, caller = ring_up()
    assert caller.pid == os.getpid() and caller.hello is None and caller.read()
    for byte in HELLO.to_line():
        assert caller.hello is None
        mine.sendall(bytes([byte]))
        assert read_until(caller, lambda: True)
    assert caller.hello == HELLO
    later = Hello(rank=1, world=2, lineage="1.1.a", incarnation="i1", set_index=3)
    mine.sendall(RING * 9 + later.to_line() + RING + BYE + RING)
    assert read_until(caller, lambda: caller.said_bye) and caller.hello == later
    mine.close()
    ready(caller)
    assert not caller.read() and caller.trouble == ""


@pytest.mark.parametrize("line", NONSENSE[1:], ids=lambda line: line[:40].decode(errors="replace"))
def test_a_caller_who_talks_nonsense_is_to_be_closed(ring_up: Callable[[], tuple[socket.socket, Caller]], line: bytes):
    mine, caller = ring_up()
    mine.sendall(HELLO.to_line() + line + b"\n")
    assert not read_until(caller, lambda: False)
    assert f"process {os.getpid()} sent a line that is no hello" in caller.trouble and caller.hello == HELLO


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_without_end_is_not_kept(ring_up: Callable[[], tuple[socket.socket, Caller]], end: bytes):
    mine, caller = ring_up()
    mine.sendall(b'"' + b"x" * (2 * MAX_LINE_BYTES) + b'"' + end)
    assert not read_until(caller, lambda: False)
    assert "sent a line" in caller.trouble and len(caller._rest) <= 2 * MAX_LINE_BYTES


@pytest.mark.parametrize("garbage", [b"\x00", b"abc\n", RING + b"?"])
def test_who_sends_garbage_for_ever_is_disconnected(ring_up: Callable[[], tuple[socket.socket, Caller]], garbage: bytes):
    mine, caller = ring_up()
    sent_to_the_end: list[bool] = []

    def send() -> None:
        try:
            while True:
                mine.sendall(garbage * 1000)
        except OSError:
            sent_to_the_end.append(False)

    sender = threading.Thread(target=send)
    sender.start()
    assert not read_until(caller, lambda: False)
    caller.close()
    sender.join(PATIENCE_S)
    assert sent_to_the_end == [False] and caller.trouble


def test_rings_without_end_are_read_a_piece_at_a_time(ring_up: Callable[[], tuple[socket.socket, Caller]]):
    mine, caller = ring_up()
    mine.sendall(RING * 20_000)
    assert caller.read()
    assert select.select([caller], [], [], 0)[0], "one read took everything while others waited"


# ---------------------------------------------------------------- the door

_OUT_OF_FILES = """
import resource, socket
from pathlib import Path
from raystate.runtime.host.doorbell import Door
door = Door(Path(sys.argv[1]))
callers = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(3)]
for caller in callers:
    caller.settimeout(30)
    caller.connect(str(door.path))
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    while True:
        os.dup(0)
except OSError as error:
    assert error.errno == 24, error
assert door.accept() is None and door.accept() is None
# Who could not be heard was told so, nobody is left to ring for ever, and the next one is heard when there is room.
assert callers[0].recv(1) == callers[1].recv(1) == b""
os.close(callers[0].detach())
heard = door.accept()
assert heard is not None and heard.pid == os.getpid()
assert door.accept() is None
print("done", flush=True)
"""


def test_without_file_descriptors_the_door_turns_callers_away_and_goes_on(root: Path, child: Child):
    _, said = child(_OUT_OF_FILES, root)
    assert said == b"done"


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


@pytest.mark.parametrize(
    "make", [_fifo, _socket, Path.mkdir, Path.touch, lambda path: path.symlink_to("/nowhere")],
    ids=["fifo", "socket", "directory", "file", "link"],
)  # fmt: skip
def test_whatever_lay_at_the_door_is_replaced(root: Path, make: Callable[[Path], None]):
    make(socket_path(root))
    door = Door(root)
    bell = connected(root)
    caller = accepted(door)
    assert read_until(caller, lambda: caller.hello == HELLO)
    bell.close()
    assert not read_until(caller, lambda: False) and caller.said_bye
    for one in (caller, door):
        one.close()


def test_the_arenas_path_may_be_longer_than_a_sockets_address(root: Path):
    path = root / ("a" * 200) / ("b" * 200)
    path.mkdir(parents=True)
    door = Door(path)
    bell = connected(path)
    caller = accepted(door)
    assert read_until(caller, lambda: caller.hello == HELLO)
    assert socket_path(path).stat().st_mode & 0o777 == 0o600
    bell.close()
    caller.close()
    door.close()


# ---------------------------------------------------------------- the bell


def test_nobody_at_the_door_is_an_error_that_names_it(root: Path):
    with pytest.raises(RaystateError, match="rank 1: the HostActor does not answer at") as caught:
        Bell(root, HELLO).connect(0.2)
    assert caught.value.path == str(socket_path(root))


class DoorOnly:
    """A link of a trainer that only comes to its HostActor's door."""

    host = HostId("n")

    def ask(self, event: object, timeout_s: float) -> JoinReply:
        del event, timeout_s
        return JoinReply(lineage="1.1.a", attempt=1, host_count=1, newest_step=-1)

    def bell(self, arena_path: Path, hello: Hello) -> Bell:
        return Bell(arena_path, hello)

    def clock(self) -> float:
        return 0.0

    node_clock = clock


@needs_instructions
def test_an_interruption_while_a_trainer_rings_leaves_no_connection(root: Path, door: Door):
    """Ctrl-C, at any moment. The next manager of the process ends the one that was interrupted."""
    config = raystate.StateConfig(storage=str(root / "run"), run="r")
    at, goes_on = 0, True
    while goes_on:
        session = Session(cast("Any", DoorOnly()), config, rank=1, world=2, group="g")
        session.arena_path = root
        goes_on = interrupted(session.ring, at, (doorbell.__file__, session_module.__file__, __file__))
        session.end()
        session.close()
        while select.select([door], [], [], 0)[0]:
            caller = accepted(door)
            assert caller.has_hung_up()
            caller.close()
        at += 1
    assert at > 20


def test_a_bell_waits_for_a_host_that_is_about_to_come(root: Path):
    made: list[Bell] = []
    ringing = threading.Thread(target=lambda: made.append(connected(root)))
    ringing.start()
    door = Door(root)
    caller = accepted(door)
    assert read_until(caller, lambda: caller.hello == HELLO)
    ringing.join(PATIENCE_S)
    made[0].close()
    caller.close()
    door.close()


def test_a_bell_says_its_newest_hello_to_the_next_host_and_rings(root: Path, door: Door):
    bell = connected(root)
    first = accepted(door)
    new = Hello(rank=1, world=2, lineage="1.1.a", incarnation="i1", set_index=7)
    bell.introduce(new)
    assert read_until(first, lambda: first.hello == new)
    first.close()
    door.close()
    for restart in range(2):
        door = Door(root)
        second = accepted(door)
        assert read_until(second, lambda caller=second: caller.hello == new)
        if restart == 0:
            second.close()
            door.close()
    bell.close()
    assert not read_until(second, lambda: False) and second.said_bye
    second.close()
    door.close()


def test_a_hello_is_not_lost_when_the_host_does_not_listen(root: Path, door: Door, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doorbell, "CONNECT_S", 1.0)
    bell = connected(root)
    deaf = accepted(door)
    assert bell._socket is not None
    with contextlib.suppress(BlockingIOError):
        while bell._socket.send(RING, socket.MSG_DONTWAIT):
            pass
    bell.ring()  # lost, which costs nothing
    new = Hello(rank=1, world=2, lineage="1.1.a", incarnation="i1", set_index=7)
    bell.introduce(new)
    again = accepted(door)
    assert read_until(again, lambda: again.hello == new)
    bell.close()
    for one in (deaf, again):
        one.close()


def test_a_bell_that_is_introduced_while_it_connects_says_both(root: Path, door: Door, monkeypatch: pytest.MonkeyPatch):
    new = Hello(rank=1, world=2, lineage="1.1.a", incarnation="i1", set_index=7)
    take, takes = Bell._take, []

    def introduced(self: Bell, connection: socket.socket, said: bytes) -> bool:
        takes.append(said)
        if len(takes) == 2:
            self.introduce(new)
        return take(self, connection, said)

    monkeypatch.setattr(Bell, "_take", introduced)
    bell = connected(root)
    caller = accepted(door)
    assert read_until(caller, lambda: caller.hello == new)
    bell.close()
    caller.close()


_FORKS = """
from pathlib import Path
from raystate.runtime.host.doorbell import Bell, Hello
from tests.arena.sets import Child
bell = Bell(Path(sys.argv[1]), Hello(rank=1, world=2, lineage="1.1.a", incarnation="i1"))
bell.connect(60.0)
if os.fork():
    sys.stdin.read()
bell.ring()
print("child", flush=True)
sys.stdin.read()
"""


def test_a_forked_child_does_not_keep_its_dead_parents_connection(root: Path, door: Door, child: Child):
    process, said = child(_FORKS, root)
    caller = accepted(door)
    assert said == b"child"
    assert caller.pid == process.pid
    process.kill()
    assert not read_until(caller, lambda: False) and caller.hello == HELLO
    caller.close()
