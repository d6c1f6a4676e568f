"""The recorder sees what a program does to a directory, however it does it; the model leaves what may be left, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.power.recorder import Event, Recording, RecordingError, RecordingUnavailableError, Tree, mark, record, replays

Run = Callable[..., Recording]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Records a piece of Python that runs in an empty directory, whose path is `root`; `before` is not recorded."""

    def run(code: str, before: Callable[[Path], object] = lambda _: None, timeout_s: float = 60.0) -> Recording:
        root = tmp_path / "recorded"
        root.mkdir()
        before(root)
        program = f"import os, sys\nroot = sys.argv[1]\nos.chdir(root)\n{code}"
        try:
            return record([sys.executable, "-c", program, str(root)], root, timeout_s=timeout_s)
        except RecordingUnavailableError as error:
            pytest.skip(f"nothing can be recorded here: {error}")

    return run


def happened(recording: Recording) -> list[str]:
    return [str(event) for event in recording.events[recording.start :]]


def trees(recording: Recording) -> list[Tree]:
    """What a power cut at the very end may leave, without the marks' repetitions."""
    found: list[Tree] = []
    for replay in replays(recording):
        if replay.number == len(recording.events) - recording.start and replay.tree not in found:
            found.append(replay.tree)
    return found


def at_the_end(*events: Event) -> list[Tree]:
    """Likewise, for these events after a durable file "old" (inode 2) and a durable empty folder "d" (inode 3)."""
    start = [
        Event(kind="create", path="old", inode=2, folder=1),
        Event(kind="write", path="old", inode=2, data=b"1234"),
        Event(kind="mkdir", path="d", inode=3, folder=1),
        Event(kind="sync"),
    ]
    # The same tree comes again after a mark, so these are all that are possible then.
    recording = Recording(events=(*start, *events, Event(kind="mark", path="end")), start=len(start))
    return [replay.tree for replay in replays(recording) if "end" in replay.marks]


OLD: Tree = {"old": b"1234", "d": None}
CREATE = Event(kind="create", path="new", inode=4, folder=1)
WRITE = Event(kind="write", path="new", inode=4, data=b"abcd")
FILE, FOLDER, D = (Event(kind="fsync", inode=inode) for inode in (4, 1, 3))
MOVE = Event(kind="rename", path="old", inode=2, folder=1, target="d/moved", target_folder=3)
MOVED: Tree = {"d": None, "d/moved": b"1234"}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([CREATE, WRITE, FILE, FOLDER], [OLD | {"new": b"abcd"}], id="all is fsynced"),
        pytest.param([CREATE, WRITE, FILE], [OLD, OLD | {"new": b"abcd"}], id="the name is not"),
        pytest.param(
            [CREATE, WRITE, FOLDER], [OLD | {"new": data} for data in (b"", b"ab", b"\0\0\0\0", b"abcd")], id="the bytes are not"
        ),
        pytest.param([MOVE], [OLD, OLD | MOVED, MOVED], id="rename"),
        pytest.param([MOVE, D], [OLD | MOVED, MOVED], id="rename, new folder"),
        pytest.param([MOVE, FOLDER], [{"d": None}, MOVED], id="rename, old folder first"),
        pytest.param([MOVE, D, FOLDER], [MOVED], id="rename, both folders"),
        pytest.param([Event(kind="unlink", path="old", folder=1)], [OLD, {"d": None}], id="unlink"),
        pytest.param(
            [Event(kind="link", path="d/two", inode=2, folder=3), Event(kind="unlink", path="old", folder=1)],
            [OLD, {"d": None}, OLD | {"d/two": b"1234"}, {"d": None, "d/two": b"1234"}],
            id="independent names",
        ),
        pytest.param(
            [Event(kind="rename", path="new", inode=4, folder=1, target="old", target_folder=1)],
            [OLD, {"d": None, "old": b""}],
            id="replaced by a file that was never fsynced",
        ),
        pytest.param([Event(kind="resize", path="old", inode=2, size=2)], [OLD, OLD | {"old": b"12"}], id="truncated"),
    ],
)
def test_what_may_be_left(events: list[Event], expected: list[Tree]):
    found = at_the_end(*events)
    assert len(found) == len(expected)
    for tree in expected:
        assert tree in found


def test_many_changes_are_sampled():
    many = [Event(kind="create", path=f"f{number}", inode=10 + number, folder=1) for number in range(30)]
    found = at_the_end(*many)
    sizes = {len(tree) - len(OLD) for tree in found}
    assert {0, 1, 29, 30} <= sizes
    assert 90 < len(found) < 200
    assert at_the_end(*many) == found, "the same every time"


def test_everything_that_a_program_does_is_recorded(run: Run):
    recording = run("""
import shutil, subprocess, threading
with open("a", "wb", buffering=0) as file:
    file.write(b"12345"); os.pwrite(file.fileno(), b"xy", 1); os.writev(file.fileno(), [b"6", b"7"]); os.fsync(file.fileno())
with open("a", "ab", buffering=0) as file:
    file.write(b"8"); os.ftruncate(file.fileno(), 7)
os.mkdir("d"); os.link("a", "d/b"); os.rename("d/b", "c"); os.rename("c", "a")  # the last does nothing: one file
thread = threading.Thread(target=lambda: shutil.copyfile("a", "copy")); thread.start(); thread.join()
subprocess.run([sys.executable, "-c", "open('child', 'w').write('hi')"], check=True)
descriptor = os.open("d", os.O_RDONLY); os.fsync(descriptor)
os.unlink("copy"); os.rmdir("d")
open("child", "wb").close()
try: os.mkdir("no/where")
except FileNotFoundError: pass
open(os.devnull, "w").write("elsewhere"); os.sync()
""")
    copied = [event.data for event in recording.events if event.kind == "write" and event.path == "copy"]
    assert b"".join(copied) == b"1xy4567"
    assert [what for what in happened(recording) if not what.startswith("write copy")] == [
        "create a", "write a (5 bytes)", "write a (2 bytes)", "write a (2 bytes)", "fsync a",
        "write a (1 bytes)", "resize a", "mkdir d", "link d/b", "rename d/b -> c", "create copy",
        "create child", "write child (2 bytes)", "fsync d", "unlink copy", "rmdir d", "resize child", "sync ",
    ]  # fmt: skip
    assert recording.tree() == {"a": b"1xy4567", "c": b"1xy4567", "child": b""}


def test_what_was_there_before_is_durable(run: Run):
    def before(root: Path) -> None:
        (root / "d").mkdir()
        (root / "d" / "file").write_bytes(b"data")
        (root / "second").hardlink_to(root / "d" / "file")

    recording = run("os.unlink('second')", before)
    kept: Tree = {"d": None, "d/file": b"data"}
    assert trees(recording) == [kept | {"second": b"data"}, kept]


def test_marks_are_promises_at_their_time(run: Run):
    recording = run("""
from tests.power.recorder import mark
mark("before"); os.mkdir("d"); mark("after/../it")
""")
    assert happened(recording) == ["mark before", "mkdir d", "mark after/../it"]
    assert [(replay.marks, replay.tree) for replay in replays(recording)][-2:] == [
        (("before", "after/../it"), {}),
        (("before", "after/../it"), {"d": None}),
    ]


def test_a_mark_without_a_recording_does_nothing():
    mark("nobody listens")


def test_a_replay_can_be_written_and_told(run: Run, tmp_path: Path):
    recording = run("os.mkdir('d'); open('d/file', 'wb').write(b'data')")
    *_, replay = replays(recording)
    replay.write_to(tmp_path / "again")
    assert (tmp_path / "again" / "d" / "file").read_bytes() == b"data"
    assert "kept: write d/file (4 bytes)" in str(replay)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os.symlink('a', 'b')", "only files and folders"),
        ("import mmap; f = open('a', 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9); m[0] = 1", "not system calls"),
        ("os.mkdir('d'); os.rename('d', '../elsewhere')", "outside of"),
        ("sys.exit('no luck')", "status 1:\nno luck"),
    ],
)
def test_what_cannot_be_recorded_is_an_error(run: Run, code: str, why: str):
    with pytest.raises(RecordingError, match=why):
        run(code)


def test_a_command_that_takes_too_long_is_killed(run: Run):
    with pytest.raises(RecordingError, match=r"took longer than 0\.5 s"):
        run("import threading; threading.Event().wait()", timeout_s=0.5)
