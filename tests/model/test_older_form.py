"""`restore_or_init(transforms=…)`: a run goes on from steps of an older form, and is started again with the same call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import ReferenceMismatchError
from raystate.manager import StateManager
from tests.model.test_every_tier import from_tier
from tests.model.test_restore_uses import Play, play  # noqa: F401 - a fixture

RENAMED = {r"encoder/(w|b)": r"enc/\1", "head": ("head", np.transpose)}


def older(fill: float) -> dict[str, Any]:
    return {"enc": {"w": jnp.full((4, 2), fill), "b": jnp.full(2, fill)}, "head": jnp.full((2, 3), fill)}


def newer(fill: float) -> dict[str, Any]:
    return {"encoder": {"w": jnp.full((4, 2), fill), "b": jnp.full(2, fill)}, "head": jnp.full((3, 2), fill)}


@pytest.mark.parametrize("tier", ["memory", "peer", "storage", "source"])
def test_a_step_of_an_older_form_is_taken_by_the_transforms(tier: str):
    def use(manager: StateManager, source: Any) -> Any:
        with pytest.raises(ReferenceMismatchError, match="encoder"):
            manager.restore_or_init(lambda: newer(0), **source)
        with pytest.raises(ReferenceMismatchError, match=r"encoder/b: .*'old/b'.*not in the checkpoint"):
            manager.restore_or_init(lambda: newer(0), transforms={**RENAMED, r"encoder/(\w)": r"old/\1"}, **source)
        return manager.restore_or_init(lambda: newer(0), transforms=RENAMED, **source)

    state = from_tier(tier, older(3), use).state
    assert state["head"].shape == (3, 2) and state["encoder"]["w"].shape == (4, 2)
    assert all((leaf == 3).all() for leaf in (state["encoder"]["w"], state["encoder"]["b"], state["head"]))


@pytest.mark.parametrize("tier", ["memory", "storage"])
@pytest.mark.parametrize(
    "transforms", [RENAMED, lambda tree: {"encoder": tree["enc"], "head": tree["head"].T}], ids=["map", "function"]
)
def test_the_next_start_takes_the_newer_form_as_it_is(tier: str, transforms: Any):
    restored = from_tier(tier, newer(5), lambda manager, _: manager.restore_or_init(lambda: newer(0), transforms=transforms))
    assert (restored.state["head"] == 5).all()


def test_a_source_is_always_transformed_and_the_runs_own_steps_are_not(play: Play, tmp_path: Path):  # noqa: F811
    """To begin with the averages: both forms are the same, and a restart must not take them for the weights again."""
    raystate.save(tmp_path / "pretrained", {"params": jnp.full(3, 1.0), "ema": jnp.full(3, 2.0)})

    def init() -> dict[str, Any]:
        return {"params": jnp.zeros(3), "ema": jnp.zeros(3), "new": jnp.full(2, 7.0)}

    def starts(manager: StateManager) -> None:
        got = manager.restore_or_init(init, source=tmp_path / "pretrained", transforms={"params": "ema"}, partial=True)
        assert {name: leaf.tolist()[0] for name, leaf in got.state.items()} == {"params": 2, "ema": 2, "new": 7}
        manager.save(1, {**got.state, "params": jnp.full(3, 9.0)}, force=True)
        manager.wait_until_finished()

    def resumes(manager: StateManager) -> None:
        got = manager.restore_or_init(init, source=tmp_path / "pretrained", transforms={"params": "ema"}, partial=True)
        assert (got.step, got.state["params"].tolist()) == (1, [9] * 3)

    play(starts)
    play(resumes)
