"""Mistakes of users: each ends in an error that names the thing, within its deadline; nothing is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import raystate
from raystate.actors.naming import coordinator_name, find_hosts, host_name
from raystate.manager import session as _session
from raystate.storage import run_hash
from tests.cluster.strikes import pid_of
from tests.processes import job_environment, run_python


def _state(step: int = 0) -> dict[str, Any]:
    return {"w": jnp.full((4, 4), float(step)), "b": jnp.zeros(3), "n": 1}


@pytest.fixture
def config(ray_cluster: Any, make_run: Any) -> raystate.StateConfig:
    run = make_run()
    return raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=2)


@contextlib.contextmanager
def impatient(manager: raystate.StateManager, **timeouts: float) -> Iterator[None]:
    """Short deadlines for this block only: a start, a restore or a close takes a while on a busy machine."""
    patient = manager._session.config
    manager._session.config = patient.replace(**timeouts)
    try:
        yield
    finally:
        manager._session.config = patient


@contextlib.contextmanager
def asleep(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def actor_pid(config: raystate.StateConfig, *, coordinator: bool) -> int:
    name = run_hash(config.storage, config.run)
    found = pid_of(coordinator_name(name) if coordinator else host_name(name, find_hosts(name)[0]))
    assert found is not None
    return found


@pytest.mark.long
def test_a_host_actor_that_does_not_answer(config: raystate.StateConfig) -> None:
    with raystate.StateManager(config) as manager:
        node = find_hosts(run_hash(config.storage, config.run))[0]
        with (
            impatient(manager, start_timeout_s=3.0),
            asleep(actor_pid(config, coordinator=False)),
            pytest.raises(raystate.BarrierTimeoutError) as caught,
        ):
            manager.save(1, _state(1))
        assert str(caught.value).startswith(f"rank 0: no answer from the HostActor of node {node[:8]} to 'allot' for ")
        manager.save(2, _state(2))
    assert raystate.Reader(config.storage).all_steps() == [2]


@pytest.mark.long
def test_a_coordinator_that_does_not_answer(config: raystate.StateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_session, "REPLY_MARGIN_S", 1.0)
    with raystate.StateManager(config) as manager:
        manager.restore(_state())
        with (
            impatient(manager, save_timeout_s=1.0, barrier_timeout_s=1.0),
            asleep(actor_pid(config, coordinator=True)),
            pytest.raises(raystate.BarrierTimeoutError) as caught,
        ):
            manager.wait_until_finished()
        assert re.match(
            r"rank 0: no answer from the Coordinator in phase 'flush' for \d+ s \(GetTimeoutError\); ", str(caught.value)
        )
        assert caught.value.waited_s >= 3.0

        def wait() -> None:
            while True:
                manager._pipeline._agreed.wait_or_raise(7)  # as at a step that was agreed and never confirmed

        with (
            impatient(manager, barrier_timeout_s=1.0),
            pytest.raises(raystate.BarrierTimeoutError, match=r"rank 0 \(host \w{8}\) waited 1 s at step 7 for the other ranks"),
        ):
            wait()


LEAVES = """
import sys, jax.numpy as jnp, ray, raystate
config = raystate.StateConfig(storage=sys.argv[1], run="left", save_every_steps=1)
manager = raystate.StateManager(config)
manager.restore()
assert manager.save(1, {"w": jnp.ones(3)})
manager.wait_until_finished()
ray.shutdown()
calls = manager.wait_until_finished, manager.restore, manager.close
for call in (lambda: manager.save(2, {"w": jnp.ones(3)}), *calls):
    try:
        call()
    except raystate.RaystateError as error:
        assert "has left Ray (ray.shutdown())" in str(error), error
    else:
        raise SystemExit("it went on")
assert not ray.is_initialized()
with raystate.StateManager(config) as manager:
    assert manager.restore().step == 1
    assert manager.save(2, {"w": jnp.ones(3)})
"""


def test_a_script_that_leaves_ray_before_it_closes_is_told_so(tmp_path: Path) -> None:
    """save() said True, wait_until_finished() waited for minutes, and Ray was started anew for the question."""
    run_python("-c", LEAVES, tmp_path / "run", env={**job_environment(1), "RAY_ADDRESS": "local"})
    assert raystate.Reader(tmp_path / "run").all_steps() == [1, 2]
