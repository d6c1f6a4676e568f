from __future__ import annotations

import fcntl
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystate.arena import HostArena, SlotSet, TrainerArena, arena_path, default_root, processes, slot_set
from raystate.arena.locks import FileLock
from raystate.arena.processes import is_gone, mark_process
from raystate.arena.word import CELL_BYTES
from raystate.core.formats.errors import CapacityError, ConfigError, RaystateError
from raystate.core.formats.messages import Staged
from raystate.core.formats.words import MAX_SLOTS
from tests.arena.sets import NODE, SIZES, Child, OpenHost, remove_gone, stage


def test_names_keep_runs_and_nodes_apart(root: Path):
    assert arena_path(root, "0123456789abcdef", NODE) == root / "raystate-0123456789abcdef-0a1b2c3d4e5f"
    with pytest.raises(RaystateError, match="names"):
        arena_path(root, "../x", NODE)
    assert default_root(str(root)) == root / f"raystate-{os.geteuid()}"
    with pytest.raises(ConfigError, match="arena_dir"):
        default_root(str(root / "missing"))


def test_a_second_opener_is_told_who_has_it(open_host: OpenHost):
    open_host()
    with pytest.raises(RaystateError, match=f"in use by process {os.getpid()}") as caught:
        open_host()
    assert caught.value.pid == os.getpid()
    open_host(node="ffffffffffffff")  # another simulated node on the same file system
    open_host(run="r2")


_HOLDS = """
host = HostArena.open(sys.argv[1], run="r1", storage="/s", node_id=sys.argv[2], cap_bytes=1 << 40, memory_threshold=None)
held = host.allot(trainer="t1", data_bytes=8192, table_bytes=100)
held.host_cell.write(b"grants")
print(held.path, flush=True)
sys.stdin.read()
"""


def test_a_killed_host_frees_its_lock_and_the_next_adopts_everything(root: Path, open_host: OpenHost, child: Child):
    process, said = child(_HOLDS, arena_path(root, "r1", NODE), NODE)
    path = Path(said.decode())
    with pytest.raises(RaystateError, match=f"process {process.pid}"):
        open_host()
    stage(path, "t1", step=5)
    process.kill()
    process.wait()
    host = open_host()
    assert host.adopted and host.notes == ["adopted the arena with 1 slot sets"]
    (held,) = host.sets
    assert held.trainer == "t1" and host.trainer_state(held) == "gone"
    content = held.slots[0].read()
    assert content is not None and content.header.step == 5 and bool((content.data == 5).all())
    assert held.host_cell.read() == (1, b"grants") and held.trainer_cell.read() == (1, b"staged")
    # A new trainer gets the same slots with their contents, and empty words whose numbers go on.
    again = host.allot(trainer="t2", **SIZES)
    assert again is held and held.trainer == "t2"
    assert held.host_cell.read() is None and held.trainer_cell.read() is None
    assert held.host_cell.write(b"new") == 3
    assert len(list(path.glob("trainer.lock.*"))) == 1
    with TrainerArena.attach(held.path, trainer="t2") as trainer:
        content = trainer.slots[0].read()
        assert content is not None and content.header.step == 5


@pytest.mark.parametrize("change", [{"format": 0}, {"storage": "/other"}, {"node_id": "0a1b2c3d4e5fnew"}, {"boot": "earlier"}])
def test_another_format_storage_node_or_boot_starts_anew(host: HostArena, open_host: OpenHost, change: dict[str, object]):
    stage(host.allot(trainer="t1", **SIZES).path, "t1", step=5)
    host.put_layout(b"layout")
    host.close()
    meta = host.path / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_bytes()), **change}))
    anew = open_host()
    assert not anew.adopted and not anew.sets
    assert f"removed the old arena: {next(iter(change))}" in anew.notes[0]
    assert sorted(os.listdir(anew.path)) == ["host.lock", "layouts", "meta.json"] and not os.listdir(anew.path / "layouts")


def test_a_set_that_was_never_finished_is_removed(host: HostArena, open_host: OpenHost):
    host.allot(trainer="t1", **SIZES)
    host.allot(trainer="t2", **SIZES)
    host.close()
    (host.path / "set-1" / "set.json").unlink()
    again = open_host()
    assert [held.index for held in again.sets] == [0] and not (host.path / "set-1").exists()
    assert "set-1, which was never finished" in again.notes[0]


def test_somebody_elses_directory_is_refused(root: Path, open_host: OpenHost):
    path = arena_path(root, "r1", NODE)
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(RaystateError, match="not a private directory"):
        open_host()
    path.rmdir()
    path.symlink_to(root)
    with pytest.raises(RaystateError, match="not a private directory"):
        open_host()


def test_allot_reuses_what_is_free_and_fits(host: HostArena):
    big = host.allot(trainer="big", data_bytes=81920, table_bytes=100)
    small = host.allot(trainer="small", **SIZES)
    assert host.allot(trainer="small", **SIZES) is small  # asked again
    assert host.allot(trainer="third", **SIZES).index == 2  # the others are expected
    for held, rank in ((big, 1), (small, 0)):
        stage(held.path, held.trainer, step=1, rank=rank)
    assert host.allot(trainer="next", rank=1, **SIZES) is big  # has its rank's snapshot
    assert host.allot(trainer="after", rank=1, **SIZES) is small
    assert host.allot(trainer="large", data_bytes=9000, table_bytes=100).index == 3
    assert host.allot(trainer="more", data_bytes=8192, table_bytes=100, slots=4).index == 4


def test_a_trainer_that_grows_keeps_its_old_set_until_it_detaches(host: HostArena):
    small = host.allot(trainer="t1", **SIZES)
    with TrainerArena.attach(small.path, trainer="t1") as old:
        old.slots[0].begin()
        old.slots[0].data_mut[:] = 5
        old.slots[0].commit(Staged(lineage="l", step=5, rank=0, world=1, layout="", promised=True, nbytes=8192), b"table")
        large = host.allot(trainer="t1", data_bytes=81920, table_bytes=100)
        assert large is not small and host.allot(trainer="t1", data_bytes=81920, table_bytes=100) is large
        with TrainerArena.attach(large.path, trainer="t1") as new:
            assert [host.trainer_state(held) for held in host.sets] == ["attached", "attached"]
            new.slots[1].begin()
            # Both are whole, to the trainer, to the host and to a reader, and the words of each are its own.
            for slots in (old.slots, small.slots, SlotSet.open(small.path).slots):
                content = slots[0].read()
                assert content is not None and content.table == b"table" and bool((content.data == 5).all())
            new.trainer_cell.write(b"new")
            assert old.trainer_cell.read() is None and large.trainer_cell.read() == (1, b"new")
            with pytest.raises(RaystateError, match="'t1' is attached"):
                host.remove_set(small)
            assert remove_gone(host) == []
            view = small.slots[0].read()
            assert old.close()
            assert [host.trainer_state(held) for held in host.sets] == ["gone", "attached"]
            host.remove_set(small)
            assert host.sets == [large] and not small.path.exists()
            assert view is not None and bool((view.data == 5).all())  # who still reads it, can
            new.slots[1].data_mut[:] = 6


def test_a_trainer_may_grow_in_any_of_the_sizes_and_a_free_set_that_fits_is_taken(host: HostArena):
    first = host.allot(trainer="t1", **SIZES)
    free = host.allot(trainer="other", data_bytes=81920, table_bytes=40960)
    stage(free.path, "other", step=1)
    with TrainerArena.attach(first.path, trainer="t1"):
        assert host.allot(trainer="t1", data_bytes=8192, table_bytes=9000) is free
        assert first.trainer == free.trainer == "t1"
        with TrainerArena.attach(free.path, trainer="t1"):
            assert host.allot(trainer="t1", buffer_bytes=4096, **SIZES).index == 2
            assert host.allot(trainer="t1", slots=5, **SIZES).index == 3


def test_growth_that_does_not_fit_changes_nothing(root: Path, open_host: OpenHost):
    slot_bytes, cells = 4096 + 4096 + 8192, 2 * CELL_BYTES
    large: dict[str, Any] = {"data_bytes": 8192 * 4, "table_bytes": 100}
    both = (3 * slot_bytes + cells) + (3 * (4096 + 4096 + 8192 * 4) + cells) + 4 * 4096  # and the small files
    host = open_host(cap_bytes=both - 5 * 4096)
    small = host.allot(trainer="t1", **SIZES)
    with TrainerArena.attach(small.path, trainer="t1") as old:
        before = sorted(root.rglob("*"))
        with pytest.raises(CapacityError) as caught:
            host.allot(trainer="t1", **large)
        assert (caught.value.limit, caught.value.slots, caught.value.slot_bytes) == ("host_memory", 3, 4096 + 4096 + 8192 * 4)
        assert caught.value.needed_bytes > caught.value.available_bytes > 0
        assert caught.value.used_bytes >= 3 * slot_bytes + cells
        assert sorted(root.rglob("*")) == before and host.sets == [small] and host.trainer_state(small) == "attached"
        old.slots[0].begin()
        host.cap_bytes = both
        assert host.allot(trainer="t1", **large).index == 1


def test_a_set_that_its_trainer_never_came_for_does_not_stay_with_it_when_it_asks_for_more(host: HostArena):
    small = host.allot(trainer="t1", pid=os.getpid(), **SIZES)
    assert host.trainer_state(small) == "expected"
    host.allot(trainer="t1", pid=os.getpid(), data_bytes=81920, table_bytes=100)
    assert host.trainer_state(small) == "gone" and remove_gone(host) == [0]


def test_slots_that_a_living_trainer_has_replaced_go_to_others_only_by_request(open_host: OpenHost):
    """They may hold a step that all ranks have to stage before it is dispensable: who gets them would wait for itself."""
    host = open_host()
    small = host.allot(trainer="t1", **SIZES)
    old = TrainerArena.attach(small.path, trainer="t1")
    with TrainerArena.attach(host.allot(trainer="t1", data_bytes=81920, table_bytes=100).path, trainer="t1"):
        old.close()
        assert host.trainer_state(small) == "gone"
        other = host.allot(trainer="t2", **SIZES)
        assert other is not small and host.sets[-1] is other
        assert host.allot(trainer="t3", replaced=True, **SIZES) is small


def test_slots_that_a_trainer_had_replaced_before_it_died_are_handed_on(host: HostArena):
    small = host.allot(trainer="t1", **SIZES)
    old = TrainerArena.attach(small.path, trainer="t1")
    TrainerArena.attach(host.allot(trainer="t1", data_bytes=81920, table_bytes=100).path, trainer="t1").close()
    old.close()
    assert host.allot(trainer="t2", **SIZES) is small


@pytest.mark.parametrize("slots", [0, -1, MAX_SLOTS + 1])
def test_a_number_of_slots_that_no_word_could_tell_of_is_refused(host: HostArena, slots: int):
    with pytest.raises(ConfigError, match="snapshot_slots") as caught:
        host.allot(trainer="t1", slots=slots, **SIZES)
    assert caught.value.field == "snapshot_slots" and not host.sets


def test_a_zombies_set_is_neither_handed_out_nor_removed(host: HostArena, open_host: OpenHost):
    held = host.allot(trainer="zombie", **SIZES)
    with TrainerArena.attach(held.path, trainer="zombie"):
        host.close()
        host = open_host()
        assert host.allot(trainer="new", **SIZES).index == 1
        assert not host.release(host.sets[0])
        assert remove_gone(host) == []
        with pytest.raises(RaystateError, match="'zombie' is attached"):
            host.remove_set(host.sets[0])
    assert remove_gone(host) == [0]


def test_a_trainer_that_comes_late_finds_its_set_taken(host: HostArena):
    held = host.allot(trainer="late", **SIZES)
    assert host.release(held)
    with pytest.raises(RaystateError, match="belongs to no trainer, not to 'late'"):
        TrainerArena.attach(held.path, trainer="late")
    assert host.allot(trainer="new", **SIZES) is held
    with pytest.raises(RaystateError, match="belongs to trainer 'new', not to 'late'"):
        TrainerArena.attach(held.path, trainer="late")
    twice = pytest.raises(RaystateError, match=f"process {os.getpid()} has attached as trainer 'new'")
    with TrainerArena.attach(held.path, trainer="new"), twice:
        TrainerArena.attach(held.path, trainer="new")
    host.remove_set(held)
    with pytest.raises(RaystateError, match="does not exist"):
        TrainerArena.attach(held.path, trainer="new")


def test_a_trainer_that_died_before_it_came_does_not_keep_its_set(host: HostArena, child: Child):
    process, _ = child("print('here', flush=True); sys.stdin.read()")
    held = host.allot(trainer="t1", pid=process.pid, **SIZES)
    assert host.trainer_state(held) == "expected"
    process.kill()
    process.wait()
    assert host.trainer_state(held) == "gone"
    assert host.allot(trainer="t2", **SIZES) is held


_LETS_GO_OF_ITS_LOCK = """
import threading, ctypes
arena = TrainerArena.attach(sys.argv[1], trainer="t1")
arena.slots[0].begin(); arena.slots[0].data_mut[:] = 1
arena.slots[0].commit(Staged(lineage="l", step=1, rank=0, world=1, layout="", promised=False, nbytes=8192), b"table")
arena.slots[1].begin()
os.close(arena._lock._fd)  # as the kernel does for a killed process, before it has let go of its devices
arena._lock._fd = -1
if sys.argv[2] == "zombie":
    threading.Thread(target=sys.stdin.read).start()
    print("here", flush=True)
    ctypes.CDLL(None).pthread_exit(None)
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["running", "zombie"])
def test_a_set_is_handed_on_once_its_trainers_process_has_ended(
    host: HostArena, child: Child, monkeypatch: pytest.MonkeyPatch, how: str
):
    """A device's transfer may outlive the lock. What lies complete in it is read before."""
    held = host.allot(trainer="t1", **SIZES)
    process, _ = child(_LETS_GO_OF_ITS_LOCK, held.path, how)
    assert host.trainer_state(held) == "ending" and not host.trainer_alive(held)
    content = held.slots[0].read()
    assert content is not None and content.table == b"table" and held.slots[1].read() is None
    assert remove_gone(host) == []
    with monkeypatch.context() as patch:
        patch.setattr(slot_set, "GOODBYE_S", 0.05)
        assert host.allot(trainer="t2", **SIZES).index == 1
    host.remove_set(host.sets[1])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(host.allot, trainer="t3", **SIZES)
        process.kill()
        process.wait()
        assert asked.result(60) is held
    assert held.trainer == "t3"


def test_a_set_that_was_let_go_of_on_purpose_is_handed_on_at_once(host: HostArena):
    """Its process goes on."""
    held = host.allot(trainer="t1", **SIZES)
    TrainerArena.attach(held.path, trainer="t1").close()
    assert host.trainer_state(held) == "gone"
    assert host.allot(trainer="t2", **SIZES) is held


def test_where_no_one_can_know_whether_a_process_has_ended_the_lock_says_it(host: HostArena, monkeypatch: pytest.MonkeyPatch):
    """The trainer of another container: its number may be anyone's here."""
    held = host.allot(trainer="t1", **SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(processes, "_namespace", lambda: "pid:[another]")
        arena = TrainerArena.attach(held.path, trainer="t1")
    arena._lock.release()
    assert host.trainer_state(held) == "gone"


def test_a_forked_child_does_not_keep_its_parents_lock(host: HostArena, held: SlotSet):
    trainer = TrainerArena.attach(held.path, trainer="t1")
    wait, go = os.pipe()
    ready, say = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(go)
        os.write(say, b"x")
        os.read(wait, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        assert host.trainer_state(held) == "attached"
        trainer.close()
        assert host.trainer_state(held) == "gone"
    finally:
        for fd in (go, wait, ready, say):
            os.close(fd)
        os.waitpid(pid, 0)


def test_close_with_remove_leaves_nothing(root: Path, host: HostArena, open_host: OpenHost, held: SlotSet):
    stage(held.path, "t1", step=1)
    view = held.slots[0].read()
    host.close(remove=True)
    assert not os.listdir(root)
    assert view is not None and bool((view.data == 1).all())
    assert not open_host().adopted


def test_a_failed_reservation_leaves_nothing(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch):
    from raystate.arena import slot_set as module

    host = open_host()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "fill_slot_file", full)
    with pytest.raises(RaystateError, match="ran out of space"):
        host.allot(trainer="t1", **SIZES)
    assert not host.sets and not (host.path / "set-0").exists()


def test_promises_are_made_one_host_at_a_time(root: Path, open_host: OpenHost, monkeypatch: pytest.MonkeyPatch):
    from raystate.arena import capacity

    monkeypatch.setattr(capacity, "ARENA_LOCK_S", 0.0)
    host = open_host()
    other = FileLock.take(root, shared=False, directory=True)
    assert other is not None
    with other, pytest.raises(RaystateError, match="was locked by another process"):
        host.allot(trainer="t1", **SIZES)
    assert host.allot(trainer="t1", **SIZES).index == 0


def test_opening_survives_a_sweep_that_takes_the_directory_away(open_host: OpenHost, monkeypatch: pytest.MonkeyPatch):
    take, calls = FileLock.take, []

    def swept(path: Path, **options: bool):
        calls.append(path)
        if len(calls) == 1:
            path.parent.rmdir()
        return take(path, **options)

    monkeypatch.setattr(FileLock, "take", swept)
    assert open_host().path.is_dir() and len(calls) >= 2


def test_a_lock_on_a_file_that_was_replaced_is_taken_anew(root: Path, monkeypatch: pytest.MonkeyPatch):
    path, flock, calls = root / "lock", fcntl.flock, []
    path.touch()

    def slow(fd: int, how: int) -> None:
        flock(fd, how)
        calls.append(fd)
        if len(calls) == 1:
            path.unlink()
            path.touch()

    monkeypatch.setattr(fcntl, "flock", slow)
    lock = FileLock.take(path, shared=False)
    assert lock is not None and len(calls) == 2
    assert FileLock.take(path, shared=True) is None
    lock.release()


def test_a_process_that_nobody_waited_for_is_gone_and_a_reused_number_is_another(child: Child):
    process, _ = child("print('here', flush=True); sys.stdin.read()")
    mark = mark_process(process.pid)
    assert not is_gone(mark)
    assert is_gone(replace(mark, start_ticks=mark.start_ticks - 1)) and is_gone(replace(mark, boot="earlier"))
    assert not is_gone(replace(mark, namespace="pid:[1]", start_ticks=1))  # cannot be known from here
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(mark)
