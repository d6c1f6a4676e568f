"""One checkpoint's path, used by several at a time: readers beside a writer, saves in the background and not, forked processes."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import serialization

import raystate
from raystate.compat import flax_checkpoints
from raystate.inspection import places
from raystate.legacy.byte_file import ByteFile
from raystate.orbax import scratch, step_reader
from raystate.reader import saving, turns
from raystate.reader.assembling import Content
from raystate.reader.turns import Turn
from raystate.transfer import export_step
from tests.patience import PATIENCE_S

OLD, NEW = ({"w": np.full(5, number), "name": name} for number, name in ((1.0, "old"), (2.0, "new")))


def put(path: Path, tree: Any) -> None:
    kind, items = tree["name"], {"ema": {"x": tree["w"]}, "note": tree["name"]}
    raystate.save(path, tree, items=items, metrics={"loss": tree["w"][0]}, custom={"kind": kind}, overwrite=True)


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Path]:
    """Makes a checkpoint that is replaced as soon as its metadata are read, so many times."""

    def make(times: int) -> Path:
        path, real, left = tmp_path / "one", step_reader.open_arrays, [times]
        put(path, OLD)

        def opened(*args: Any, **kwargs: Any) -> Any:
            if left[0]:
                left[0] -= 1
                put(path, NEW)
            return real(*args, **kwargs)

        monkeypatch.setattr(step_reader, "open_arrays", opened)
        return path

    return make


WAYS: dict[str, Callable[[Path], Any]] = {
    "load": lambda path: raystate.load(path)["name"],
    "load with a reference": lambda path: raystate.load(path, {"w": np.zeros(5), "name": ""})["name"],
    "load items": lambda path: [tree.popitem()[1].tolist() for tree in raystate.load(path, items={"ema": None}).values()],
    "restore": lambda path: raystate.Reader(path).restore(items={"note": None}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_reader_begins_anew_when_the_checkpoint_is_replaced(way: str, replaced: Callable[[int], Path]):
    """It gave the old one's text with the new one's arrays; nobody had saved that."""
    got = WAYS[way](replaced(3))
    if isinstance(got, raystate.Restored):
        assert (got.metrics, got.custom, got.items["note"]) == ({"loss": 2.0}, {"kind": "new"}, "new")
        assert (got.state["name"], got.state["w"].tolist()) == ("new", [2.0] * 5)
    else:
        assert got in ("new", [[2.0] * 5])


def test_a_reader_of_what_is_replaced_again_and_again_says_so(replaced: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch):
    rests: list[float] = []
    monkeypatch.setattr(places, "MOST_READS", 3)
    monkeypatch.setattr(places, "time", SimpleNamespace(sleep=rests.append))  # not that of threads, which sleep, too
    with pytest.raises(raystate.StorageError, match=r"replaced while it was read.*in each of 3 tries"):
        raystate.load(replaced(1000))
    assert rests == [places.AGAIN_S] * 2, "it does not race with whoever writes"


def test_nothing_is_exported_of_two_checkpoints(replaced: Callable[[int], Path], tmp_path: Path):
    """It was called verified."""
    with pytest.raises(raystate.StorageError, match="was replaced while it was read: read it again"):
        export_step(replaced(1), None, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()


def test_a_file_of_flax_that_is_replaced_in_mid_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, real, reads = tmp_path / "checkpoint_1", ByteFile.read, []
    path.write_bytes(serialization.to_bytes({"w": np.zeros(100_000), "v": np.zeros(200_000)}))

    def read(self: ByteFile, start: int, length: int) -> bytes:
        reads.append(start)
        if len(reads) == 2:
            (tmp_path / "other").write_bytes(serialization.to_bytes({"w": np.ones(50_000), "v": np.ones(300_000)}))
            (tmp_path / "other").rename(path)
        return real(self, start, length)

    monkeypatch.setattr(ByteFile, "read", read)
    with pytest.raises(raystate.StorageError, match="was replaced while it was read"):
        raystate.load(path)
    assert raystate.load(path)["v"].tolist() == [1.0] * 300_000


# ---------------------------------------------------------------- the order of saves


class Gate:
    """Saves stop before they write, until they are let through; `written` has the order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.open, self.written, self._real = threading.Event(), [], saving.write_checkpoint
        monkeypatch.setattr(saving, "write_checkpoint", self._write)

    def _write(self, storage: Any, folder: str, content: Any, **options: Any) -> None:
        assert self.open.wait(PATIENCE_S)
        self._real(storage, folder, content, **options)
        self.written.append(folder)


def test_the_last_call_wins_in_the_background_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The save in the background was written last, over the newer one; both said that all was well."""
    raystate.save(tmp_path / "one", {"x": 0})
    gate = Gate(monkeypatch)
    before = raystate.save_async(tmp_path / "one", {"x": 1}, overwrite=True)
    newer = threading.Thread(target=raystate.save, args=(tmp_path / "one", {"x": 2}), kwargs={"overwrite": True})
    newer.start()
    gate.open.set()
    newer.join(PATIENCE_S)
    assert before.exception(PATIENCE_S) is None and not newer.is_alive()
    assert raystate.load(tmp_path / "one") == {"x": 2}
    assert not turns._turns, "nothing is kept of saves that are over"


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_a_signals_handler_makes_does_not_wait_for_what_it_interrupts(
    background: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It was refused after ten minutes; the process was being ended."""
    real, inside = saving.write_checkpoint, []

    def write(storage: Any, folder: str, content: Any, **options: Any) -> None:
        if not inside:
            inside.append(folder)
            if background:
                raystate.save_async(tmp_path / "one", {"x": 2}, overwrite=True).result(0.0)
            else:
                raystate.save(tmp_path / "one", {"x": 2}, overwrite=True)
            assert raystate.load(tmp_path / "one") == {"x": 2}
        real(storage, folder, content, **options)

    monkeypatch.setattr(saving, "write_checkpoint", write)
    raystate.save(tmp_path / "one", {"x": 1}, overwrite=True)
    assert raystate.load(tmp_path / "one") == {"x": 1}
    assert not turns._turns


def begun(place: str) -> Turn:
    """Of a save that goes on in the background."""
    turn = Turn(place)
    turn.go_on_in_background()
    return turn


def test_a_save_that_is_cancelled_is_waited_for_by_nobody():
    first = begun("a")
    next_one = Turn("a")
    assert not next_one.wait(0.0)
    first.leave()
    assert next_one.wait(0.0)
    next_one.leave()
    assert not turns._turns


def test_a_save_that_waits_no_longer_lets_nobody_pass_the_one_before_it():
    first, gives_up, last = (begun("a") for _ in range(3))
    gives_up.leave()
    assert not last.wait(0.0)
    first.leave()
    assert last.wait(0.0)
    last.leave()


def test_a_save_that_was_dropped_holds_up_nobody(monkeypatch: pytest.MonkeyPatch, waited_for: threading.Event):
    """Ctrl-C came between the turn and the `try` that would have left it; the other waits by then."""
    monkeypatch.setattr(turns, "LOOK_EVERY_S", 0.01)
    ended: list[bool] = []
    dropped = begun("a")
    waiting = begun("a")
    thread = threading.Thread(target=lambda: ended.append(waiting.wait(10 * PATIENCE_S)))
    thread.start()
    assert waited_for.wait(PATIENCE_S)
    del dropped
    gc.collect()
    thread.join(PATIENCE_S)
    assert ended == [True]
    waiting.leave()
    assert not turns._turns


def test_a_handlers_save_waits_for_nobody_who_waits_for_the_one_that_it_interrupts():
    """Both waited for each other, for as long as a save may wait."""
    interrupted = Turn("a")
    others: list[Turn] = []
    thread = threading.Thread(target=lambda: others.append(Turn("a")))
    thread.start()
    thread.join(PATIENCE_S)
    handlers = Turn("a")
    assert handlers.is_nested and handlers.wait(0.0) and not others[0].wait(0.0)
    for turn in (interrupted, *others, handlers):
        turn.leave()


@pytest.mark.parametrize("save", ["raystate", "flax"])
def test_a_handler_may_save_while_orbax_writes_the_small_files(save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It waited for a lock that its own thread held, for ever."""
    real, inside = scratch.stand_in, []

    def stand_in(leaf: Any, value: Any) -> Any:
        if not inside:
            inside.append(leaf)
            if save == "flax":
                flax_checkpoints.save_checkpoint(tmp_path / "flax", {"other": np.ones(3)}, 1)
            else:
                raystate.save(tmp_path / "two", {"y": np.ones(7)})
        return real(leaf, value)

    monkeypatch.setattr(scratch, "stand_in", stand_in)
    scratch._written_by_orbax.cache_clear()
    thread = threading.Thread(target=raystate.save, args=(tmp_path / "one", {"x": np.zeros(5)}), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive() and inside
    assert raystate.load(tmp_path / "one")["x"].shape == (5,)
    if save == "flax":
        assert flax_checkpoints.restore_checkpoint(tmp_path / "flax", None)["other"].shape == (3,)
    else:
        assert raystate.load(tmp_path / "two")["y"].shape == (7,)


def test_a_handlers_save_in_the_background_inside_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The call that it interrupts waits for the save before; the one that ends would wake that call, which is suspended."""
    gate = Gate(monkeypatch)
    first = raystate.save_async(tmp_path / "one", {"x": 1})

    def rest(one: Any, seconds: float) -> None:
        if not gate.open.is_set():
            with pytest.raises(raystate.RaystateError, match=r"inside save_async\(\) of .*two, .*save\(\) may be called there"):
                raystate.save_async(tmp_path / "three", {"x": 3})
            gate.open.set()
        real(one, seconds)

    real = turns._rest
    monkeypatch.setattr(turns, "_rest", rest)
    raystate.save_async(tmp_path / "two", {"x": 2}).result(PATIENCE_S)
    assert first.done() and raystate.load(tmp_path / "two") == {"x": 2}


def test_a_save_inside_a_save_in_the_background_waits_for_nobody_who_waits_for_that(tmp_path: Path, waited_for: threading.Event):
    """An item's: it waited for another thread's save to its path, which waited for the arrays, both until the deadline."""
    others: list[Any] = []
    other = threading.Thread(target=lambda: others.append(raystate.save_async(tmp_path / "one", {"x": 1}, overwrite=True)))

    class Data:
        def get_state(self) -> bytes:
            other.start()
            assert waited_for.wait(PATIENCE_S)
            raystate.save(tmp_path / "one", {"x": 2})
            return b""

        def set_state(self, state: bytes) -> None: ...

    raystate.save_async(tmp_path / "two", {"x": 3}, items={"data": Data()}).result(PATIENCE_S)
    other.join(PATIENCE_S)
    others[0].result(PATIENCE_S)
    assert raystate.load(tmp_path / "one") == {"x": 1}


def test_the_order_is_that_of_the_calls_not_of_when_their_arrays_were_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A save that came while the arrays of the one before were taken was written first, and replaced."""
    real, called = saving.take, threading.Event()
    newer = threading.Thread(target=raystate.save, args=(tmp_path / "one", {"x": 2}), kwargs={"overwrite": True})

    def take(*args: Any, **kwargs: Any) -> Content:
        if threading.current_thread() is newer:
            called.set()
        else:
            newer.start()
            assert called.wait(PATIENCE_S)
        return real(*args, **kwargs)

    monkeypatch.setattr(saving, "take", take)
    raystate.save_async(tmp_path / "one", {"x": 1}).result(PATIENCE_S)
    newer.join(PATIENCE_S)
    assert raystate.load(tmp_path / "one") == {"x": 2}


def test_saves_of_other_paths_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    waiting = raystate.save_async(tmp_path / "one", {"x": 1})
    monkeypatch.setattr(saving, "write_checkpoint", gate._real)
    raystate.save(tmp_path / "other", {"x": 2})
    assert not waiting.done()
    gate.open.set()
    waiting.result(PATIENCE_S)


def test_a_save_in_the_background_inside_another_is_refused(tmp_path: Path):
    """It waited ten minutes for itself."""

    class Data:
        def get_state(self) -> bytes:
            raystate.save_async(tmp_path / "inner", {"x": 1})
            return b""

        def set_state(self, state: bytes) -> None: ...

    with pytest.raises(raystate.RaystateError, match=r"inside save_async\(\) of .*outer, by an item's get_state"):
        raystate.save_async(tmp_path / "outer", {"x": 1}, items={"data": Data()})
    raystate.save_async(tmp_path / "outer", {"x": 1}).result(PATIENCE_S)


def test_threads_that_save_one_path(tmp_path: Path):
    """One of them said that somebody else had saved there, in spite of overwrite."""
    failed: list[BaseException] = []

    def save(number: int) -> None:
        try:
            for _ in range(5):
                raystate.save(tmp_path / "one", {"x": number}, overwrite=True)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failed
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


# ---------------------------------------------------------------- forks


def _nothing() -> None:
    """What a forked worker does."""


@pytest.mark.filterwarnings("ignore:.*fork.*")
def test_a_forked_worker_does_not_wait_for_its_parents_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It stayed for ten minutes, as its interpreter waited for a future that only the parent can settle."""
    gate = Gate(monkeypatch)
    waiting = raystate.save_async(tmp_path / "one", {"x": 1})
    worker = multiprocessing.get_context("fork").Process(target=_nothing)
    worker.start()
    worker.join(PATIENCE_S)
    try:
        assert worker.exitcode == 0 and not waiting.done()
    finally:
        gate.open.set()
        worker.kill()
        worker.join()
    waiting.result(PATIENCE_S)
