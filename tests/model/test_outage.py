"""A worker group that starts while storage is out: what lies in memory is enough to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import raystate
from tests.model.world import Rank, World


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(8, step, np.float32)}


def test_a_run_goes_on_from_memory_although_its_storage_is_a_file_now() -> None:
    """Seed 1 of the drill: an outage that met a restart ended the run as a mistake in its config."""
    world = World(1, ranks=1, nodes=1, save_every_steps=100)
    storage = Path(world.config.storage.removeprefix("file://"))
    found: list[raystate.Restored] = []

    def trains(rank: Rank) -> None:
        manager = rank.open("first")
        manager.restore(state(0))
        manager.save(1, state(1))
        rank.rest(5.0)  # it is staged by then

    def goes_on(rank: Rank) -> None:
        manager = rank.open("second")
        restored = manager.restore(state(0))
        assert restored is not None
        found.append(restored)

    try:
        world.play(trains)
        storage.rename(aside := storage.with_name("aside"))
        storage.write_text("storage is out\n")
        world.storage.out = True
        world.play(goes_on)
        assert (found[0].step, found[0].tier) == (1, "memory")
        storage.unlink()
        aside.rename(storage)
    finally:
        world.storage.out = False
        world.close()
