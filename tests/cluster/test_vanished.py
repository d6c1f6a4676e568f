"""A run whose files in shared memory are removed in its midst, as systemd-logind does at a user's last logout."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np

import raystate
from tests.cluster.training import wait_for


def test_a_run_whose_files_in_shared_memory_are_removed_goes_on(ray_cluster: Any, make_run: Any) -> None:
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=100)

    def state(step: int) -> dict[str, Any]:
        return {"w": np.full(1000, step, np.float32)}

    with raystate.StateManager(config) as manager:
        manager.restore()
        manager.save(1, state(1))
        [arena] = run.arenas()
        shutil.rmtree(arena)
        wait_for((arena / "bell").exists, "a new arena")
        for step in range(2, 20):
            manager.save(step, state(step))
        assert manager.save(20, state(20), force=True)
        manager.wait_until_finished()
        assert manager.all_steps() == [20]
        assert list(arena.glob("set-*")), "snapshots lie there again"
    assert run.arenas() == []
