"""kill -9 of each kind of process in mid-training: the run ends by itself, bit-equal to the undisturbed one."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

import raystate
from raystate.actors.naming import NAMESPACE, coordinator_name, find_hosts, host_name, run_actors
from raystate.storage import run_hash
from tests.cluster.training import Training, wait_for

STEPS = 36


def _config(make_run: Any) -> raystate.StateConfig:
    run = make_run()
    return raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=10, barrier_timeout_s=60.0, start_timeout_s=60.0)


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of a run that nobody disturbs, by rank."""
    out = tmp_path_factory.mktemp("undisturbed")
    config = raystate.StateConfig(storage=str(out / "run"), run=f"calm-{os.getpid()}", save_every_steps=10)
    training = Training(config, out / "out", steps=STEPS, step_s=0.0)
    training.finish()
    return training.digests()


def test_trainers_killed_twice(
    ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSTATE_STANDBY", "1")
    config = _config(make_run)
    training = Training(config, tmp_path / "out", steps=STEPS)
    training.wait_step(7)
    first, _ = training.kill_trainer(1)
    training.wait_step(first + 8)
    second, _ = training.kill_trainer(0)
    result = training.finish()
    assert training.digests() == undisturbed
    starts = [event for event in training.events.read() if event["event"] == "start" and event["rank"] == 0]
    assert [start["tier"] for start in starts] == ["init", "memory", "memory"]
    # At most one effective snapshot interval is repeated: one step, at steps of 0.2 s.
    assert starts[1]["step"] >= first - 1
    assert starts[2]["step"] >= second - 1
    assert [(recovery.tier, recovery.step) for recovery in result.recoveries] == [
        ("memory", starts[1]["step"]),
        ("memory", starts[2]["step"]),
    ]
    assert result.step == STEPS
    assert run_actors(run_hash(config.storage, config.run)) == []


def test_host_actor_and_coordinator_killed(ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str]) -> None:
    config = _config(make_run)
    training = Training(config, tmp_path / "out", steps=STEPS)
    training.wait_step(6)
    name = run_hash(config.storage, config.run)
    for actor in (host_name(name, sorted(find_hosts(name))[0]), coordinator_name(name)):
        pid = wait_for(lambda actor=actor: _pid_of(actor), f"the pid of {actor}")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda actor=actor, pid=pid: _pid_of(actor) not in (None, pid), f"a new {actor}", failed=lambda: training.error)
        training.wait_step(training.events.newest_step() + 3)
    assert training.events.starts() == 1, "the trainers should not have noticed"
    # The new ones know what the old ones held: a trainer's death still comes back from memory.
    before, _ = training.kill_trainer(0)
    result = training.finish()
    assert training.digests() == undisturbed
    starts = [event for event in training.events.read() if event["event"] == "start" and event["rank"] == 0]
    assert [start["tier"] for start in starts] == ["init", "memory"]
    # Steps were skipped while nobody granted slots, so the effective interval may still be some steps.
    assert before - starts[1]["step"] <= 4
    assert result.step == raystate.Reader(config.storage).latest_step() == STEPS


def _pid_of(name: str) -> int | None:
    try:
        actor = ray.get_actor(name, namespace=NAMESPACE)
        hello = actor.pid.remote() if name.startswith("coordinator") else actor.hello.remote()
        found = ray.get(hello, timeout=5.0)
        return found if isinstance(found, int) else found[0]
    except (ValueError, RayActorError, GetTimeoutError):
        return None
