"""The folder of a run is moved to another disk while a Ray cluster holds the run in memory, and a link is left in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raystate
from tests.cluster.scripts import Script
from tests.cluster.training import wait_for

pytestmark = pytest.mark.usefixtures("by_value")


def test_a_moved_run_goes_on_and_says_why_memory_is_of_no_use(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    import ray

    run = make_run()
    with Script(ray_cluster.address, "", run, tmp_path / "log") as script:
        wait_for(lambda: len(script.said("step")) > 3, "some steps")
    disk = tmp_path / "disk"
    Path(run.storage).rename(disk)
    Path(run.storage).symlink_to(disk)
    with raystate.StateManager(raystate.StateConfig(storage=run.storage, run=run.run)) as manager:
        assert manager.restore() is None, "no step was durable"
        assert manager.config.storage == f"file://{disk.resolve()}"
    logs = Path(ray.get_runtime_context().get_temp_dir()) / ray.get_runtime_context().get_session_name() / "logs"
    said = f"run {run.run!r} is in file://{disk.resolve()} now, and was at another path when it last trained on this cluster"
    wait_for(lambda: any(said in path.read_text(errors="replace") for path in logs.glob("worker-*")), "the line")
    assert disk.is_dir() and Path(run.storage).is_symlink()
