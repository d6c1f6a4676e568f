"""Mistakes of users: each ends in an error that names the thing, within its deadline; nothing is lost."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import raystate
from raystate.actors.naming import coordinator_name, find_hosts, host_name
from raystate.manager import session as _session
from raystate.storage import run_hash
from tests.cluster.strikes import held, pid_of
from tests.cluster.training import Training, wait_for
from tests.patience import PATIENCE_S


def _state(step: int = 0) -> dict[str, Any]:
    return {"w": jnp.full((4, 4), float(step)), "b": jnp.zeros(3), "n": 1}


@pytest.fixture
def config(ray_cluster: Any, make_run: Any) -> raystate.StateConfig:
    run = make_run()
    return raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=2)


def test_older_equal_and_missing_steps(config: raystate.StateConfig) -> None:
    with raystate.StateManager(config) as manager:
        assert manager.restore(_state()) is None
        assert manager.save(1, _state(1)) is False
        assert manager.save(2, _state(2)) is True
        assert manager.save(2, _state(2)) is False, "equal: nothing is written"
        with pytest.raises(raystate.StepOrderError, match=r"step 1.*newest step is 2"):
            manager.save(1, _state(1))
        assert manager.save(3, _state(3), force=True) is True
        manager.wait_until_finished()
        assert manager.all_steps() == [2, 3]
        assert manager.latest_step() == 3
        for _ in range(2):  # as each process of a loop would
            manager.delete(2)
            assert manager.all_steps() == [3]
        with pytest.raises(raystate.StorageError, match="step 3 is the newest durable step and is not deleted"):
            manager.delete(3)
        with pytest.raises(raystate.StepNotFoundError, match="9"):
            manager.delete(9)
    with raystate.StateManager(config) as manager, pytest.raises(raystate.StepNotFoundError, match="7") as caught:
        manager.restore(_state(), step=7)
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(raystate.StepNotFoundError, match="7"):
        raystate.Reader(config.storage).restore(step=7)


@pytest.mark.long
def test_reference_that_differs_in_everything(config: raystate.StateConfig) -> None:
    with raystate.StateManager(config) as manager:
        manager.restore(_state())
        manager.save(1, _state(1), force=True)
    reference = {"w": np.zeros((4, 5), np.float32), "b": np.zeros(3, np.int32), "n": 1, "extra": {"c": np.zeros(2)}}
    with raystate.StateManager(config) as manager:
        with pytest.raises(raystate.ReferenceMismatchError) as caught:
            manager.restore(reference)
        message = str(caught.value)
        for part in ("w", "(4, 5)", "(4, 4)", "b", "int32", "float32", "extra", "c"):
            assert part in message, part
        # Told how, it is accepted: the missing path keeps the reference's value.
        restored = manager.restore({**reference, "w": np.zeros((4, 4), np.float32)}, partial=True, cast=True)
        assert restored is not None
        assert restored.state["b"].dtype == np.int32
        assert restored.state["extra"]["c"].shape == (2,)
        np.testing.assert_array_equal(restored.state["w"], np.full((4, 4), 1.0, np.float32))


def test_unusable_storage(ray_cluster: Any, tmp_path: Path, make_run: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    config = raystate.StateConfig(storage=str(blocked / "run"), run=make_run().run)
    with pytest.raises(raystate.ConfigError, match="is a file, and nothing lies below it") as caught:
        raystate.StateManager(config)
    assert str(blocked) in str(caught.value)


@pytest.mark.long
def test_state_over_the_cap(config: raystate.StateConfig) -> None:
    small = config.replace(host_memory=1 << 20)
    with raystate.StateManager(small) as manager:
        with pytest.raises(raystate.CapacityError) as caught:
            manager.save(1, {"w": jnp.zeros((1 << 20,), jnp.float32)})
        message = str(caught.value)
        assert "host_memory" in message
        assert caught.value.needed_bytes > 12 << 20, "three slots of 4 MiB"


def test_unknown_leaf(config: raystate.StateConfig) -> None:
    with raystate.StateManager(config) as manager:
        with pytest.raises(raystate.RaystateError, match=r"bad"):
            manager.save(1, {"bad": object()})
        with pytest.raises(raystate.ConfigError, match="a function that makes the state, not a dict"):
            manager.restore_or_init(_state())  # pyright: ignore[reportArgumentType]
        manager.save(2, _state(2))
    assert raystate.Reader(config.storage).latest_step() == 2


def test_last_step_is_durable_although_no_snapshot_was_due(config: raystate.StateConfig) -> None:
    rare = config.replace(save_every_steps=100, snapshot_every_steps=50)
    with raystate.StateManager(rare) as manager:
        manager.restore(_state())
        for step in range(1, 8):
            manager.save(step, _state(step))
    restored = raystate.Reader(config.storage).restore(_state())
    assert restored.step == 7
    assert float(np.asarray(restored.state["w"])[0, 0]) == 7.0


def test_user_exception_leaves_the_snapshots_durable(config: raystate.StateConfig) -> None:
    kept: list[int] = []

    def training() -> None:
        with raystate.StateManager(config.replace(save_every_steps=100)) as manager:
            manager.restore(_state())
            for step in range(1, 20):
                manager.save(step, _state(step))
            with manager._pipeline.lock:  # a busy machine may have skipped the newest ones
                last = manager._pipeline.machine.kept
            assert last is not None
            kept.append(last.step)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training()
    assert raystate.Reader(config.storage).latest_step() == kept[0] > 0


def train_where_only_rank_0_saves(config: dict[str, Any]) -> None:
    with raystate.StateManager() as manager:
        manager.restore(None)
        for step in range(config["steps"]):
            time.sleep(0.1)
            if jax.process_index() == 0:
                manager.save(step + 1, {"w": jnp.zeros(8)})


@pytest.mark.long
def test_one_rank_saves_and_the_other_does_not(config: raystate.StateConfig, tmp_path: Path) -> None:
    training = Training(
        config.replace(barrier_timeout_s=10.0, save_every_steps=1000),
        tmp_path / "out",
        steps=600,
        train_fn=train_where_only_rank_0_saves,
        max_failures=0,
    )
    with pytest.raises(raystate.RunFailedError) as caught:
        training.finish()
    cause = caught.value.__cause__
    assert isinstance(cause, raystate.BarrierTimeoutError), cause
    assert "rank 1" in str(cause)
    assert cause.waited_s >= 10.0


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
        assert str(caught.value) == f"rank 0: the HostActor of node {node[:8]} did not answer 'allot' within 3 s"
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
        assert re.fullmatch(
            r"rank 0: no answer from the Coordinator in phase 'flush' for \d+ s \(GetTimeoutError\)", str(caught.value)
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


@pytest.mark.long
def test_a_write_that_does_not_end(config: raystate.StateConfig) -> None:
    with raystate.StateManager(config.replace(save_timeout_s=20.0)) as manager:
        manager.restore(_state())
        with held("writing", SimpleNamespace(error=None), before=lambda: manager.save(2, _state(2))):
            with pytest.raises(raystate.StorageError, match=r"step 2 is not committed.* \(after \d+\.\d s\)"):
                manager.wait_until_finished()
            with pytest.raises(raystate.StorageError, match=r"step 2 .*host \w+ \(ranks \[0\]\) did not write within \d+\.\d s"):
                wait_for(lambda: manager.check_for_errors(), "the error of the save")
        manager.save(4, _state(4))
    assert raystate.Reader(config.storage).latest_step() == 4


def train_alone(config: dict[str, Any]) -> None:
    del config
    with raystate.StateManager():
        pass


@pytest.mark.long
def test_world_that_is_not_one_jax_job(config: raystate.StateConfig, tmp_path: Path) -> None:
    from ray.train.v2.jax import JaxConfig

    training = Training(config, tmp_path / "out", train_fn=train_alone, jax_config=JaxConfig(), max_failures=0)
    with pytest.raises(raystate.ConfigError, match=r"2 processes but jax.process_count\(\) is 1"):
        training.finish()


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
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "XLA_FLAGS": "", "RAY_ADDRESS": "local"}
    script = [sys.executable, "-c", LEAVES, str(tmp_path / "run")]
    ended = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert raystate.Reader(tmp_path / "run").all_steps() == [1, 2]
