"""Somebody removes the files of the snapshots in host memory: systemd-logind at a user's last logout, or a cleaner."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import raystate
from tests.model.vanishing import REMOVALS, everything, the_layouts
from tests.model.world import Rank, World

STEPS = 24


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("remove", REMOVALS)
def test_a_run_whose_files_vanish_goes_on(remove: Callable[[Path], None], seed: int) -> None:
    """What was promised is durable or named, steps become durable again, and a restart finds the newest in memory."""
    ranks = 1 + seed % 2
    world = World(seed, ranks=ranks, nodes=1, save_every_steps=3, keep_last=None)
    promised, lost, durable, restored = set[int](), set[int](), set[int](), list[tuple[int, str]]()

    def trains(rank: Rank) -> None:
        manager = rank.begin()
        for step in range(1, STEPS + 1):
            if step == 10 + seed and not rank.number:
                loop = next(iter(world.hosts.values())).loop
                assert loop is not None
                remove(loop.arena.path)
            rank.rest(0.3)
            if manager.save(step, {"w": np.full(8, step, np.float32)}):
                promised.add(step)
        try:
            manager.wait_until_finished()
        except raystate.StorageError as error:
            lost.update(map(int, re.findall(r"\bstep (\d+)\b", str(error))))
        manager.save(STEPS + 1, {"w": np.full(8, STEPS + 1, np.float32)})
        rank.rest(2.0)
        durable.update(manager.all_steps())

    def goes_on(rank: Rank) -> None:
        found = rank.open("second").restore()
        assert found is not None
        assert found.state["w"][0] == found.step
        restored.append((found.step, found.tier))

    with world:
        world.play(trains, ranks)
        began_s = world.now_s
        world.play(goes_on, ranks)
        assert world.now_s - began_s < 10.0, "a restart waits for nobody"
    assert promised <= durable | lost and len(lost) <= 2, (promised, durable, lost)
    assert max(durable) == STEPS, "steps become durable again"
    assert restored == [(STEPS + 1, "memory")] * ranks


def _hold(rank: Rank) -> raystate.StateManager:
    """Step 1 lies in memory only."""
    manager = rank.begin()
    manager.save(1, {"w": np.ones(8, np.float32)})
    rank.rest(0.5)
    return manager


def test_nobody_waits_for_a_word_that_nobody_can_read() -> None:
    """A restore in a living trainer whose files have vanished, and a Coordinator that has never heard of it."""
    world = World(0, ranks=1, nodes=1, save_every_steps=100)
    (host,) = world.hosts.values()

    def trains(rank: Rank) -> None:
        manager = _hold(rank)
        assert host.loop is not None
        first = host.loop
        everything(first.arena.path)
        rank.rest_until(lambda: host.loop not in (None, first))
        world.kill_coordinator()
        began_s = world.now_s
        assert manager.restore() is None
        assert world.now_s - began_s < 10.0

    world.play_all(trains)


def test_a_slot_without_its_layout_is_not_adopted() -> None:
    world = World(0, ranks=1, nodes=1, save_every_steps=100)
    (host,) = world.hosts.values()
    found: list[object] = []
    with world:
        world.play(lambda rank: _hold(rank) and None)
        assert host.loop is not None
        the_layouts(host.loop.arena.path)
        host.crash()
        host.start()
        world.play(lambda rank: found.append(rank.open("second").restore()))
    assert found == [None]
