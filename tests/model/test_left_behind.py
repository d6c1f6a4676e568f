"""What the model of the public API leaves in shared memory: nothing, or what the next run of tests removes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from raystate.observe.ledger.writer import LedgerWriter
from tests.folders import hold, remove_unheld
from tests.model.world import Rank, World
from tests.patience import PATIENCE_S


def test_a_report_that_is_written_late_does_not_make_the_folder_again(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, write, close = threading.Event(), LedgerWriter._write, LedgerWriter.close

    def write_late(self: LedgerWriter, lines: Sequence[bytes]) -> None:
        goes_on.wait(PATIENCE_S)
        write(self, lines)

    def close_in_time(self: LedgerWriter, timeout_s: float) -> None:
        goes_on.set()
        close(self, timeout_s)

    monkeypatch.setattr(LedgerWriter, "_write", write_late)
    monkeypatch.setattr(LedgerWriter, "close", close_in_time)

    def trains(rank: Rank) -> None:
        manager = rank.begin({"w": np.zeros(8)})
        manager.save(1, {"w": np.ones(8)})
        manager.wait_until_finished()

    world = World(save_every_steps=1)
    folder = Path(world.config.storage.removeprefix("file://")).parent
    with world:
        world.play(trains)
        assert not goes_on.is_set()
    goes_on.set()
    for thread in threading.enumerate():
        if thread.name == "raystate-ledger":
            thread.join(PATIENCE_S)
    assert not folder.exists()


def test_what_a_killed_process_has_left_is_removed_and_nothing_that_is_held(tmp_path: Path) -> None:
    held, left, young, other = (tmp_path / name for name in ("raystate-x-1", "raystate-x-2", "raystate-x-3", "else"))
    for folder in (held, left, young, other):
        (folder / "run").mkdir(parents=True)
    for folder in (held, left, other):
        os.utime(folder, (0, 0))
    descriptor = hold(held)
    assert descriptor is not None
    remove_unheld(tmp_path, "raystate-x-")
    assert sorted(tmp_path.iterdir()) == sorted((held, young, other))
    os.close(descriptor)
    remove_unheld(tmp_path, "raystate-x-")
    assert sorted(tmp_path.iterdir()) == sorted((young, other))
