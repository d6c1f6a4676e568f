"""A node's compiled programs: complete or absent, whatever happens to the files."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raystate.compilation import ProgramStore, node_folder
from raystate.compilation import store as store_module
from raystate.waits import ABANDONED_S
from tests.processes import run_python

REPO = Path(__file__).parents[2]
KEY = "jit_step-" + "a" * 64


def _store(folder: Path, cap_bytes: int = 1 << 20) -> ProgramStore:
    return ProgramStore(folder, cap_bytes)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir())


def test_what_is_put_is_found_by_any_process(tmp_path: Path):
    assert _store(tmp_path).get(KEY) is None
    assert _store(tmp_path).put(KEY, b"program")
    assert _store(tmp_path).get(KEY) == b"program"
    assert _store(tmp_path).get(KEY + "b") is None
    long = "jit_" + "x" * 400  # a function may have any name, a file may not
    assert _store(tmp_path).put(long, b"other") and _store(tmp_path).get(long) == b"other"


@pytest.mark.parametrize(
    ("kept", "flipped"), [(None, 0), (None, 5), (None, 25), (None, -1), (0, None), (7, None), (30, None), (60, None)]
)
def test_a_damaged_file_is_no_program_and_is_replaced(tmp_path: Path, kept: int | None, flipped: int | None):
    """Only so many bytes are left, or a bit of one byte is another."""
    store = _store(tmp_path)
    store.put(KEY, b"program" * 10)
    (path,) = _files(tmp_path)
    data = bytearray(path.read_bytes()[:kept])
    if flipped is not None:
        data[flipped] ^= 1
    path.write_bytes(data)
    assert store.get(KEY) is None
    assert not path.exists()
    assert store.put(KEY, b"program") and store.get(KEY) == b"program"


def test_the_program_of_another_key_is_not_taken(tmp_path: Path):
    store = _store(tmp_path)
    store.put(KEY, b"program")
    (path,) = _files(tmp_path)
    store.put("other", b"other")
    other = next(one for one in _files(tmp_path) if one != path)
    other.replace(path)
    assert store.get(KEY) is None


def test_a_program_that_was_of_no_use_is_replaced(tmp_path: Path):
    store = _store(tmp_path)
    store.put(KEY, b"of another time")
    store.put(KEY, b"compiled at the same time as the first")
    assert store.get(KEY) == b"of another time"
    store.put(KEY, b"compiled because JAX could not load that one")
    assert _store(tmp_path).get(KEY) == b"compiled because JAX could not load that one"


def test_many_writers_of_one_key_leave_one_whole_file(tmp_path: Path):
    value = os.urandom(1 << 18)
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: (_store(tmp_path, 1 << 30).put(KEY, value), _store(tmp_path).get(KEY)), range(64)))
    assert all(kept and read == value for kept, read in found)
    assert len(_files(tmp_path)) == 1


def test_the_least_recently_used_goes_first(tmp_path: Path):
    store = _store(tmp_path, cap_bytes=3000)
    for number, key in enumerate(("a", "b", "c")):
        store.put(key, bytes(1000))
        path = max(_files(tmp_path), key=lambda one: one.stat().st_ctime_ns)
        os.utime(path, (number, number))
    assert store.get("a") is not None  # used just now
    store.trim()  # three headers are too much
    assert [store.get(key) is not None for key in ("a", "b", "c")] == [True, False, True]


def test_the_folder_stays_near_its_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(store_module, "LOOK_EVERY_FILES", 4)
    store = _store(tmp_path, cap_bytes=10_000)
    for number in range(100):
        store.put(str(number), bytes(1000))
    assert sum(path.stat().st_size for path in _files(tmp_path)) <= 10_000 + 6 * 1100


def test_what_xla_keeps_there_counts_and_goes(tmp_path: Path):
    """As it does on GPUs, in a folder below this one: what it has tuned."""
    store = _store(tmp_path, cap_bytes=2500)
    tuned = tmp_path / "xla_gpu_per_fusion_autotune_cache_dir"
    tuned.mkdir()
    for number in range(2):
        (tuned / f"{number}.textproto").write_bytes(bytes(1000))
        os.utime(tuned / f"{number}.textproto", (number, number))
    store.put(KEY, bytes(1000))
    store.trim()
    assert store.get(KEY) is not None
    assert [path.name for path in tuned.iterdir()] == ["1.textproto"]


def test_what_a_killed_writer_left_goes(tmp_path: Path):
    left, young = tmp_path / ".0123", tmp_path / ".4567"
    for path in (left, young):
        path.write_bytes(b"half")
    os.utime(left, (1, os.stat(left).st_mtime - 2 * ABANDONED_S))
    _store(tmp_path).trim()
    assert _files(tmp_path) == [young]


def test_a_folder_that_goes_while_it_is_looked_through_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """XLA's own folders on GPUs; or all of Ray's session."""
    opened = os.open
    (tmp_path / "autotuned").mkdir()
    _store(tmp_path).put(KEY, bytes(1000))

    def open_after(path: str, *given: Any, **named: Any) -> int:
        if path == "autotuned":
            os.rmdir(tmp_path / "autotuned")  # by another process, since its parent was listed
        return opened(path, *given, **named)

    monkeypatch.setattr(os, "open", open_after)
    _store(tmp_path, cap_bytes=10).trim()
    monkeypatch.undo()
    assert _files(tmp_path) == []


FULL = """
import resource, signal, sys
from pathlib import Path
from raystate.compilation import ProgramStore
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # then a write beyond the limit is an error, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
store = ProgramStore(Path(sys.argv[1]), 1 << 20)
print(store.put("large", bytes(5000)), store.put("small", bytes(500)), store.get("large"), len(store.get("small")))
"""


def test_a_disk_that_takes_no_more_costs_only_the_program(tmp_path: Path):
    done = run_python("-c", FULL, tmp_path, env={**os.environ, "PYTHONPATH": str(REPO)})
    assert done.stdout.split() == ["False", "True", "None", "500"]
    assert "compiled programs are not kept" in done.stderr
    assert len(_files(tmp_path)) == 1  # nothing half written


def test_a_folder_that_is_gone_costs_only_the_program(tmp_path: Path):
    store = _store(tmp_path / "gone")
    assert not store.put(KEY, b"program")
    assert store.get(KEY) is None


def test_only_this_users_own_folder_is_trusted(tmp_path: Path):
    folder = node_folder(tmp_path)
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    assert node_folder(tmp_path) == folder  # the next process
    folder.chmod(0o770)
    assert node_folder(tmp_path) is None
    folder.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    assert node_folder(tmp_path) is None
    assert node_folder(tmp_path / "absent") is None
