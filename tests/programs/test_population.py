"""The population of docs/howto/ray-tune.md, whose weak trial goes on from the better one's state, and is killed after that."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import raystate
from tests.docs.checks import population
from tests.docs.running import fences

PAGE = Path(__file__).parents[2] / "docs/howto/ray-tune.md"
SAVES = "            manager.save(step, state"
DIES = """            if begun and step == 8 and not os.path.exists(f"{population}.killed"):
                open(f"{population}.killed", "w").close()
                os.kill(os.getpid(), 9)
"""


@pytest.mark.long
def test_a_weak_trial_goes_on_from_the_better_ones_bits_and_from_its_own_after_a_death(ray_address: str, tmp_path: Path) -> None:
    from ray import tune

    del ray_address  # this process has joined it
    ((_, program),) = [fence for fence in fences(PAGE, "python") if "PopulationBasedTraining" in fence[1]]
    assert program.count(SAVES) == 1
    names: dict[str, Any] = {"__name__": "__main__", "os": os, "jnp": jnp, "tune": tune, "raystate": raystate}
    with contextlib.chdir(tmp_path):
        exec(compile(program.replace(SAVES, DIES + SAVES), str(PAGE), "exec"), names)
    assert (tmp_path / "runs/population.killed").exists()
    assert not names["population_results"].errors
    population(names, tmp_path)
