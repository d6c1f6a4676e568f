"""The loss of a node with all its memory, with peer copies: the run comes back from the memory of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster.strikes import kill_node, newest_in_memory
from tests.cluster.training import NODE, NODES, STEPS, Training, wait_for
from tests.patience import PATIENCE_S
from tests.processes import start_ray


@pytest.mark.long
def test_a_lost_node_costs_no_step_that_had_copies(ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str]) -> None:
    """Twice: after the first loss copies are made anew. Storage has no step to read any array from."""
    fresh = make_run()
    run = raystate.StateConfig(storage=fresh.storage, run=fresh.run, save_every_steps=10 * STEPS)
    training = Training(run, tmp_path, steps=STEPS, step_s=0.2, pause_at=12)

    def copied() -> int:
        """The newest snapshot, once it has its copies. Nothing trains meanwhile."""
        newest = newest_in_memory(run)
        return newest if newest > 0 and newest_in_memory(run, nodes=2) == newest else 0

    try:
        for step in (12, 24):
            training.wait_step(step)
            kept = wait_for(copied, f"copies of the newest snapshot at step {step}", failed=lambda: training.error)
            starts = training.events.starts()
            kill_node(training, ray_cluster)
            wait_for(lambda starts=starts: training.events.starts() > starts, "a start", failed=lambda: training.error)
            start_ray(lambda: ray_cluster.add_node(**NODE))
            ray_cluster.wait_for_nodes(PATIENCE_S)
            start = training.events.newest_start()
            assert kept <= start["step"] <= step
            # From the other node; unless the new node's HostActor had made itself a copy before its trainer looked.
            assert start["tier"] in ("peer", "memory")
            assert raystate.Reader(run.storage).all_steps() == []
        training.finish()
        assert training.digests() == undisturbed
    finally:
        training.go_to_end()
        while len(ray_cluster.list_all_nodes()) < NODES:
            start_ray(lambda: ray_cluster.add_node(**NODE))
    assert not run_actors(run_hash(run.storage, run.run))
