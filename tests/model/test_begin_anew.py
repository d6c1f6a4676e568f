"""A run whose steps were removed by hand names the way out, and is gone after it."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import pytest

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.reader import Reader
from raystate.storage import open_storage
from raystate.transfer.removing import remove_run
from tests.model.world import Rank, World


def test_removed_step_folders_are_told_with_the_way_out() -> None:
    world = World(save_every_steps=2)
    state = {"w": jax.numpy.ones(100)}
    storage = world.config.storage

    def script(rank: Rank) -> None:
        manager = rank.open("first")
        assert manager.restore(state) is None
        for step in range(1, 5):
            manager.save(step, state)
        manager.close()
        for step in Reader(storage).all_steps():
            shutil.rmtree(Path(storage.removeprefix("file://")) / str(step))
        manager = rank.open("second")
        with pytest.raises(CorruptCheckpointError, match=r"no step of the run can be restored: .*`raystate rm STORAGE`"):
            manager.restore(state)

    with world:
        world.play(script)
        world.kill_coordinator()
        remove_run(open_storage(storage))
        assert not Path(storage.removeprefix("file://")).exists()
