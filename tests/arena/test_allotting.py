"""A host gives a trainer its slots while it goes on to look, to report, to hear orders, and perhaps to end."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raystate.arena import HostArena, TrainerArena, slot_set
from raystate.arena import host as arena_host
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.host_messages import Remember, RemoveSet
from raystate.core.formats.messages import Advice, Event, HostId, HostReported, Staged, TrainerWord
from raystate.core.formats.orders import Invalidate
from raystate.core.formats.words import trainer_word_to_json
from raystate.observe.progress import Progress
from raystate.runtime.host import slot_store
from raystate.runtime.host.doorbell import Hello
from tests.arena.sets import open_loop
from tests.patience import PATIENCE_S

REQUEST: dict[str, Any] = {
    "rank": 0, "pid": os.getpid(), "data_bytes": 5000, "table_bytes": 100, "buffer_bytes": 0, "slots": 3,
}  # fmt: skip
LINEAGE = "1.2.x"


def _advice(seq: int) -> Advice:
    return Advice(attempt=1, seq=seq, lineage=LINEAGE, decided=True)


_new_lock = threading.RLock


class Guard:
    """An RLock that tells when somebody has to wait for it."""

    def __init__(self) -> None:
        self._lock = _new_lock()
        self.waited = threading.Event()

    def acquire(self, blocking: bool = True) -> bool:
        if self._lock.acquire(blocking=False):
            return True
        self.waited.set()
        return blocking and self._lock.acquire(timeout=PATIENCE_S)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        assert self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Node:
    """A host's loop, which turns when the test says so."""

    def __init__(self, root: Path):
        self.now_s = 0.0
        self.told: list[Event | Progress] = []
        self.loop = open_loop(root, tell=self.told.append, clock=lambda: self.now_s)
        self.arena = self.loop.arena

    def check_free(self) -> None:
        """Nobody else holds the lock."""
        assert self.arena.guard.acquire(blocking=False), "nothing is locked while a trainer gets its slots"
        self.arena.guard.release()

    def elsewhere(self, call: Callable[[], object]) -> None:
        """On another thread, until it has returned."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call).result(timeout=PATIENCE_S)


@pytest.fixture
def node(root: Path) -> Iterator[Node]:
    one = Node(root)
    yield one
    one.loop.close(remove_arena=True)
    assert sorted(os.listdir(root)) in ([], ["run"])


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Calls a function once, on the thread that reserves the first slot's memory."""

    def at(call: Callable[[], object]) -> None:
        fill, turn, waiting = slot_set.fill_slot_file, threading.Lock(), [call]

        def filled(fd: int) -> None:
            with turn:
                if waiting:
                    waiting.pop()()
            fill(fd)

        monkeypatch.setattr(slot_set, "fill_slot_file", filled)

    return at


def test_it_goes_on_to_report(node: Node, filling: Callable[..., None]):
    """Each GiB takes half a second, and a host that says nothing for ten seconds is told to be down."""

    def look() -> None:
        node.check_free()
        node.now_s += 5.0
        node.loop.turn()

    filling(look)
    before = len([event for event in node.told if isinstance(event, HostReported)])
    path, index = node.loop.allot(incarnation="t", **REQUEST)
    assert len([event for event in node.told if isinstance(event, HostReported)]) > before
    assert node.loop.allot(incarnation="t", **REQUEST) == (path, index), "asked again, it is the same"
    TrainerArena.attach(Path(path), trainer="t").close()


@pytest.mark.parametrize("remove", [True, False])
def test_it_ends_meanwhile(root: Path, node: Node, filling: Callable[..., None], remove: bool):
    filling(lambda: (node.check_free(), node.loop.close(remove_arena=remove)))
    with pytest.raises(RaystateError, match="was closed: its run ends"):
        node.loop.allot(incarnation="t", **REQUEST)
    with pytest.raises(RaystateError, match="was closed: its run ends"):
        node.loop.allot(incarnation="t", **REQUEST)
    assert (root / "raystate-0-h").exists() is not remove
    if not remove:
        again = Node(root)
        assert again.arena.sets == [], "the next one finds what was not finished"
        again.loop.close(remove_arena=True)


def test_it_ends_while_the_set_is_finished(root: Path, filling: Callable[..., None], monkeypatch: pytest.MonkeyPatch):
    """What is put beside the slots at last must not come into a directory that is being removed."""
    with monkeypatch.context() as patch:
        patch.setattr(arena_host.threading, "RLock", Guard)
        arena = HostArena.open(root / "raystate-0-h", run="r", storage="s", node_id="h", cap_bytes=1 << 40, memory_threshold=None)
    guard: Any = arena.guard
    reserved, go_on = threading.Event(), threading.Event()
    filling(lambda: (reserved.set(), go_on.wait(PATIENCE_S)))
    rmdir = Path.rmdir

    def late(path: Path) -> None:
        if path.name == "set-0" and not go_on.is_set():
            guard.waited.clear()
            go_on.set()
            assert guard.waited.wait(PATIENCE_S)
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", late)

    def allot() -> None:
        try:
            arena.allot(trainer="t", data_bytes=5000, table_bytes=100)
        finally:
            guard.waited.set()

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(allot)
        assert reserved.wait(PATIENCE_S)
        arena.close(remove=True)
        with pytest.raises(RaystateError, match="was closed: its run ends"):
            asked.result(timeout=PATIENCE_S)
    assert os.listdir(root) == []


def test_nobody_speaks_to_the_one_before_in_a_set_that_is_handed_on(node: Node, monkeypatch: pytest.MonkeyPatch):
    """What the dead trainer was granted is not the new one's: it would overwrite what it is to restore."""
    path, index = node.loop.allot(incarnation="old", **REQUEST)
    old = TrainerArena.attach(Path(path), trainer="old")
    node.loop.meet(1, os.getpid(), Hello(incarnation="old", rank=0, world=1, lineage=LINEAGE, set_index=index))
    old.trainer_cell.write(trainer_word_to_json(TrainerWord(lineage=LINEAGE, rank=0, world=1, newest_step=-1)))
    node.loop.turn()
    node.loop.order(_advice(1))
    assert old.host_cell.read() is not None, "it was granted slots"
    old.close()  # it is dead; the host hears of it later
    allot = node.arena.allot

    def then_advice(**request: Any) -> Any:
        held = allot(**request)
        node.elsewhere(lambda: (node.check_free(), node.loop.order(_advice(2))))
        return held

    monkeypatch.setattr(node.arena, "allot", then_advice)
    assert node.loop.allot(incarnation="new", **REQUEST) == (path, index), "handed on"
    new = TrainerArena.attach(Path(path), trainer="new")
    assert new.host_cell.read() is None
    one = node.loop._machine._slot_sets.sets[index]
    assert (one.trainer, one.said, [slot.granted for slot in one.slots]) == ("new", None, [0, 0, 0])
    new.close()


def test_a_set_that_was_to_go_and_is_handed_on_stays(node: Node):
    path, index = node.loop.allot(incarnation="old", **REQUEST)
    old = TrainerArena.attach(Path(path), trainer="old")
    node.loop._carry_out(RemoveSet(index=index, trainer="old", reason="it has larger slots"))
    assert Path(path).exists(), "its trainer has it still"
    old.close()
    assert node.loop.allot(incarnation="new", **REQUEST) == (path, index)
    node.loop.turn()
    TrainerArena.attach(Path(path), trainer="new").close()


def test_a_set_that_was_to_go_goes(node: Node):
    path, index = node.loop.allot(incarnation="old", **REQUEST)
    old = TrainerArena.attach(Path(path), trainer="old")
    node.loop._carry_out(RemoveSet(index=index, trainer="old", reason="it has larger slots"))
    old.close()
    node.loop.turn()
    assert not Path(path).exists() and node.arena.sets == []


def test_replaced_slots_are_handed_on_where_there_is_no_room_for_others(node: Node):
    """A save then waits until they are free, rather than failing."""
    path, index = node.loop.allot(incarnation="one", **REQUEST)
    old = TrainerArena.attach(Path(path), trainer="one")
    node.loop.meet(1, os.getpid(), Hello(incarnation="one", rank=0, world=2, lineage=LINEAGE, set_index=index))
    old.slots[0].begin()
    old.slots[0].commit(Staged(lineage=LINEAGE, step=1, rank=0, world=2, layout="l", promised=True, nbytes=5000), b"")
    old.trainer_cell.write(trainer_word_to_json(TrainerWord(lineage=LINEAGE, rank=0, world=2, newest_step=1)))
    node.loop.turn()
    larger, _ = node.loop.allot(incarnation="one", **{**REQUEST, "data_bytes": 50_000})
    with TrainerArena.attach(Path(larger), trainer="one"):
        old.close()
        node.arena.cap_bytes = 1
        assert node.loop.allot(incarnation="two", **{**REQUEST, "rank": 1}) == (path, index)


def test_what_has_to_be_remembered_waits_for_room_and_nothing_waits_for_it(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a full /dev/shm the trainers were not told what the host had decided: a stop before a preemption."""
    real, full = slot_store.write_json, [True]

    def write_json(path: Path, value: dict[str, Any]) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, value)

    monkeypatch.setattr(slot_store, "write_json", write_json)
    memory = Remember(restore=Invalidate(host=HostId("h"), lineage="1.1", step=3, by="1.2", older=(("1.0", 2),), attempt=1, seq=1))
    node.loop._carry_out(memory)
    assert node.loop._store.recall() == Remember()
    full.clear()
    node.loop.turn()
    assert node.loop._store.recall() == memory
