"""Saves of one process to one directory take effect in the order of their calls, whatever manager they were given."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raystate
from raystate.compat import flax_checkpoints as ours
from raystate.compat import flax_turns
from raystate.compat.flax_writing import Msgpack
from raystate.core.formats.errors import StorageError
from raystate.storage import open_storage, posix
from raystate.storage.directory import DirectoryStorage
from raystate.storage.placing import new_save
from tests.storage.interrupted import Interrupted

OLD, NEW = {"a": np.zeros(3)}, {"a": np.ones(3)}


class Gate:
    """Managers whose background saves begin when it opens: when another save waits for them, or with `open`."""

    def __init__(self) -> None:
        self._opened = threading.Event()

    def open(self) -> None:
        self._opened.set()

    def opens_as_a_save_waits(self, record: logging.LogRecord) -> bool:
        if "waits for the one before" in record.getMessage():
            self.open()
        return True

    def manager(self) -> ours.AsyncManager:
        manager = ours.AsyncManager()
        manager.executor.submit(self._opened.wait, 60)  # before its first save
        return manager


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate, logger = Gate(), flax_turns.logger
    before = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addFilter(gate.opens_as_a_save_waits)
    yield gate
    gate.open()
    logger.removeFilter(gate.opens_as_a_save_waits)
    logger.setLevel(before)


def restored(folder: Path, step: int | None = None) -> list[float]:
    return ours.restore_checkpoint(folder, None, step)["a"].tolist()


def test_an_overwrite_in_the_background_leaves_what_was_saved_after_its_call(tmp_path: Path, gate: Gate):
    ours.save_checkpoint(tmp_path, OLD, 1)
    manager = gate.manager()
    ours.save_checkpoint(tmp_path, NEW, 1, keep=5, overwrite=True, async_manager=manager)
    ours.save_checkpoint(tmp_path, NEW, 2, keep=5)
    gate.open()
    manager.wait_previous_save()
    assert ours.available_steps(tmp_path) == [1, 2] and restored(tmp_path, 1) == [1, 1, 1]


def test_of_two_saves_of_a_step_the_one_that_was_called_last_stays(tmp_path: Path, gate: Gate):
    manager = gate.manager()
    ours.save_checkpoint(tmp_path, OLD, 1, async_manager=manager)
    (tmp_path.parent / "link").symlink_to(tmp_path)  # another spelling of the directory
    ours.save_checkpoint(tmp_path.parent / "link", NEW, 1, overwrite=True)
    gate.open()
    manager.wait_previous_save()
    assert os.listdir(tmp_path) == ["checkpoint_1"] and restored(tmp_path) == [1, 1, 1]


def test_a_save_that_never_ends_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gate = Gate()  # nothing opens it but the test
    manager = gate.manager()
    ours.save_checkpoint(tmp_path, OLD, 1, async_manager=manager)
    ours.save_checkpoint(tmp_path / "elsewhere", NEW, 1)  # waits for nothing
    monkeypatch.setattr(flax_turns, "SHARE_WRITTEN_S", 0.01)
    with pytest.raises(raystate.StorageError, match=rf"an earlier save to file://{tmp_path} has been under way .* 0.01 s"):
        ours.save_checkpoint(tmp_path, NEW, 2)
    monkeypatch.undo()
    gate.open()
    ours.save_checkpoint(tmp_path, NEW, 2)
    manager.wait_previous_save()
    assert restored(tmp_path) == [1, 1, 1]


def test_saves_that_fail_or_never_begin_hold_up_nothing(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(flax_turns, "SHARE_WRITTEN_S", 0.01)
    manager = gate.manager()
    ours.save_checkpoint(tmp_path, OLD, 1, async_manager=manager)
    assert manager.save_future is not None and manager.save_future.cancel()
    with pytest.raises(raystate.RaystateError, match="nothing to save"):
        ours.save_checkpoint(tmp_path, {}, 1)
    ended = ours.AsyncManager()
    ended.executor.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        ours.save_checkpoint(tmp_path, OLD, 1, async_manager=ended)
    ours.save_checkpoint(tmp_path, NEW, 1)
    assert restored(tmp_path) == [1, 1, 1]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_signals_handler_may_save_while_a_save_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_background: bool):
    """It runs in the thread that saves, between two of its instructions: here as the checkpoint is renamed."""
    monkeypatch.setattr(flax_turns, "SHARE_WRITTEN_S", 0.01)
    ours.save_checkpoint(tmp_path, OLD, 1)
    manager = ours.AsyncManager() if in_background else None
    whole, calls = os.rename, iter([True])

    def rename(source: str, target: str) -> None:
        whole(source, target)
        if next(calls, False):
            ours.save_checkpoint(tmp_path, NEW, 3, keep=5, async_manager=manager)
            assert ours.available_steps(tmp_path) == [1, 2, 3]

    monkeypatch.setattr(os, "rename", rename)
    ours.save_checkpoint(tmp_path, NEW, 2, keep=5, overwrite=True)
    assert next(calls, None) is None, "no handler ran"
    assert ours.available_steps(tmp_path) == [1, 2, 3], "it was not there when the overwrite was called"


def test_a_signals_handler_may_save_the_step_that_it_interrupts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It removed what the other had written so far, which then failed."""
    monkeypatch.setattr(flax_turns, "SHARE_WRITTEN_S", 0.01)
    whole, calls = DirectoryStorage.fsync_tree, iter([True])

    def fsync_tree(self: DirectoryStorage, name: str) -> None:
        whole(self, name)
        if next(calls, False):
            ours.save_checkpoint(tmp_path, NEW, 2)
            assert restored(tmp_path) == [1, 1, 1]

    monkeypatch.setattr(DirectoryStorage, "fsync_tree", fsync_tree)
    ours.save_checkpoint(tmp_path, OLD, 2)
    assert next(calls, None) is None, "no handler ran"
    assert restored(tmp_path) == [0, 0, 0]
    ours.save_checkpoint(tmp_path, NEW, 3)
    assert os.listdir(tmp_path) == ["checkpoint_3"], "nothing is left over"


@pytest.mark.parametrize("raises", [None, SystemExit(0)], ids=["returns", "exits"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handlers_overwrite_in_a_bucket_stays(when: str, raises: BaseException | None, tmp_path: Path):
    """What it interrupted was refused, or ended by the handler, and then removed it and put the old one back."""
    nth, came = 0, True
    while came:
        storage = open_storage(f"memory://{tmp_path.name}/{when}/{nth}")
        Msgpack(b"1").write(storage, "checkpoint_1", new_save())
        interrupted = Interrupted(
            storage, nth, when, lambda inner: (Msgpack(b"3").write(inner, "checkpoint_1", new_save()), b"3")[1], raises=raises
        )
        good = []
        with contextlib.suppress(StorageError, SystemExit):
            Msgpack(b"2").write(interrupted, "checkpoint_1", new_save())
            good.append(b"2")
        assert storage.read("checkpoint_1") in [*good, interrupted.got or b"1"]
        came = interrupted.came
        nth += 1
    assert nth > 5


def test_a_removal_that_meets_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The save whose checkpoint was durable failed, since the old one was gone."""
    ours.save_checkpoint(tmp_path, OLD, 1)
    whole, calls = DirectoryStorage.rename_tree, iter([True])

    def rename_tree(self: DirectoryStorage, source: str, target: str) -> None:
        if source == "checkpoint_1" and next(calls, False):
            ours.save_checkpoint(tmp_path, OLD, 3)  # a signal's handler
        whole(self, source, target)

    monkeypatch.setattr(DirectoryStorage, "rename_tree", rename_tree)
    ours.save_checkpoint(tmp_path, NEW, 2)
    assert next(calls, None) is None and restored(tmp_path) == [0, 0, 0]


def test_a_removal_that_is_killed_is_finished_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours.save_checkpoint(tmp_path, OLD, 1)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DirectoryStorage, "delete_tree", killed)
        with pytest.raises(KeyboardInterrupt):
            ours.save_checkpoint(tmp_path, NEW, 2)
    assert len(os.listdir(tmp_path)) == 2
    ours.save_checkpoint(tmp_path, NEW, 3)
    assert os.listdir(tmp_path) == ["checkpoint_3"]


def test_a_removal_that_is_interrupted_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was found as the newest, and could not be restored."""
    ours.save_checkpoint(tmp_path, OLD, 20)

    def interrupted(path: str) -> None:
        next(file for file in Path(path).rglob("*") if file.is_file()).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(posix, "remove_tree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.save_checkpoint(tmp_path, NEW, 10, overwrite=True)
    assert ours.available_steps(tmp_path) == [10] and restored(tmp_path) == [1, 1, 1]
