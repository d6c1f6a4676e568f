"""How a run ends on a real Ray: an end is judged by its newest step, and by what is so."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.storage.names import WORK

pytestmark = pytest.mark.usefixtures("by_value")


def _loses_older_steps(config: dict[str, Any]) -> str:
    """Storage is out for some steps, and back for the last."""
    import jax.numpy as jnp

    work = Path(config["storage"]) / WORK
    with raystate.StateManager() as manager:
        state = manager.restore_or_init(lambda: {"x": jnp.zeros(8)}).state
        manager.save(1, state)
        manager.wait_until_finished()
        shutil.rmtree(work)
        work.touch()
        step, lost = 1, ""
        while "gave way" not in lost:
            step += 1
            manager.save(step, state)
            time.sleep(0.05)
            try:
                manager.check_for_errors()
            except raystate.StorageError as error:
                lost = str(error)
        work.unlink()
        manager.save(step + 1, state)
    return "evaluated"


def test_an_end_whose_newest_step_is_durable_is_a_good_one(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig

    run = make_run()
    result = raystate.fit(
        _loses_older_steps,
        raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1),
        train_loop_config={"storage": run.storage},
        scaling_config=ScalingConfig(num_workers=1, resources_per_worker={"CPU": 1, "trainer": 1}),
        run_config=RunConfig(name="run", storage_path=str(tmp_path / "ray")),
    )
    assert result.return_value == "evaluated" and result.step == raystate.Reader(run.storage).latest_step()
    lost = [int(found[1]) for text in result.lost if (found := re.match(r"step (\d+)", text))]
    assert lost and max(lost) < result.step, result.lost
    assert not {*lost} & {*raystate.Reader(run.storage).all_steps()}


def _makes_no_manager_on_one_rank(config: dict[str, Any]) -> None:
    from ray.train import get_context

    if get_context().get_world_rank() == 0:
        with raystate.StateManager() as manager:
            manager.restore_or_init(dict)


def test_a_rank_that_returns_without_a_manager_is_named_at_once(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig

    run, began_s = make_run(), time.monotonic()
    with pytest.raises(
        raystate.RunFailedError, match=r"rank 1 did not construct a StateManager: its training function has returned"
    ):
        raystate.fit(
            _makes_no_manager_on_one_rank,
            raystate.StateConfig(storage=run.storage, run=run.run, start_timeout_s=3600.0),
            train_loop_config={"storage": run.storage},
            max_failures=0,
            scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "trainer": 1}),
            run_config=RunConfig(name="run", storage_path=str(tmp_path / "ray")),
        )
    assert time.monotonic() - began_s < 3600.0
