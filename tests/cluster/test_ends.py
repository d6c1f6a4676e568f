"""How a run ends on a real Ray: by its newest step, by what is known of its ranks, and without a trace where it had no step."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from raystate.storage.names import WORK
from tests.cluster.training import REPO, quiet_run_config, scaling, wait_for
from tests.processes import run_python

pytestmark = pytest.mark.usefixtures("by_value")
LAST = 6


@pytest.fixture
def launch(ray_cluster: Any, make_run: Any, tmp_path: Path) -> Callable[..., raystate.RunResult]:
    def fit(train_fn: Any, workers: int, *, max_failures: int = 0, **settings: Any) -> raystate.RunResult:
        run = make_run()
        return raystate.fit(
            train_fn,
            raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1, **settings),
            train_loop_config={"storage": run.storage, "folder": str(tmp_path)},
            max_failures=max_failures,
            scaling_config=scaling(workers),
            run_config=quiet_run_config(tmp_path, 1),
        )

    return fit


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


def test_an_end_whose_newest_step_is_durable_is_a_good_one(launch: Callable[..., raystate.RunResult]) -> None:
    result = launch(_loses_older_steps, 1)
    stored = raystate.Reader(result.path).all_steps()
    assert result.return_value == "evaluated" and result.step == stored[-1]
    lost = [int(found[1]) for text in result.lost if (found := re.match(r"step (\d+)", text))]
    assert lost and max(lost) < result.step, result.lost
    assert not {*lost} & {*stored}


def _makes_no_manager_on_one_rank(_config: dict[str, Any]) -> None:
    from ray.train import get_context

    if get_context().get_world_rank() == 0:
        raystate.StateManager()


def test_a_rank_that_returns_without_a_manager_is_named_at_once(launch: Callable[..., raystate.RunResult]) -> None:
    began_s = time.monotonic()
    with pytest.raises(
        raystate.RunFailedError, match=r"rank 1.* did not construct a StateManager: its training function has returned"
    ):
        launch(_makes_no_manager_on_one_rank, 2, start_timeout_s=3600.0)
    assert time.monotonic() - began_s < 3600.0


def _hangs_on_one_rank(_config: dict[str, Any]) -> None:
    import numpy as np
    from ray.train import get_context

    manager = raystate.StateManager()
    manager.restore()
    for step in range(1, LAST):
        if step > 1 and get_context().get_world_rank() == 1:
            time.sleep(3600.0)
        manager.save(step, {"x": np.zeros(8)})
    manager.close()


def test_a_close_beside_a_rank_that_hangs_names_it(launch: Callable[..., raystate.RunResult]) -> None:
    began_s = time.monotonic()
    with pytest.raises(raystate.RunFailedError, match=r"BarrierTimeoutError: .*rank 1 "):
        launch(_hangs_on_one_rank, 2, barrier_timeout_s=6.0, save_timeout_s=3600.0)
    assert time.monotonic() - began_s < 3600.0


def _dies_with_nothing_left_to_do(config: dict[str, Any]) -> int:
    import numpy as np

    died = Path(config["folder"]) / "died"
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": np.zeros(8)})
        for step in range(restored.step, LAST):
            manager.save(step + 1, restored.state)
        if restored.step < LAST and not died.exists():
            died.touch()
            manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
    return restored.step


def test_a_restart_that_has_nothing_left_to_do_is_told_as_it_was(launch: Callable[..., raystate.RunResult]) -> None:
    result = launch(_dies_with_nothing_left_to_do, 1, max_failures=3)
    (recovery,) = result.recoveries
    assert (result.return_value, recovery.step, recovery.steps_repeated, result.lost) == (LAST, LAST, 0, ())
    assert recovery.tier == "memory" and recovery.seconds is not None


DIES_EARLY = """
import json, os, signal, sys
import jax.numpy as jnp, ray, raystate
given = json.loads(sys.argv[1])
ray.init(address=given.pop("address"), log_to_driver=False, logging_level="ERROR")
manager = raystate.StateManager(raystate.StateConfig(**given))
manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_that_died_before_its_first_step_lets_go(ray_cluster: Any, make_run: Any) -> None:
    run = make_run()
    given = json.dumps({"address": ray_cluster.address, "storage": run.storage, "run": run.run})
    name = run_hash(run.storage, run.run)

    def dies() -> None:
        run_python("-c", DIES_EARLY, given, env={**os.environ, "PYTHONPATH": str(REPO)}, code=-signal.SIGKILL)

    dies()
    shutil.rmtree(run.storage)
    dies()  # it begins anew, whether or not the run of before has ended by now
    wait_for(lambda: not run_actors(name), "the end of the run's actors")
