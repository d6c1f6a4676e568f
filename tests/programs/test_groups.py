"""Programs of several processes: one of them is killed in mid-run, and the group starts again by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest

import raystate
from tests.programs.digest import digests
from tests.programs.running import STEPS, Place, check, fit, fit_with_callback

OWN_VALUES = (
    r"6 leaves that each process holds for itself differ between ranks: .*state/params/b \(rank 0 \| rank 1\).*"
    r"Make it a global array .*, equal on all ranks, or an item with get_state and set_state"
)


def fitted(seed: int, steps: int) -> dict[str, str]:
    """What one process of the quickstart comes to, without Ray and without saving."""
    from tests.programs.quickstart import problem

    init, train_step = problem(seed)
    state = jax.jit(init)()
    for _ in range(steps):
        state, _ = train_step(state)
    return digests(state)


def test_quickstart_of_ray_with_equal_values(ray_address: str, place: Callable[[str], Place]) -> None:
    there = place("killed")
    fit(there, there.given("quickstart", 1, seed="same"), ranks=2, devices=1)
    check([fitted(0, STEPS)] * 2, there.end(2))


def test_quickstart_of_ray_as_it_stands(ray_address: str, place: Callable[[str], Place]) -> None:
    """After a kill each rank goes on with what was its own. The first step that is to be durable is refused, and that ends it at once."""
    there, due = place("killed"), STEPS - 2
    given = there.given("quickstart", 1, tell=due - 1, steps=10**6, seed="rank")
    with pytest.raises(raystate.ConfigError, match=OWN_VALUES) as caught:
        fit(there, given, ranks=2, devices=1, save_every_steps=due)
    assert caught.value.step == due
    check([fitted(rank, due - 1) for rank in (0, 1)], there.end(2))
    assert raystate.Reader(there.storage).all_steps() == []


def test_gpt2_of_ray_with_a_dataset(groups: Any) -> None:
    from tests.programs.gpt2 import dataset

    check(*groups(fit_with_callback, "gpt2", ranks=2, devices=1, datasets={"train": dataset()}))


def test_gemma_on_fsdp_x_tensor(groups: Any) -> None:
    check(*groups(fit, "gemma", ranks=2, devices=2))
