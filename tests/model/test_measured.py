"""What a save() that measures its steps waits for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from raystate.manager.cadence import Cadence
from raystate.waits import LEAST_SAVE_EVERY_S, UNMEASURED_SAVE_EVERY_S
from tests.model.world import World
from tests.patience import PATIENCE_S


def cadence(*, fails: bool) -> Any:
    session = SimpleNamespace(
        fails=fails, link=SimpleNamespace(clock=lambda: 0.0), config=SimpleNamespace(barrier_timeout_s=PATIENCE_S)
    )
    config: Any = SimpleNamespace(snapshot_every_steps=None)
    return Cadence(config, session, SimpleNamespace())  # type: ignore[arg-type]


def test_a_state_that_needs_a_rank_that_hangs_is_not_waited_for() -> None:
    comes = threading.Event()

    class Late:
        def block_until_ready(self) -> Late:
            comes.wait(PATIENCE_S)
            return self

    try:
        assert not cadence(fails=True)._is_computed({"x": Late()})
    finally:
        comes.set()
    assert cadence(fails=False)._is_computed({"x": Late()})


def test_a_donated_state_is_not_asked() -> None:
    """`is_ready` of such an array ends the process."""
    state = jnp.ones(4)
    jax.jit(lambda x: x + 1, donate_argnums=0)(state)
    assert not cadence(fails=False)._is_computed({"x": state, "n": 3, "a": np.ones(2)})


def test_the_default_interval_is_measured_and_told() -> None:
    """A save costs more of a step than it may: fewer follow, the same on both ranks."""
    kept: list[tuple[int, int]] = []

    def script(rank: Any) -> None:
        state = {"w": np.zeros(8, np.float32)}
        manager = rank.begin(state)
        for step in range(1, 200):
            before = manager._pipeline.machine.kept
            manager.save(step, state)
            taken = manager._pipeline.machine.kept != before
            if taken:
                kept.append((rank.number, step))
            rank.rest(0.1 + 0.05 * taken)
        manager.close()

    with World(3, ranks=2, nodes=2, save_every_steps=10_000, snapshot_every_steps=None) as world:
        world.play(script, 2)
    late = [[step for number, step in kept if number == rank and step > 120] for rank in range(2)]
    assert late[0] == late[1]
    assert 1 <= len(late[0]) <= 12
    assert len([step for number, step in kept if number == 0 and step < 20]) >= 12


@pytest.mark.more
def test_without_a_rule_a_durable_save_is_measured_and_the_next_one_is_due_accordingly() -> None:
    """It costs next to nothing here, so that the shortest interval follows; the third costs rank 0 two seconds."""
    promised: list[tuple[int, int]] = []
    costs: dict[int, list[float]] = {0: [], 1: []}

    def script(rank: Any) -> None:
        state = {"w": np.zeros(8, np.float32)}
        manager = rank.begin(state)
        for step in range(1, 440):
            is_durable = manager.save(step, state)
            if is_durable:
                promised.append((rank.number, step))
            rank.rest(1.0 + 2.0 * (is_durable and rank.number == 0 and len(promised) > 4))
        costs[rank.number] += manager._pipeline.machine.times.saves._costs
        manager.close()

    with World(3, ranks=2, nodes=2) as world:
        world.play(script, 2)
    mine, others = ([step for number, step in promised if number == rank] for rank in range(2))
    assert mine == others
    first, second, third = mine
    assert first == pytest.approx(UNMEASURED_SAVE_EVERY_S, abs=30)
    assert second - first == pytest.approx(LEAST_SAVE_EVERY_S, abs=10) == third - second
    assert costs[0] == pytest.approx([0.0, 0.0, 2.0], abs=0.3)
    assert costs[1] == pytest.approx([0.0, 0.0, 0.0], abs=0.3)
