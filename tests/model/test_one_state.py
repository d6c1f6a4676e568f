"""A step number names one state: a second save of a step makes its capture durable, with metrics that came later."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raystate.core.formats.errors import CapacityError
from raystate.reader import Reader
from tests.model.world import Rank, World

FIRST, OTHER = {"w": np.full(1000, 1.0)}, {"w": np.full(1000, 2.0)}
METRICS, CUSTOM = {"accuracy": 0.5}, {"note": "evaluated"}


def play(script: Any, *, ranks: int = 1, **config: Any) -> None:
    with World(1, ranks=ranks, nodes=ranks, **{"save_every_steps": 100, **config}) as world:
        world.play(script, ranks)


def stored(rank: Rank) -> float:
    restored = Reader(rank.world.config.storage).restore(FIRST, step=1)
    return float(restored.state["w"][0])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("pause_s", [0.0, 1.0], ids=["while it is copied", "when it is whole"])
def test_an_evaluation_after_the_step_makes_its_capture_durable(ranks: int, pause_s: float):
    def script(rank: Rank) -> None:
        manager = rank.begin(FIRST)
        assert not manager.save(1, FIRST, metrics={"loss": 1.0})
        rank.rest(pause_s)
        assert manager.save(1, OTHER, metrics=METRICS, custom=CUSTOM, force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
        found = manager.metadata(1)
        assert (found.metrics, found.custom) == (METRICS, CUSTOM)
        manager.close()
        assert stored(rank) == 1.0

    play(script, ranks=ranks)


def test_metrics_may_still_be_computing_and_be_donated_afterwards():
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)

    def script(rank: Rank) -> None:
        manager = rank.begin(FIRST)
        manager.save(1, FIRST)
        accuracy = jnp.ones(()) * 3
        assert manager.save(1, FIRST, metrics={"accuracy": accuracy}, force=True)
        donate(accuracy)
        manager.close()
        assert Reader(rank.world.config.storage).metadata(1).metrics == {"accuracy": 3.0}

    play(script)


@pytest.mark.parametrize("snapshots", [0, 2])
def test_a_step_without_a_capture_is_captured_by_the_forced_call(snapshots: int):
    def script(rank: Rank) -> None:
        manager = rank.begin(FIRST)
        assert not manager.save(1, OTHER)
        assert manager.save(1, FIRST, metrics=METRICS, force=True)
        manager.wait_until_finished()
        assert manager.metadata(1).metrics == METRICS
        manager.close()
        assert stored(rank) == 1.0

    play(script, snapshot_every_steps=snapshots)


@pytest.mark.parametrize("force", [False, True])
def test_metrics_of_a_step_that_is_durable_come_too_late(force: bool, caplog: pytest.LogCaptureFixture):
    def script(rank: Rank) -> None:
        manager = rank.begin(FIRST)
        assert manager.save(1, FIRST, metrics={"loss": 1.0}, force=True)
        assert not manager.save(1, FIRST, force=force)
        manager.wait_until_finished()
        assert not manager.save(1, OTHER, metrics=METRICS, force=force)
        manager.close()
        assert Reader(rank.world.config.storage).metadata(1).metrics == {"loss": 1.0}
        assert stored(rank) == 1.0

    with caplog.at_level(logging.WARNING, "raystate"):
        play(script)
    told = [one.getMessage() for one in caplog.records if "too late" in one.getMessage()]
    assert told == ["step 1 will be durable already: the metrics and custom values of this save() come too late"]


def test_later_values_that_have_no_room_are_refused_and_leave_no_trace():
    def script(rank: Rank) -> None:
        manager = rank.begin(FIRST)
        manager.save(1, FIRST)
        with pytest.raises(CapacityError, match="captured already"):
            manager.save(1, FIRST, custom="x" * 100_000, force=True)
        assert manager.save(1, FIRST, custom=CUSTOM, force=True)
        manager.save(2, FIRST, custom="x" * 100_000)
        assert manager.save(2, FIRST, custom="y" * 100_000, force=True), "as much as the first"
        manager.close()
        reader = Reader(rank.world.config.storage)
        assert (reader.metadata(1).custom, reader.metadata(2).custom) == (CUSTOM, "y" * 100_000)

    play(script)


def test_a_restart_from_memory_has_the_later_metrics():
    found: list[Any] = []
    world = World(1, ranks=1, nodes=1, save_every_steps=100)

    def train(rank: Rank) -> None:
        manager = rank.begin(FIRST)
        manager.save(1, FIRST)
        rank.world.storage.out = True
        assert manager.save(1, FIRST, metrics=METRICS, custom=CUSTOM, force=True)
        rank.rest(1.0)

    def again(rank: Rank) -> None:
        restored = rank.open("second").restore(FIRST)
        assert restored is not None
        found.append((restored.step, restored.tier, restored.metrics, restored.custom))

    world.play_all(train, again)
    assert found == [(1, "memory", METRICS, CUSTOM)]
