"""Two hosts without Ray: a snapshot comes from the arena of one into that of the other, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raystate.arena import TrainerArena, crc32c
from raystate.arena.layouts import put_layout
from raystate.core.formats.errors import CapacityError, StepNotFoundError
from raystate.core.formats.messages import Advice, Copy, Event, HostId, HostReported, Invalidate, Staged, TrainerWord
from raystate.core.formats.tree import ArraySpec, Layout, LeafSpec, Piece, SlotTable, TreeSpec
from raystate.core.formats.words import trainer_word_to_json
from raystate.observe.progress import Progress
from raystate.runtime.host import copying
from tests.arena.sets import open_loop
from tests.cluster.training import wait_for

A, B = HostId("aaaaaaaaaaaa"), HostId("bbbbbbbbbbbb")
SIZE = 50_000
LINE = "1.1.n"


class Host:
    """One node and its HostActor's loop; it calls the others by `calls`, in which a test may meddle."""

    def __init__(self, root: Path, host: HostId, calls: Callable[[HostId, str, dict[str, Any]], Any], cap_bytes: int = 10**9):
        self.told: list[Event | Progress] = []
        self.calls = calls
        self.loop = open_loop(root, host, cap_bytes=cap_bytes, tell=self.told.append, peers=self)
        self.arena = self.loop.arena

    def call(self, host: HostId, method: str, timeout_s: float, request: dict[str, Any]) -> Any:
        del timeout_s
        return self.calls(host, method, request)

    def order(self, step: int = 1, seq: int = 1) -> None:
        self.loop.order(Copy(host=B, lineage=LINE, step=step, pieces=((0, A),), attempt=1, seq=seq))

    def steps(self) -> list[int]:
        return [staged.step for _, _, staged in self.loop.contents()]

    def trouble(self) -> str:
        self.loop.turn()
        return next((one.summary.no_copies for one in reversed(self.told) if isinstance(one, HostReported)), "")

    def ended(self) -> bool:
        """No transfer is under way."""
        return not self.loop._copier._transfers


class Pair:
    """Host `a`, with a trainer's snapshots, and host `b`, which copies them."""

    def __init__(self, root: Path, cap_bytes: int = 10**9):
        self.root = root
        self.cap_bytes = cap_bytes
        self.a = Host(root, A, lambda *_: None)
        self.b = self.new_b()
        self.chunks = 0
        self.meddle: Callable[[np.ndarray], np.ndarray] = lambda chunk: chunk
        self.bytes = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
        path, _ = self.a.loop.allot(
            incarnation="t", rank=0, pid=os.getpid(), data_bytes=SIZE, table_bytes=4096, buffer_bytes=0, slots=3
        )
        self.trainer = TrainerArena.attach(Path(path), trainer="t")

    def new_b(self) -> Host:
        return Host(self.root, B, self.call, self.cap_bytes)

    def call(self, host: HostId, method: str, request: dict[str, Any]) -> Any:
        assert host == A
        answer = getattr(self.a.loop.serving, method)(**request)
        if method != "piece_chunk":
            return answer
        self.chunks += 1
        return self.meddle(answer)

    def stage(self, step: int, leaf: str = "w") -> None:
        """The trainer puts a snapshot into its next slot."""
        array = ArraySpec(shape=(SIZE,), dtype="uint8", chunk=(SIZE,))
        tree = TreeSpec(item="state", leaves=(LeafSpec(path=(leaf,), kind="array", array=array),))
        whole = Piece(tree=0, leaf=0, start=(0,), shape=(SIZE,), offset=0, nbytes=SIZE, owned=True)
        ref = put_layout(self.a.arena.path, Layout(trees=(tree,), pieces=(whole,)).to_bytes(), slot_set=self.trainer.path)
        slot = self.trainer.slots[(step - 1) % 3]
        slot.begin()
        slot.data_mut[:SIZE] = self.bytes
        header = Staged(lineage=LINE, step=step, rank=0, world=1, layout="l", promised=False, nbytes=SIZE)
        slot.commit(header, SlotTable(layout_ref=ref, crc32c=(crc32c(self.bytes),)).to_bytes())
        word = TrainerWord(lineage=LINE, rank=0, world=1, number=step, newest_step=step, done=(0, 0, 0))
        self.trainer.trainer_cell.write(trainer_word_to_json(word))
        self.a.loop.turn()

    def close(self) -> None:
        self.trainer.close()
        for host in (self.a, self.b):
            host.loop.close(remove_arena=True)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 16_384)
    made = Pair(tmp_path)
    yield made
    made.close()


def test_a_copy_has_the_same_bytes_and_outlives_its_host_actor(pair: Pair):
    pair.stage(1)
    pair.b.order()
    wait_for(lambda: pair.b.steps() == [1], "the copy")
    assert pair.chunks == 4
    pair.b.loop.close(remove_arena=False)
    pair.b = pair.new_b()
    assert pair.b.steps() == [1]
    piece = {"lineage": LINE, "step": 1, "rank": 0}
    got, there = pair.b.loop.serving.piece_head(**piece), pair.a.loop.serving.piece_head(**piece)
    assert np.array_equal(pair.b.loop.serving.piece_chunk(start=0, size=SIZE, **piece), pair.bytes)
    assert (got.table, got.layout) == (there.table, there.layout)
    pair.b.order()
    wait_for(pair.b.ended, "the end of all transfers")
    assert pair.chunks == 4  # it was there


def test_damaged_bytes_are_no_copy_and_are_fetched_again(pair: Pair):
    def flip(chunk: np.ndarray) -> np.ndarray:
        chunk[7] ^= 1
        return chunk

    pair.stage(1)
    pair.meddle = flip
    pair.b.order()
    wait_for(lambda: pair.chunks == 4 and pair.b.ended(), "the end of the transfer")
    assert pair.b.steps() == []
    pair.meddle = lambda chunk: chunk
    pair.b.order()
    wait_for(lambda: pair.b.steps() == [1], "the copy")


def lose_the_source(pair: Pair) -> None:
    if pair.chunks == 3:
        raise StepNotFoundError("overwritten")


def restore_something_else(pair: Pair) -> None:
    if pair.chunks == 2:
        pair.b.loop.order(Invalidate(host=B, lineage="", step=-1, by="1.2.n", attempt=1, seq=1))


@pytest.mark.parametrize(("meddle", "chunks"), [(lose_the_source, 3), (restore_something_else, 4)])
def test_what_comes_to_nothing_in_the_middle_leaves_nothing(pair: Pair, meddle: Callable[[Pair], None], chunks: int):
    def meddled(chunk: np.ndarray) -> np.ndarray:
        meddle(pair)
        return chunk

    pair.stage(1)
    pair.meddle = meddled
    pair.b.order()
    wait_for(lambda: pair.chunks == chunks and pair.b.ended(), "the end of the transfer")
    assert pair.b.steps() == []
    assert all(slot.read_header() is None for held in pair.b.arena.sets for slot in held.slots)


def test_copies_lie_in_slots_that_no_trainer_gets(pair: Pair):
    for step in (1, 2):
        pair.stage(step)
        pair.b.order(step, seq=step)
        wait_for(lambda step=step: pair.b.steps() == [1, 2][:step], f"the copy of step {step}")
    (held,) = pair.b.arena.sets
    assert held.info.copies_of == 0
    other = pair.b.arena.allot(trainer="t2", data_bytes=SIZE, table_bytes=4096)
    assert other.index != held.index


def test_layouts_of_copies_go_with_them(pair: Pair):
    """A state that grows has another one with each step."""
    for step in range(1, 7):
        pair.stage(step, leaf=f"w{step}")
        pair.b.order(step, seq=step)
        wait_for(lambda step=step: step in pair.b.steps() and pair.b.ended(), f"the copy of step {step}")
        advice = Advice(attempt=1, seq=step, lineage=LINE, decided=True, stable=step, durable_step=-1)
        pair.b.loop.order(advice)
    pair.b.arena.prune_layouts()
    assert len(list((pair.b.arena.path / "layouts").iterdir())) <= 3, "one for each slot"


def test_room_for_copies_is_asked_for_at_the_start_and_missed_later(tmp_path: Path):
    cap_bytes = 5 * 57_344 + 8192  # three slots and their words, and no three more
    pair = Pair(tmp_path, cap_bytes)
    try:
        with pytest.raises(CapacityError, match="for copies of other hosts; replicas=0: none"):
            pair.b.arena.allot(trainer="t2", data_bytes=SIZE, table_bytes=4096, copies=1)
        pair.stage(1)
        pair.b.order()
        wait_for(lambda: "host_memory" in pair.b.trouble(), "a report that there is no room")
        assert pair.b.steps() == []
    finally:
        pair.close()
