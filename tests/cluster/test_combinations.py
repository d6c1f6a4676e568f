"""Deaths that meet, and a driver that never comes back. Sleepers are the drill's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster.strikes import coordinator_pid, held, held_pids, host_pid, newest_in_memory
from tests.cluster.training import STEPS, Driver, Training, wait_for


@pytest.mark.long
def test_deaths_that_meet(ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str]) -> None:
    run = make_run()
    config = raystate.StateConfig(
        storage=run.storage, run=run.run, save_every_steps=5, barrier_timeout_s=60.0, start_timeout_s=60.0
    )
    training = Training(config, tmp_path / "out", steps=STEPS, pause_at=20)
    training.wait_step(6)
    # A trainer, and one of the new ones while it restores.
    with held("restoring", training, before=lambda: training.kill_trainer(1)):
        victim = held_pids("restoring")[0]
        os.kill(victim, signal.SIGKILL)
    # The Coordinator and a trainer at once.
    training.wait_step(training.events.newest_step() + 4)
    doomed = (coordinator_pid(training), training.events.pids()[0])
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    # A HostActor while trainers restore from its memory.
    training.wait_step(training.events.newest_step() + 4)
    host = host_pid(training)
    with held("restoring", training, before=lambda: training.kill_trainer(1)):
        os.kill(host, signal.SIGKILL)
    training.finish()
    assert training.digests() == undisturbed
    assert run_actors(run_hash(config.storage, config.run)) == []


@pytest.mark.long
def test_the_run_is_released_when_the_driver_never_comes_back(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    driver = Driver(run, tmp_path, address=ray_cluster.address, steps=STEPS, pause_at=20, idle_timeout_s=2.0, save_every_steps=1000)
    driver.wait_step(6)
    driver.kill()
    before = newest_in_memory(run)
    name = run_hash(run.storage, run.run)
    wait_for(lambda: run_actors(name) == [], "the end of the run's actors")
    newest = raystate.Reader(run.storage).latest_step()
    assert newest == before, "the newest snapshot was to be made durable"
