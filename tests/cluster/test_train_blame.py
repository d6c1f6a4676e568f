"""Who is to blame, and when to give up: real trainers that die and raise, under fit and under the callback."""

# Ray's lazily loaded submodules are unknown to type checkers.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ray.actor import ActorMethod
from ray.train.v2._internal.execution.callback import ControllerCallback

import raystate
from raystate.actors.naming import run_actors
from raystate.observe.ledger.reader import read_ledger
from raystate.storage import open_storage, run_hash
from tests.cluster.training import Training, wait_for, with_callback
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture
def config(ray_cluster: Any, make_run: Any) -> raystate.StateConfig:
    run = make_run()
    return raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000, barrier_timeout_s=PATIENCE_S)


@pytest.mark.long
def test_each_death_is_told_as_the_rank_that_died(config: raystate.StateConfig, tmp_path: Path) -> None:
    training = Training(config, tmp_path / "out", steps=40, step_s=0.1, pause_at=10)
    killed = [1, 0]
    for rank in killed:
        starts = training.events.starts()
        training.wait_step(training.events.newest_step() + 2)
        training.kill_trainer(rank)
        wait_for(lambda before=starts: training.events.starts() > before, "the next start", failed=lambda: training.error)
        wait_for(lambda: len(training.events.pids()) == 2, "both ranks")
    result = training.finish()
    assert [recovery.cause for recovery in result.recoveries] == [f"the process of rank {rank} died" for rank in killed]
    written = [recovery.cause for _, recovery in read_ledger(open_storage(config.storage)).recoveries]
    assert set(written) <= {f"the process of rank {rank} died" for rank in killed}
    assert written, "those that made a step before the next death"


class CountsCalls(ControllerCallback):
    """Writes down what the launcher's process asks the Coordinator."""

    def __init__(self, path: Path):
        self.path = path

    def after_controller_start(self, *_: Any) -> None:
        remote = ActorMethod._remote

        def counted(method: Any, *args: Any, **kwargs: Any) -> Any:
            if method._actor._ray_actor_creation_function_descriptor.class_name == "CoordinatorActor":
                with self.path.open("a") as file:
                    file.write(f"{method._method_name}\n")
            return remote(method, *args, **kwargs)

        ActorMethod._remote = counted


def test_a_death_costs_the_launcher_one_call_of_the_coordinator(config: raystate.StateConfig, tmp_path: Path) -> None:
    """They were six."""
    calls = tmp_path / "calls"
    calls.touch()

    def launch(*args: Any, run_config: Any, **kwargs: Any) -> Any:
        run_config.callbacks = [CountsCalls(calls)]
        return raystate.fit(*args, run_config=run_config, **kwargs)

    training = Training(config, tmp_path / "out", steps=20, step_s=0.0, pause_at=5, launch=launch)
    training.wait_step(4)
    before = calls.read_text()
    training.kill_trainer(1)
    result = training.finish()
    assert [recovery.cause for recovery in result.recoveries] == ["the process of rank 1 died"]
    assert calls.read_text().removeprefix(before).split() == ["ended"]


def _start(config: dict[str, Any]) -> None:
    (Path(config["out"]) / f"start-{os.getpid()}-{jax.process_index()}").touch()


def starts(out: Path) -> int:
    """Of rank 0."""
    return len(list(out.glob("start-*-0")))


def raises_on_both_ranks(config: dict[str, Any]) -> None:
    _start(config)
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        manager.save(restored.step + 1, restored.state, force=True)
        manager.wait_until_finished()
        raise ValueError(f"bad batch on rank {jax.process_index()}")


@pytest.mark.long
def test_an_exception_on_both_ranks_that_comes_back_each_step(config: raystate.StateConfig, tmp_path: Path) -> None:
    """Each attempt gains a step, and still it is the same failure: it ends the run, with the exception."""
    out = tmp_path / "out"
    training = Training(config, out, train_fn=raises_on_both_ranks, max_failures=3)
    with pytest.raises(raystate.RunFailedError, match=r"rank [01] raised ValueError: bad batch on rank [01]") as caught:
        training.finish()
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert str(cause) == f"bad batch on rank {caught.value.rank}"
    assert any("raises_on_both_ranks" in note and "bad batch on rank" in note for note in cause.__notes__)
    assert starts(out) == 3
    assert raystate.Reader(config.storage).latest_step() == 3
    assert run_actors(run_hash(config.storage, config.run)) == []


class Torn(Exception):  # noqa: N818 - as users name them
    """Can't be made again: Ray makes an error of its own of it."""

    def __init__(self, path: str, reason: str):
        super().__init__(f"{path}: {reason}")


class Holds(Exception):  # noqa: N818
    """Can't be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


def raises_what_does_not_pickle(config: dict[str, Any]) -> None:
    """Another thing at each attempt, before and after there is a StateManager."""
    _start(config)
    number = len(list(Path(config["out"]).glob(f"start-*-{jax.process_index()}")))
    if number == 1:
        raise Torn("a.txt", "gone")
    with raystate.StateManager() as manager:
        manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        if number == 2:
            raise Holds
        jax.jit(lambda x: -x if x > 0 else x)(1.0)


@pytest.mark.long
def test_an_exception_that_does_not_pickle_is_told_as_it_is(config: raystate.StateConfig, tmp_path: Path) -> None:
    training = Training(config, tmp_path / "out", train_fn=raises_what_does_not_pickle, max_failures=3)
    with pytest.raises(raystate.RunFailedError, match="raised TracerBoolConversionError: Attempted boolean conv") as caught:
        training.finish()
    assert isinstance(caught.value.__cause__, jax.errors.TracerBoolConversionError)
    assert any("in raises_what_does_not_pickle" in note for note in caught.value.__cause__.__notes__)
    causes = [re.sub("^rank [01] ", "", restart.cause) for restart in caught.value.details["restarts"]]
    assert causes == ["raised Torn: a.txt: gone", "raised Holds: holds a lock"]


def dies_after_a_step_was_lost(config: dict[str, Any]) -> None:
    """Something that the user has put there is in the way of step 2."""
    _start(config)
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        if restored.step == 0:
            theirs = Path(str(manager.config.storage).removeprefix("file://")) / "2"
            theirs.mkdir(exist_ok=True)
            (theirs / "notes.txt").write_text("mine\n")
            for step in (1, 2, 3):
                assert manager.save(step, restored.state)
                if step == 1:
                    manager.wait_until_finished()  # what builds packages is loaded: nothing gives way because of that
            while manager.is_saving_in_progress():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_a_lost_step_whose_trainer_died_is_named_at_the_end(config: raystate.StateConfig, tmp_path: Path) -> None:
    """No process has waited for step 2, and the next group has nothing to do."""
    out = tmp_path / "out"
    config = config.replace(save_every_steps=1, save_timeout_s=20.0)
    result = Training(config, out, train_fn=dies_after_a_step_was_lost).finish()
    assert [text for text in result.lost if text.startswith("step 2: ")]
    assert (result.step, starts(out)) == (3, 2)
    assert raystate.Reader(config.storage).all_steps() == [1, 3]
    assert run_actors(run_hash(config.storage, config.run)) == []


@pytest.mark.long
def test_the_callback_gives_up_too(config: raystate.StateConfig, tmp_path: Path) -> None:
    from ray.train import TrainingFailedError

    out = tmp_path / "out"
    with pytest.raises(TrainingFailedError, match=r"3 .*rank [01] raised ValueError: bad batch on rank [01]"):
        Training(config, out, train_fn=raises_on_both_ranks, launch=with_callback).finish()
    assert starts(out) == 3
    assert run_actors(run_hash(config.storage, config.run)) == []


def does_nothing_more(config: dict[str, Any]) -> int:
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        for step in range(restored.step, 3):
            manager.save(step + 1, restored.state, metrics={"loss": 1.5 + step})
    return restored.step


@pytest.mark.long
def test_a_finished_run_started_again_has_its_metrics(config: raystate.StateConfig, tmp_path: Path) -> None:
    first, second = (Training(config, tmp_path / str(i), train_fn=does_nothing_more).finish() for i in range(2))
    assert (first.step, first.metrics, first.return_value) == (3, {"loss": 3.5}, 0)
    assert (second.step, second.metrics, second.return_value) == (3, {"loss": 3.5}, 3)
    assert dataclasses.replace(second, return_value=0, ray=None) == dataclasses.replace(first, ray=None)


def fails_twice(config: dict[str, Any]) -> None:
    _start(config)
    number = len(list(Path(config["out"]).glob(f"start-*-{jax.process_index()}")))
    if number == 2:
        raise OSError("no data")
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        for step in range(restored.step, 3 * number):
            manager.save(step + 1, restored.state)
        manager.wait_until_finished()
        if number == 1:
            raise KeyError("first")


@pytest.mark.long
def test_a_restart_after_a_failed_one_has_its_own_cause(config: raystate.StateConfig, tmp_path: Path) -> None:
    """Also one whose trainers never joined: its Coordinator hears of it from the launcher."""
    result = Training(config, tmp_path / "out", train_fn=fails_twice).finish()
    failed, back = result.recoveries
    assert "KeyError" in failed.cause and "OSError: no data" in back.cause
    logged = [recovery for _, recovery in read_ledger(open_storage(config.storage)).recoveries]
    assert [(recovery.cause, recovery.back) for recovery in logged] == [(failed.cause, False), (back.cause, True)]
    assert (back.seconds, back.step) == (logged[1].seconds, logged[1].step)
