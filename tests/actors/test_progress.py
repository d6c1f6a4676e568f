"""Whoever moves bytes says how far it is: a HostActor that writes, and a rank that reads."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import CorruptCheckpointError, StorageError
from raystate.core.formats.messages import Event, HostId, RestoreChoice, SaveId, Write
from raystate.inspection import open_step
from raystate.manager.restoring import Restoring, Wanted
from raystate.observe.progress import Progress
from raystate.orbax.kv import bytes_written
from raystate.restored import ReadOptions, content_from_storage
from raystate.runtime.host import writes
from raystate.runtime.host.loop import HostLoop
from raystate.storage import open_storage
from tests.arena.sets import open_loop

TREE = {"a": np.arange(300_000, dtype=np.float32), "b": np.ones((400, 500)), "c": np.zeros(7, np.int8)}
NBYTES = sum(array.nbytes for array in TREE.values())


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    raystate.save(tmp_path / "7", TREE)
    return tmp_path


def test_what_is_written_is_counted(tmp_path: Path):
    before = bytes_written()
    raystate.save(tmp_path / "7", TREE)
    assert NBYTES <= bytes_written() - before <= NBYTES + 100_000


def test_what_will_be_read_is_said_before_and_counted_meanwhile(stored: Path):
    planned: list[int] = []
    content = content_from_storage(open_step(open_storage(stored), 7), 7)
    content = dataclasses.replace(content, on_plan=lambda nbytes: planned.append(nbytes - content.bytes_from()["storage"]))
    half = {"a": TREE["a"], "b": ..., "c": TREE["c"]}
    content.restore(half, None, ReadOptions(), world=1, process_index=0)
    assert planned == [TREE["a"].nbytes + TREE["c"].nbytes] == [content.bytes_from()["storage"]]
    content.restore(None, None, ReadOptions(), world=1, process_index=0)
    assert planned[1:] == [NBYTES - planned[0]], "the raw tree, too"


class Watched:
    """A trainer's session, whose time goes on as the test says."""

    def __init__(self) -> None:
        self.told: list[Progress] = []
        self.now_s = 0.0
        self.turns: list[Callable[[], bool]] = []
        self.link = SimpleNamespace(tell=self.told.append, clock=lambda: self.now_s, spawn=self._spawn)
        self.rank, self.world = 1, 2

    def _spawn(self, turn: Callable[[], bool], *_: Any) -> Callable[[], None]:
        self.turns.append(turn)
        return self.turns.clear

    def look(self) -> None:
        for turn in self.turns:
            assert turn() is False, "it wants no other turn at once"


@pytest.mark.parametrize("damaged", [False, True])
def test_a_restore_tells_the_coordinator(stored: Path, damaged: bool):
    session = Watched()
    content = content_from_storage(open_step(open_storage(stored), 7), 7)
    inner = content.source

    class Slow:
        lends = False

        def read(self, requests: Any) -> Any:
            session.look()  # at once: nothing is said yet
            session.now_s += 2.0
            session.look()
            got = inner("state").read(requests)
            session.now_s += 2.0
            session.look()
            if damaged:
                raise CorruptCheckpointError("a bit")
            return got

    content = dataclasses.replace(content, source=lambda _: Slow())
    restoring = Restoring(cast(Any, session), cast(Any, None), open_storage(stored), lambda _: None)
    choice = RestoreChoice(tier="storage", step=7, begins="1.2.x")
    wanted = Wanted(reference=TREE, items=None, options=ReadOptions(), step=None, rollback=False)
    with pytest.raises(CorruptCheckpointError) if damaged else contextlib.nullcontext():
        restoring._take(content, choice, wanted)
    assert session.told == [Progress(of="1.2.x", who="rank 1", done_bytes=done, total_bytes=NBYTES) for done in (0, NBYTES)]
    assert session.turns == [], "nobody looks any more"


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[tuple[HostLoop, list[Event | Progress], list[float]]]:
    told: list[Event | Progress] = []
    now_s = [0.0]
    one = open_loop(tmp_path, tell=told.append, clock=lambda: now_s[0])
    yield one, told, now_s
    one.close(remove_arena=True)


@pytest.mark.parametrize("fails", [False, True])
def test_a_host_that_writes_tells_the_coordinator(loop: Any, fails: bool, monkeypatch: pytest.MonkeyPatch):
    one, told, now_s = loop

    def write_slots(
        storage: Any, host: Any, order: Write, slots: Any, get_layout: Any, on_begin: Callable[[str, int], None]
    ) -> Any:
        on_begin(order.save, 1000)
        for _ in range(3):
            now_s[0] += 1.5
            one.turn()
        if fails:
            raise OSError("503")

    monkeypatch.setattr(writes, "write_slots", write_slots)
    order = Write(host=HostId("h"), save=SaveId("a1k1"), lineage="1.1.x", step=7, ranks=())
    with pytest.raises(OSError) if fails else contextlib.nullcontext():
        one._writes.carry_out(order, ())
    now_s[0] += 5.0
    one.turn()
    said = [event for event in told if isinstance(event, Progress)]
    assert said == [Progress(of="a1k1", who="h", done_bytes=0, total_bytes=1000)] * 3


def test_a_host_writes_nothing_where_the_runs_folder_was(loop: Any, tmp_path: Path):
    """Its data lay in the way of the folder that was moved back, or below a mount point."""
    (tmp_path / "run").rename(tmp_path / "moved")
    order = Write(host=HostId("h"), save=SaveId("a1k1"), lineage="1.1.x", step=7, ranks=())
    with pytest.raises(StorageError, match="the folder has been moved or removed, or is not mounted"):
        loop[0]._writes.carry_out(order, ())
    assert not (tmp_path / "run").exists()
