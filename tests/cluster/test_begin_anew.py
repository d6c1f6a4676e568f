"""A run that was removed, by hand or by `raystate rm`, while a Ray cluster holds it in memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster.scripts import Script
from tests.cluster.training import quiet_run_config, scaling, wait_for
from tests.patience import PATIENCE_S
from tests.processes import run_python

pytestmark = pytest.mark.usefixtures("by_value")


def train(given: dict[str, str]) -> int:
    import jax.numpy as jnp

    Path(given["began"]).touch()
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        manager.save(restored.step + 1, restored.state)
    return restored.step


def killed(ray_cluster: Any, run: Any, tmp_path: Path) -> None:
    """A script trains, and dies: its cluster holds the run."""
    with Script(ray_cluster.address, "", run, tmp_path / "log") as script:
        wait_for(lambda: len(script.said("step")) > 3, "some steps")
        code, said = rm(ray_cluster, run.storage)
        assert (code, "is in use by Ray job" in said) == (1, True), said


def rm(ray_cluster: Any, storage: str, *more: str) -> tuple[int, str]:
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address}
    ran = run_python("-m", "raystate", "rm", storage, "--yes", *more, env=environment, code=None)
    return ran.returncode, ran.stdout + ran.stderr


def test_fit_is_refused_before_anything_starts_and_takeover_begins_anew(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    run, began = make_run(), tmp_path / "began"
    killed(ray_cluster, run, tmp_path)
    shutil.rmtree(run.storage)
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1)
    given: dict[str, Any] = {
        "train_loop_config": {"began": str(began)}, "scaling_config": scaling(1), "run_config": quiet_run_config(tmp_path, 1),
    }  # fmt: skip
    with pytest.raises(raystate.StorageError, match=r"takeover=True to give up .*StateManager and fit take it"):
        raystate.fit(train, config, **given)
    assert not began.exists(), "a worker has started"
    result = raystate.fit(train, config, takeover=True, **given)
    assert (result.return_value, result.step) == (0, 1)


def test_a_script_that_trains_on_is_told_that_its_run_was_given_up(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    with Script(ray_cluster.address, "", run, tmp_path / "log") as script:
        wait_for(lambda: len(script.said("step")) > 3, "some steps")
        shutil.rmtree(run.storage)
        with raystate.StateManager(raystate.StateConfig(storage=run.storage, run=run.run), takeover=True) as manager:
            assert manager.restore() is None
            assert script.process.wait(PATIENCE_S) == 1
    assert "StaleAttemptError" in script.out.read_text() and "was given up" in script.out.read_text()


def test_rm_ends_what_the_cluster_holds_and_the_next_start_begins_anew(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    name = run_hash(run.storage, run.run)
    killed(ray_cluster, run, tmp_path)
    wait_for(lambda: rm(ray_cluster, run.storage)[0] == 0, "the script's end is known")
    assert not Path(run.storage).exists()
    assert run_actors(name) == [] and run.arenas() == []
    with raystate.StateManager(raystate.StateConfig(storage=run.storage, run=run.run)) as manager:
        assert manager.restore() is None
