"""The folder of one's own in which a user's arenas lie: what others do beside it stops nobody, and what lies beside it is left alone."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from raystate.arena import HostArena, arena_path, default_root, sweep
from raystate.core.formats.errors import ConfigError
from tests.arena.sets import NODE

OWN = f"raystate-{os.geteuid()}"


def opened(arena_dir: Path, run: str = "r1") -> HostArena:
    path = arena_path(default_root(str(arena_dir)), run, NODE)
    return HostArena.open(path, run=run, storage="/s", node_id=NODE, cap_bytes=1 << 40, memory_threshold=None)


@pytest.mark.timeout(20)
def test_whoever_locks_the_shared_directory_stops_no_start(root: Path):
    stranger = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(stranger, fcntl.LOCK_SH)
        with opened(root) as arena:
            arena.allot(trainer="t1", data_bytes=8192, table_bytes=100)
    finally:
        os.close(stranger)


def test_the_folder_is_closed_to_others_and_goes_with_the_last_arena(root: Path):
    first, second = opened(root), opened(root, "r2")
    assert stat.S_IMODE(os.stat(root / OWN).st_mode) == 0o700
    first.close(remove=True)
    assert os.listdir(root) == [OWN]
    second.close()
    assert sweep(root / OWN, dead_nodes=[NODE])
    assert os.listdir(root) == []


def test_a_name_that_somebody_else_has_taken_is_left_to_them(root: Path):
    (theirs := root / "theirs").mkdir(mode=0o700)
    (root / OWN).symlink_to(theirs)
    (root / f"{OWN}.1").mkdir(mode=0o777)
    (root / f"{OWN}.1").chmod(0o777)
    (root / f"{OWN}.2").touch()
    opened(root).close()
    assert os.listdir(theirs) == os.listdir(root / f"{OWN}.1") == []
    (root / OWN).unlink()
    with opened(root) as again:
        assert again.adopted and again.path.parent.name == f"{OWN}.3", "what memory holds is found again"


def test_a_folder_that_another_run_makes_meanwhile_is_this_users(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that took the next name for it would wait at a door that its HostActor never opens."""
    looked, lstat = set[str](), os.lstat

    def look_before_it_is_made(path: Any) -> os.stat_result:
        if str(path) == str(root / OWN) and not looked:
            looked.add(OWN)
            (root / OWN).mkdir(mode=0o700)
            raise FileNotFoundError
        return lstat(path)

    monkeypatch.setattr(os, "lstat", look_before_it_is_made)
    assert default_root(str(root)) == root / OWN
    assert looked


def test_all_names_taken_is_an_error_that_names_the_way_out(root: Path):
    for number in range(100):
        (root / (f"{OWN}.{number}" if number else OWN)).touch()
    with pytest.raises(ConfigError, match="set another arena_dir"):
        default_root(str(root))


def test_an_empty_folder_of_the_users_with_such_a_name_stays(root: Path):
    """It is another run's arena_dir, before its first start."""
    (root / "raystate-mine").mkdir(mode=0o700)
    with opened(root) as arena:
        assert sweep(arena.path.parent) == []
    assert (root / "raystate-mine").is_dir()
