"""A worker group that starts while storage is out: what lies in memory is enough to go on."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

import raystate
from tests.model.world import Rank, World, state


def test_a_run_goes_on_from_memory_although_its_storage_is_a_file_now() -> None:
    """Seed 1 of the drill: an outage that met a restart ended the run as a mistake in its config."""
    world = World(save_every_steps=100)
    storage = Path(world.config.storage.removeprefix("file://"))
    found: list[raystate.Restored] = []

    def trains(rank: Rank) -> None:
        manager = rank.begin(state(0))
        manager.save(1, state(1))
        rank.rest(5.0)  # it is staged by then

    def goes_on(rank: Rank) -> None:
        manager = rank.open("second")
        restored = manager.restore(state(0))
        assert restored is not None
        found.append(restored)

    with world:
        world.play(trains)
        storage.rename(aside := storage.with_name("aside"))
        storage.write_text("storage is out\n")
        world.storage.out = True
        world.play(goes_on)
        assert (found[0].step, found[0].tier) == (1, "memory")
        storage.unlink()
        aside.rename(storage)


def test_a_close_in_an_outage_names_every_step_that_it_cannot_keep() -> None:
    """It named the last one. Whoever takes that for the end never heard of the others."""
    world = World(2, ranks=1, nodes=1, save_every_steps=1, save_timeout_s=10.0)
    named: list[set[int]] = []
    promised: list[int] = []

    def trains(rank: Rank) -> None:
        manager = rank.begin(state(0))
        manager.save(1, state(1))
        manager.wait_until_finished()
        world.storage.out = True
        promised.extend(step for step in range(2, 6) if manager.save(step, state(step)))
        with pytest.raises(raystate.StorageError) as failure:
            manager.close()
        named.append({int(step) for step in re.findall(r"\bstep (\d+)\b", str(failure.value))})
        world.storage.out = False
        with contextlib.suppress(raystate.StorageError):  # what has given way meanwhile is lost
            manager.close()

    world.play_all(trains)
    assert len(promised) == 4
    assert named[0] >= {*promised}
