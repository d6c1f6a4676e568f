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


@pytest.mark.long
def test_quickstart_of_ray_with_equal_values(ray_address: str, place: Callable[[str], Place]) -> None:
    """It dies once: its ranks wait for each other nowhere, so a second death may come before the other rank has begun."""
    there = place("killed")
    fit(there, there.given("quickstart", 1, seed="same"), ranks=2, devices=1)
    check([fitted(0, STEPS)] * 2, there.end(2), deaths=1)


@pytest.mark.long
def test_quickstart_of_ray_as_it_stands_is_refused(ray_address: str, place: Callable[[str], Place]) -> None:
    """Soon and once, whatever there is still to do; and the corrected script is not held to the values that were refused."""
    there = place("refused")
    with pytest.raises(raystate.ConfigError, match=OWN_VALUES):
        fit(there, there.given("quickstart", steps=10**6, seed="rank"), ranks=2, devices=1)
    assert raystate.Reader(there.storage).all_steps() == []
    fit(there, there.given("quickstart", seed="same"), ranks=2, devices=1)
    assert there.end(2).begun == [[0, 0], [0, 0]]
    assert there.end(2).digests == [fitted(0, STEPS)] * 2


@pytest.mark.long
def test_gpt2_of_ray_with_a_dataset(groups: Any) -> None:
    from tests.programs.gpt2 import dataset

    check(*groups(fit_with_callback, "gpt2", ranks=2, devices=1, datasets={"train": dataset()}))


@pytest.mark.long
def test_gemma_on_fsdp_x_tensor(groups: Any) -> None:
    check(*groups(fit, "gemma", ranks=2, devices=2))
