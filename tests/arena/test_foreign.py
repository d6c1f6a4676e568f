"""Things in the arena's way that raystate did not put there: nothing waits for them, nothing of somebody else's is touched, and what
can't go on says so with a RaystateError."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raystate.arena import HostArena, SlotSet, TrainerArena, arena_path, default_root, sweep
from raystate.arena.capacity import all_arenas, arena_bytes
from raystate.arena.files import MAX_ARENA_DIR_BYTES
from raystate.arena.locks import FileLock
from raystate.arena.slot_set import read_note, trainer_lock
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import ConfigError, RaystateError
from tests.arena.sets import NODE, SIZES, OpenHost, remove_gone, stage

pytestmark = pytest.mark.timeout(300)  # whatever waits for a foreign thing fails here


def _file(path: Path, outside: Path) -> None:
    path.write_bytes(b"not raystate's")


def _empty_file(path: Path, outside: Path) -> None:
    path.touch()


def _fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, outside: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


def _device(path: Path, outside: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


def _directory(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "theirs").write_bytes(b"theirs")


def _private_directory(path: Path, outside: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "theirs").write_bytes(b"theirs")


def _link_to_directory(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def _link_to_file(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "theirs")


def _link_to_nothing(path: Path, outside: Path) -> None:
    path.symlink_to(outside / "missing")


KINDS = [
    _file, _empty_file, _fifo, _socket, _device, _directory, _private_directory, _link_to_directory, _link_to_file, _link_to_nothing,
]  # fmt: skip
each_kind = pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__[1:])


@pytest.fixture
def outside(root: Path) -> Path:
    path = root / "somebody's"
    path.mkdir()
    (path / "theirs").write_bytes(b"theirs")
    return path


@each_kind
def test_in_the_root_beside_the_arenas(root: Path, outside: Path, open_host: OpenHost, make: Callable[[Path, Path], None]):
    foreign = [root / "raystate-foreign", root / "raystate-0123456789abcdef-0a1b2c3d4e5f"]
    for path in foreign:
        make(path, outside)
    was = [os.lstat(path) for path in foreign]
    host = open_host()
    held = host.allot(trainer="t1", **SIZES)
    stage(held.path)
    assert sweep(root, dead_nodes=[NODE], is_dead=lambda _: "all are") == []  # this one's host lives
    host.close()
    assert sweep(root, dead_nodes=[NODE]) == [f"{host.path.name}: node {NODE} is dead"]
    for path, before in zip(foreign, was, strict=True):
        assert os.lstat(path).st_ino == before.st_ino
        assert not path.is_dir() or os.listdir(path) == ["theirs"]
    assert os.listdir(outside) == ["theirs"]


PLACES = [
    "meta.json", "host.lock", "layouts", "layouts/REF", "layouts/.other", "set-0", "set-1", "set-x", "other", "bell",
    "set-0/set.json", "set-0/slot-0", "set-0/trainer.cell", "set-0/host.cell", "set-0/LOCK", "set-0/trainer.lock.other",
    "set-0/layout.REF",
]  # fmt: skip


@each_kind
@pytest.mark.parametrize("place", PLACES)
def test_in_the_place_of_a_file_of_the_arena(
    root: Path, outside: Path, host: HostArena, open_host: OpenHost, held: SlotSet, make: Callable[[Path, Path], None], place: str
):
    ref = stage(held.path)
    arena, set_path = host.path, held.path
    host.close()
    path = arena / place.replace("REF", ref).replace("LOCK", trainer_lock(set_path, "t1").name)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    make(path, outside)

    # A trainer and readers before any host, then a host, then everybody.
    attempt(lambda: SlotSet.open(set_path).slots[0].read())
    attempt(lambda: TrainerArena.attach(set_path, trainer="t1", timeout_s=0.1).close())
    attempt(lambda: read_note(trainer_lock(set_path, "t1")))
    attempt(lambda: [arena_bytes(one) for one in all_arenas(root)])
    attempt(lambda: sweep(root))
    opened: list[HostArena] = []
    attempt(lambda: opened.append(open_host(timeout_s=0.1)))
    if not opened:
        assert place == "host.lock", "only the lock itself can't be replaced: who holds it is not known"
        path.unlink() if not path.is_dir() or path.is_symlink() else shutil.rmtree(path)
        opened.append(open_host())
    (host,) = opened
    for one in list(host.sets):
        assert host.trainer_state(one) in ("gone", "expected")
    ref = host.put_layout(b"another")
    attempt(lambda: host.put_layout(b"layout"))
    attempt(lambda: host.get_layout(ref))
    new = host.allot(trainer="t2", data_bytes=81920, table_bytes=100)
    with TrainerArena.attach(new.path, trainer="t2") as trainer:
        trainer.put_layout(b"new")
        host.prune_layouts()
        assert host.trainer_state(new) == "attached"
    host.close()
    host = open_host()
    assert host.adopted and new.index in [one.index for one in host.sets]
    remove_gone(host)
    host.close(remove=True)
    assert not os.path.lexists(arena) and os.listdir(outside) == ["theirs"]


def attempt(call: Callable[[], Any]) -> None:
    with contextlib.suppress(RaystateError):
        call()


@each_kind
def test_as_the_arena_itself(root: Path, outside: Path, open_host: OpenHost, make: Callable[[Path, Path], None]):
    path = arena_path(root, "r1", NODE)
    make(path, outside)
    if make is _private_directory:
        return  # of this user, of that very name, and closed to all others: it is an arena
    with pytest.raises(RaystateError, match="is not a private directory of user") as caught:
        open_host()
    assert caught.value.path == str(path) and os.listdir(outside) == ["theirs"]


def test_a_lock_that_is_replaced_for_ever_is_given_up(root: Path, monkeypatch: pytest.MonkeyPatch):
    from raystate.arena import locks

    (root / "lock").touch()
    monkeypatch.setattr(locks, "_is_file", lambda fd, path: False)
    monkeypatch.setattr(locks, "FILE_S", 0.05)
    assert FileLock.take(root / "lock", shared=False) is None


def test_an_arena_that_vanishes_for_ever_is_given_up(root: Path, open_host: OpenHost, monkeypatch: pytest.MonkeyPatch):
    from raystate.arena import meta

    def swept(path: Path, **options: object):
        path.parent.rmdir()
        raise FileNotFoundError(path)

    monkeypatch.setattr(meta, "FILE_S", 0.05)
    monkeypatch.setattr(FileLock, "take", swept)
    with pytest.raises(RaystateError, match="removes it again and again"):
        open_host()


def test_an_arena_of_nobody_in_its_first_moment_is_swept(root: Path):
    path = root / "raystate-r-n"
    (path / "layouts").mkdir(parents=True)
    path.chmod(0o700)
    (path / "host.lock").touch()
    (path / ".meta.json.12.ab").touch()
    assert sweep(root) == ["raystate-r-n: it was never finished"]


# ---------------------------------------------------------------- arena_dir


LONG_PATH = "/" + "/".join(["d" * 200] * 20)


@pytest.mark.parametrize(
    ("arena_dir", "says"),
    [
        (LONG_PATH, f"its path has {len(LONG_PATH)} bytes; {MAX_ARENA_DIR_BYTES} leave room for the names below it"),
        ("/dev/shm/" + "n" * 256, "has 256 bytes; the limit is 255"),
        ("/dev/shm/" + "é" * 128, "has 256 bytes; the limit is 255"),
        ("/dev/shm/a\0b", "NUL"),
    ],
)
def test_a_directory_that_no_file_fits_into_is_refused_when_it_is_set(arena_dir: str, says: str):
    for refused in (lambda: StateConfig(storage="/s", run="r", arena_dir=arena_dir), lambda: default_root(arena_dir)):
        with pytest.raises(ConfigError, match=says) as caught:
            refused()
        assert caught.value.field == "arena_dir"


def test_a_directory_of_the_longest_path_holds_an_arena(root: Path):
    longest = str(root)
    while len(longest) < MAX_ARENA_DIR_BYTES:
        longest += "/" + "d" * min(255, max(1, MAX_ARENA_DIR_BYTES - len(longest) - 1))
    longest = longest[:MAX_ARENA_DIR_BYTES].rstrip("/")
    os.makedirs(longest)
    config = StateConfig(storage="/s", run="r", arena_dir=longest)
    path = arena_path(default_root(config.arena_dir), "0123456789abcdef", NODE)
    arena = HostArena.open(path, run="r", storage="/s", node_id=NODE, cap_bytes=1 << 40, memory_threshold=None)
    stage(arena.allot(trainer="t1", **SIZES).path)
    assert sweep(Path(longest)) == []
    arena.close(remove=True)
    assert not os.listdir(longest)


@pytest.mark.parametrize("make", [_file, _fifo, _link_to_nothing], ids=lambda make: make.__name__[1:])
def test_a_root_that_is_no_directory_is_refused(root: Path, outside: Path, make: Callable[[Path, Path], None]):
    make(root / "dir", outside)
    with pytest.raises(ConfigError, match="is not a writable directory"):
        default_root(str(root / "dir"))
