from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raystate.arena import HostArena, NodeMemory, capacity, format_bytes, node_memory, parse_memory
from raystate.arena.capacity import Need, check_capacity
from raystate.arena.word import CELL_BYTES
from raystate.core.formats.errors import CapacityError, ConfigError
from tests.arena.sets import remove_gone

GIB = 1024**3
MIB = 1024**2
ROOMY = NodeMemory(total_bytes=100 * GIB, used_bytes=0, source="machine")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("40%", 40_000),
        ("0.5%", 500),
        (123, 123),
        ("2GiB", 2 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("512Mi", 512 * MIB),
        ("7", 7),
        ("1t", 1024 * GIB),
    ],
)
def test_parse_memory(value: str | int, expected: int):
    assert parse_memory(value, total_bytes=100_000) == expected


@pytest.mark.parametrize("value", ["", "101%", "-1", "0", 0, -5, "2 GiBi", "half", 1.5, True, None])
def test_parse_memory_names_the_field(value: object):
    with pytest.raises(ConfigError, match="host_memory: expected bytes") as caught:
        parse_memory(value)  # pyright: ignore[reportArgumentType]
    assert caught.value.field == "host_memory"


def test_percent_is_of_this_nodes_memory():
    assert parse_memory("50%") == node_memory().total_bytes // 2


def test_format_bytes():
    assert [format_bytes(size) for size in (5, 1536, 3 * GIB, 5000 * GIB)] == ["5 B", "1.5 KiB", "3.0 GiB", "4.9 TiB"]


def _files(base: Path, **files: str) -> None:
    for name, text in files.items():
        path = base / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _machine(proc: Path, groups: str) -> None:
    _files(
        proc, meminfo=f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB\n", self__cgroup=groups
    )


def test_cgroup_v2_counts_the_tightest_of_all_levels_and_no_droppable_cache(tmp_path: Path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    _machine(proc, "0::/pod/container\n")
    assert node_memory(proc, cgroup) == NodeMemory(total_bytes=16 * GIB, used_bytes=4 * GIB, source="machine")
    for level, limit, now in (("pod", 4 * GIB, 3 * GIB), ("pod/container", "max", 2 * GIB)):
        _files(
            cgroup / level,
            **{"memory.max": f"{limit}\n", "memory.current": f"{now}\n", "memory.stat": f"anon 1\ninactive_file {GIB}\n"},
        )
    assert node_memory(proc, cgroup) == NodeMemory(total_bytes=4 * GIB, used_bytes=2 * GIB, source=str(cgroup / "pod"))


def test_cgroup_v1_and_a_container_that_sees_only_its_root(tmp_path: Path):
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    _machine(proc, "3:cpu:/x\n4:memory:/docker/123\n0::/\n")
    _files(cgroup / "memory", **{"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"})
    assert node_memory(proc, cgroup).source == "machine"
    _files(cgroup / "memory", **{"memory.limit_in_bytes": str(17 * GIB), "memory.usage_in_bytes": str(15 * GIB)})
    assert node_memory(proc, cgroup).source == "machine"
    _files(cgroup / "memory", **{"memory.usage_in_bytes": "5"})
    _files(cgroup / "memory", **{"memory.limit_in_bytes": str(2 * GIB), "memory.stat": "total_inactive_file 5"})
    assert node_memory(proc, cgroup) == NodeMemory(total_bytes=2 * GIB, used_bytes=0, source=str(cgroup / "memory"))


def test_a_cap_below_what_is_taken_says_so(open_host: Callable[..., HostArena]):
    """It said "allows 1.0 MiB, of which 19.7 MiB are in use"."""
    one = open_host(run="r1", cap_bytes=64 * MIB)
    one.allot(trainer="t1", data_bytes=4 * MIB, table_bytes=4096, slots=3)
    with pytest.raises(CapacityError, match=r"host_memory allows 1\.0 MiB, and the arenas of this node have 12\.\d MiB already\."):
        open_host(run="r2", cap_bytes=MIB).allot(trainer="t1", data_bytes=MIB, table_bytes=4096)


def test_the_cap_counts_all_runs_of_the_node(open_host: Callable[..., HostArena]):
    sizes: dict[str, Any] = {"data_bytes": MIB, "table_bytes": 4096}
    slot = MIB + 8192
    cap = 7 * slot
    one, two = open_host(run="r1", cap_bytes=cap), open_host(run="r2", cap_bytes=cap)
    one.allot(trainer="t1", **sizes)
    with pytest.raises(CapacityError) as caught:
        two.allot(trainer="t1", **sizes, slots=5)
    error = caught.value
    assert (error.limit, error.slots, error.slot_bytes, error.cap_bytes) == ("host_memory", 5, slot, cap)
    assert error.needed_bytes == 5 * slot + 2 * CELL_BYTES and error.slots_that_fit == 3
    used = sum(path.stat().st_blocks * 512 for path in one.path.rglob("*") if path.is_file())
    assert error.used_bytes == pytest.approx(used, abs=8192) and error.available_bytes == cap - error.used_bytes
    assert "5.2 MiB of host memory (5 slots of 1.0 MiB)" in str(error)
    assert 'host_memory="1%"' in str(error) and "or 3 snapshot slots instead of 5" in str(error)
    assert not two.sets and not (two.path / "set-0").exists()
    remove_gone(one)  # t1 may still come
    assert len(one.sets) == 1
    one.release(one.sets[0])
    remove_gone(one)
    two.allot(trainer="t1", **sizes, slots=5)


def _mount(monkeypatch: pytest.MonkeyPatch, size: int, free: int) -> None:
    found = SimpleNamespace(f_frsize=4096, f_blocks=size // 4096, f_bavail=free // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) == "/dev/shm")


def test_a_small_mount_is_named_with_the_volume_that_would_do(monkeypatch: pytest.MonkeyPatch):
    _mount(monkeypatch, 64 * MIB, 60 * MIB)
    monkeypatch.setattr(capacity, "all_arenas", lambda _: [])  # others may be reserving there just now
    with pytest.raises(CapacityError) as caught:
        check_capacity(Path("/dev/shm"), Need(slot_bytes=GIB, slots=3), cap_bytes=10 * GIB, node=ROOMY)
    error, text = caught.value, str(caught.value)
    assert error.limit == "mount" and error.available_bytes == 60 * MIB and error.needed_bytes == 3 * GIB
    assert "the file system at /dev/shm (64.0 MiB) has no more" in text
    assert "mountPath: /dev/shm" in text and "emptyDir: {medium: Memory, sizeLimit: 4Gi}" in text and "--shm-size=4g" in text


def test_rays_memory_threshold_counts(root: Path, monkeypatch: pytest.MonkeyPatch):
    _mount(monkeypatch, 64 * GIB, 64 * GIB)
    need, node = Need(slot_bytes=GIB, slots=2), NodeMemory(total_bytes=10 * GIB, used_bytes=8 * GIB, source="/sys/fs/cgroup/x")
    check_capacity(root, need, cap_bytes=10 * GIB, memory_threshold=None, node=node)
    with pytest.raises(CapacityError) as caught:
        check_capacity(root, need, cap_bytes=10 * GIB, memory_threshold=0.95, node=node)
    assert caught.value.limit == "memory" and caught.value.available_bytes == int(9.5 * GIB) - 8 * GIB
    assert "the control group /sys/fs/cgroup/x has 10.0 GiB of memory with 8.0 GiB in use, and above 95%" in str(caught.value)
    assert "a memory limit 512.0 MiB larger, or 1 snapshot slot instead of 2" in str(caught.value)


def test_what_others_were_promised_is_not_free(root: Path, monkeypatch: pytest.MonkeyPatch):
    other = root / "raystate-x-y"
    other.mkdir()
    with (other / "slot-0").open("wb") as file:
        file.truncate(3 * GIB)  # sized, not reserved yet
    _mount(monkeypatch, 64 * GIB, 4 * GIB)
    with pytest.raises(CapacityError) as caught:
        check_capacity(root, Need(slot_bytes=GIB, slots=2), cap_bytes=64 * GIB, node=ROOMY)
    assert caught.value.limit == "mount" and caught.value.available_bytes == GIB
