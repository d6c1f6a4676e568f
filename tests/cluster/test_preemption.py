"""Nodes that are announced to go away: the run stops at one step, and moves on without waiting for their end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

import raystate
from jobs.striking import drain, kill_family, raylet_of, start_ray
from raystate.actors.naming import host_name
from raystate.storage import run_hash
from tests.cluster.strikes import pid_of, raylet_of_a_trainer
from tests.cluster.training import NODE, NODES, STEPS, Training, wait_for
from tests.patience import PATIENCE_S

FAR_S = 3600.0  # a run which waited for it would not end within the test's patience


@pytest.fixture
def leaving_node(ray_cluster: Any) -> Any:
    """Nodes appended to it are removed after the test, and others come in their place."""
    gone: list[Any] = []
    yield gone
    for node in gone:
        kill_family(raylet_of(node))
        ray_cluster.remove_node(node, allow_graceful=False)
    while len(ray_cluster.list_all_nodes()) < NODES:
        start_ray(lambda: ray_cluster.add_node(**NODE))
    ray_cluster.wait_for_nodes(PATIENCE_S)


def check_moved_on(training: Training, result: Any, node: Any, why: str) -> None:
    """One restart, from the step at which everybody had stopped, without the node."""
    (recovery,) = result.recoveries
    assert recovery.interrupted
    assert recovery.steps_repeated == 0
    assert recovery.step == training.events.newest_start()["step"]
    assert f"(host {node.node_id[:8]}) goes away: {why}" in recovery.cause


def test_a_drained_node_is_left_at_once_and_without_loss(
    ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str], leaving_node: list[Any]
) -> None:
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000)
    training = Training(config, tmp_path / "out", steps=STEPS, step_s=0.02, pause_at=20)
    training.wait_step(6)
    raylet, node = raylet_of_a_trainer(training, ray_cluster)
    leaving_node.append(node)
    drain(ray_cluster.address, node.node_id, within_s=FAR_S)
    training.go_on(50)
    wait_for(lambda: training.events.starts() == 2, "another start", failed=lambda: training.error)
    start = training.events.newest_start()
    # Everybody had stopped at this step, and it was made durable before anything else.
    assert raystate.Reader(run.storage).latest_step() == start["step"] > 6
    on_the_node = {process.pid for process in psutil.Process(raylet).children()}
    assert not on_the_node & set(training.events.pids().values()), "it is still there, and nobody trains on it"
    result = training.finish()
    assert training.digests() == undisturbed
    check_moved_on(training, result, node, "Ray drains it")


@pytest.mark.long
def test_who_does_not_answer_is_ended_and_the_run_moves_on(
    ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str], leaving_node: list[Any]
) -> None:
    """Nobody can stop at a common step: rank 1 hangs in one. It counts as no failure, or this run would end."""
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000)
    training = Training(config, tmp_path / "out", steps=STEPS, step_s=0.02, hang_at=15, max_failures=0)
    training.wait_step(15)
    _, node = raylet_of_a_trainer(training, ray_cluster)
    leaving_node.append(node)
    drain(ray_cluster.address, node.node_id, within_s=40)
    result = training.finish()
    assert training.digests() == undisturbed
    (recovery,) = result.recoveries
    assert recovery.interrupted
    assert "no step to stop at together" in recovery.cause
    assert f"(host {node.node_id[:8]}) goes away: Ray drains it" in recovery.cause
    assert recovery.steps_repeated == 15 - recovery.step  # none, but on a machine too busy for a snapshot of each step of 0.02 s


@pytest.mark.long
def test_a_node_whose_processes_get_sigterm_is_left(
    ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str]
) -> None:
    """Ray knows nothing of it: only the launcher keeps the workers away."""
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000)
    training = Training(config, tmp_path / "out", steps=STEPS, step_s=0.02, pause_at=20)
    training.wait_step(6)
    raylet, node = raylet_of_a_trainer(training, ray_cluster)
    actor = pid_of(host_name(run_hash(run.storage, run.run), node.node_id))
    assert actor is not None
    os.kill(actor, signal.SIGTERM)
    training.go_on(50)
    wait_for(lambda: training.events.starts() == 2, "another start", failed=lambda: training.error)
    on_the_node = {process.pid for process in psutil.Process(raylet).children()}
    assert actor in on_the_node, "it keeps what it holds"
    assert not on_the_node & set(training.events.pids().values())
    result = training.finish()
    assert training.digests() == undisturbed
    check_moved_on(training, result, node, "its processes got SIGTERM")
