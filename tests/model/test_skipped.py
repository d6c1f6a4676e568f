"""A step that found no slot is snapshotted after all when the training thread turns to something else."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from raystate.manager import skipped
from tests.model.world import Rank, World

FAST = 40  # saves without a moment between: more than there are slots
EVALUATION_S = 5.0


def back_at(leave: Callable[[int, Any], Any], *, ranks: int = 1, state: Callable[[int], Any] | None = None) -> Any:
    """What a new group restores after the one before was killed while it did something else than to save."""
    make = state or (lambda step: {"w": jax.numpy.full(1000, step, np.float32)})
    world = World(1, ranks=ranks, nodes=ranks, save_every_steps=1000)
    found: list[Any] = []

    def train(rank: Rank) -> None:
        manager = rank.begin(make(0))
        for step in range(1, FAST + 1):
            tree = make(step)
            manager.save(step, tree)
            leave(step, tree)
        rank.rest(EVALUATION_S)

    def again(rank: Rank) -> None:
        restored = rank.open("second").restore(make(0))
        assert restored is not None
        found.append((restored.step, restored.tier, float(restored.state["w"][0])))

    world.play_all(train, again)
    assert len(set(found)) == 1
    return found[0]


def kept(_step: int, _tree: Any) -> None:
    """The script keeps its state."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_newest_step_is_snapshotted_while_the_loop_stands_still(ranks: int):
    assert back_at(kept, ranks=ranks) == (FAST, "memory", FAST)


def test_a_state_that_was_donated_is_not():
    donate = jax.jit(lambda tree: {"w": tree["w"] + 1}, donate_argnums=0)
    step, tier, value = back_at(lambda _, tree: donate(tree))
    assert step < FAST and tier == "memory" and value == step


def test_what_the_script_does_to_its_numpy_arrays_afterwards_is_not_in_it():
    def spoil(_step: int, tree: Any) -> None:
        tree["w"][:] = -1

    assert back_at(spoil, state=lambda step: {"w": np.full(1000, step, np.float32)}) == (FAST, "memory", FAST)


def test_an_array_of_which_this_process_has_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline's stage on other processes: save() raised IndexError when no slot was free."""

    class Elsewhere:
        dtype = np.dtype(np.float32)
        sharding = SimpleNamespace(addressable_devices=frozenset())

        def is_deleted(self) -> bool:
            return False

        def addressable_data(self, index: int) -> None:
            raise IndexError(index)

    monkeypatch.setattr(jax, "Array", Elsewhere)
    skipped._take_apart(Elsewhere())
