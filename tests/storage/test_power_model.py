"""The recorder sees what a program does to a directory, however it does it; the model leaves what may be left, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.power.recorder import Event, Recorder, Recording, Tree, replays


def at_the_end(*events: Event) -> list[Tree]:
    """What a power cut at the end may leave of these events, after a durable file "old" (inode 2) and an empty folder "d" (inode 3)."""
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


def test_what_this_process_and_others_do_is_recorded(tmp_path: Path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d/file").write_bytes(b"data")
    (tmp_path / "second").hardlink_to(tmp_path / "d/file")
    with Recorder(tmp_path) as recorder:
        with (tmp_path / "a").open("wb", buffering=0) as file:
            file.write(b"12345")
            os.fsync(file.fileno())
            file.write(b"6")
            file.truncate(3)
        os.link(tmp_path / "a", tmp_path / "d/b")
        recorder.mark("linked")
        os.unlink(tmp_path / "second")
        os.rename(tmp_path / "d", tmp_path / "e")
        subprocess.run([sys.executable, "-c", f"open({str(tmp_path / 'child')!r}, 'w').write('hi')"], check=True)
    recording = recorder.recording()
    assert [str(event) for event in recording.events[recording.start :]] == [
        "create a", "write a (5 bytes)", "fsync a", "write a (3 bytes)", "resize a", "link d/b", "mark linked", "unlink second",
        "rename d -> e", "create child", "write child (2 bytes)",
    ]  # fmt: skip
    assert recording.tree() == {"a": b"123", "e": None, "e/b": b"123", "e/file": b"data", "child": b"hi"}
    first = next(replays(recording))
    assert (first.marks, first.tree) == ((), {"d": None, "d/file": b"data", "second": b"data"}), "what was there is durable"
    whole = next(one for one in replays(recording) if one.tree == recording.tree())
    whole.write_to(tmp_path / "again")
    assert (tmp_path / "again/e/b").read_bytes() == b"123"
    assert "kept: write child (2 bytes)" in str(whole) and whole.marks == ("linked",)
