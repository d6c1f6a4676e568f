"""fit and RayTrainCallback on a real Ray, with training functions that hold no state: launching, restarting, giving up."""

# Ray's lazily loaded submodules are unknown to type checkers.
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors import launch_context
from tests.cluster.training import wait_for, with_callback
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.fixture(scope="module", autouse=True)
def _as_users_have_it() -> Iterator[None]:
    """With the process that watches for preemptions, which tests/conftest.py spares the other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "1")
        yield


@dataclasses.dataclass
class Place:
    """One test's files: what its training functions said."""

    folder: Path
    config: Any

    def said(self, event: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in self.folder.glob("said-*"):
            found += [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        return sorted((each for each in found if each["event"] == event), key=lambda each: each["t"])

    def arguments(self, **more: Any) -> dict[str, Any]:
        """For fit: one worker per node, and the folder for the training function."""
        from ray.train import RunConfig, ScalingConfig

        return {
            "train_loop_config": {"folder": str(self.folder), **more},
            "scaling_config": ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "trainer": 1}),
            "run_config": RunConfig(name="run", storage_path=str(self.folder / "ray")),
        }


@pytest.fixture
def place(ray_cluster: Any, make_run: Any, tmp_path: Path) -> Iterator[Place]:
    run = make_run()
    folder = tmp_path / "said"
    folder.mkdir()
    yield Place(folder=folder, config=raystate.StateConfig(storage=run.storage, run=run.run, idle_timeout_s=2.0))
    (folder / "stop").touch()  # where a test has failed, its training must not take the next one's nodes


def _say(folder: str, event: str, **facts: Any) -> None:
    with open(Path(folder) / f"said-{os.getpid()}", "a") as stream:
        stream.write(json.dumps({"event": event, "t": time.time(), "pid": os.getpid(), **facts}) + "\n")


def _begin(config: dict[str, Any]) -> launch_context.LaunchContext:
    """Say that this process is there; its place in the group."""
    context = launch_context.current()
    assert context is not None
    _say(config["folder"], "start", rank=context.rank, group=context.group, attempt=len(context.restarts) + 1)
    return context


def _sum_until_told(config: dict[str, Any]) -> dict[str, Any]:
    """Collectives until the test writes the file `stop`, at the same step on all ranks."""
    import jax
    from jax.experimental import multihost_utils

    context = _begin(config)
    stop = 0
    while not stop:
        told = os.path.exists(Path(config["folder"]) / "stop")
        stop = int(multihost_utils.process_allgather(jax.numpy.int32(told)).min())
        launch_context.count_save()  # as `save` does: what waits for the first steps starts
        time.sleep(0.05)
    launch_context.note(step=7, metrics={"loss": 0.5})
    return {"rank": context.rank}


def _groups(starts: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Starts by group, in order of time, each sorted by rank."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for start in starts:
        groups.setdefault(start["group"], []).append(start)
    return [sorted(group, key=lambda start: start["rank"]) for group in groups.values()]


def _pids(kind: str) -> list[int]:
    """Of Ray Train's actors of a kind that have not ended."""
    import ray._private.state

    actors = ray._private.state.actors().values()
    return [actor["Pid"] for actor in actors if actor["ActorClassName"] == kind and actor["State"] != "DEAD"]


def _has_imported(pid: int) -> bool:
    """Whether a process has got as far as raystate's last big library."""
    maps = Path(f"/proc/{pid}/maps")
    return pid > 0 and maps.exists() and "tensorstore" in maps.read_text()  # 0: Ray is about to start it


@pytest.mark.long
def test_a_standby_process_that_has_died_is_not_used(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start that it would have been part of does not fail for it: new processes are started."""
    monkeypatch.setenv("RAYSTATE_STANDBY", "1")
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(raystate.fit(_sum_until_told, place.config, **place.arguments())))
    thread.start()
    wait_for(lambda: len(place.said("start")) == 2, "start")
    trainers = {start["pid"] for start in place.said("start")}
    wait_for(lambda: len(_pids("RayTrainWorker")) == 4, "standby processes, one for each trainer")
    wait_for(lambda: all(_has_imported(pid) for pid in _pids("RayTrainWorker")), "their imports")
    waiting = next(pid for pid in _pids("RayTrainWorker") if pid not in trainers)
    os.kill(waiting, signal.SIGKILL)
    wait_for(lambda: waiting not in _pids("RayTrainWorker"), "the end of one of them")
    os.kill(place.said("start")[0]["pid"], signal.SIGKILL)
    wait_for(lambda: len(place.said("start")) == 4, "second start")
    (place.folder / "stop").touch()
    thread.join(PATIENCE_S)
    (result,) = results
    assert (result.step, result.metrics, result.return_value) == (7, {"loss": 0.5}, {"rank": 0})
    (recovery,) = result.recoveries
    assert (recovery.attempt, recovery.workers, recovery.interrupted) == (2, 2, False)
    wait_for(lambda: not _pids("RayTrainWorker"), "the end of every worker, waiting ones too")


def _interrupted_once(config: dict[str, Any]) -> str:
    context = _begin(config)
    if not context.restarts:
        raise raystate.Interrupted("the node goes away", step=3)
    return "done"


def _die_once_in_backend(folder: str) -> None:
    from ray.actor import exit_actor

    try:
        (Path(folder) / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    exit_actor()


@pytest.mark.long
def test_a_death_during_the_start_does_not_keep_the_nodes(place: Place) -> None:
    """Ray drops such a group with its resources reserved; on a full cluster the next one would never find room."""
    from ray.train.v2.jax.config import JaxConfig, _JaxBackend

    folder = str(place.folder)

    class Backend(_JaxBackend):
        def on_start(self, worker_group: Any, backend_config: Any) -> None:
            worker_group.execute_single(1, _die_once_in_backend, folder)
            super().on_start(worker_group, backend_config)

    @dataclasses.dataclass
    class Dying(JaxConfig):
        @property
        def backend_cls(self) -> Any:
            return Backend

    arguments = place.arguments()
    arguments["scaling_config"].num_workers = 3  # all nodes of the cluster
    result = raystate.fit(_interrupted_never, place.config, jax_config=Dying(use_gpu=True), **arguments)
    assert (place.folder / "died").exists()
    assert result.return_value == 3
    assert [r.attempt for r in result.recoveries] == [2]


def _interrupted_never(config: dict[str, Any]) -> int:
    return _begin(config).world


@pytest.mark.long
def test_no_room_is_not_waited_for_for_ever(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "1.5")
    arguments = place.arguments()
    arguments["scaling_config"].num_workers = 50
    with pytest.raises(raystate.RunFailedError, match=r"could not be placed.*no room yet for 50 workers"):
        raystate.fit(_interrupted_never, place.config, **arguments)


@pytest.mark.long
def test_a_process_that_never_starts_is_not_waited_for_for_ever(place: Place) -> None:
    hangs = place.folder / "hangs"
    hangs.write_text(f"#!/bin/sh\nwhile [ ! -e {place.folder}/stop ]; do sleep 0.1; done\n")
    hangs.chmod(0o755)
    arguments = place.arguments()
    arguments["run_config"].worker_runtime_env = {"py_executable": str(hangs)}
    config = place.config.model_copy(update={"start_timeout_s": 3.0})
    with pytest.raises(raystate.RunFailedError, match=r"2 failed starts.*could not be started: .*not started 2 of 2 .* within 3 s"):
        raystate.fit(_interrupted_never, config, max_failures=2, **arguments)


# ---------------------------------------------------------------- what is passed on to Ray


def _reads_its_share(config: dict[str, Any]) -> dict[str, Any]:
    import importlib

    from ray import train

    _begin(config)
    share = train.get_dataset_shard("train")
    assert share is not None
    rows = [int(row["id"]) for row in raystate.Counted(share.iter_rows)]
    _say(config["folder"], "read", rows=rows)
    train.report({"theirs": 1.0})
    return {
        "word": os.environ["WORD"],
        "platform": os.environ["JAX_PLATFORMS"],
        "module": importlib.import_module("only_there").VALUE,
    }


@pytest.mark.long
def test_datasets_and_env_reach_the_workers(place: Place, tmp_path: Path) -> None:
    import ray

    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "only_there.py").write_text("VALUE = 42\n")
    arguments = place.arguments()
    arguments["run_config"].worker_runtime_env = {"env_vars": {"WORD": "given"}}
    datasets, env = {"train": ray.data.range(20)}, {"PYTHONPATH": str(tmp_path / "code")}
    result = raystate.fit(_reads_its_share, place.config, datasets=datasets, env=env, **arguments)
    assert result.return_value == {"word": "given", "platform": "cpu", "module": 42}
    shares = [said["rows"] for said in place.said("read")]
    assert len(shares) == 2
    assert sorted(shares[0] + shares[1]) == list(range(20))
    assert (result.ray.metrics, result.ray.checkpoint) == (None, None), "Ray Train keeps metrics only with a checkpoint"
    assert result.metrics == {}


# ---------------------------------------------------------------- the callback in a user's own JaxTrainer


def test_callback_alone(place: Place) -> None:
    arguments = place.arguments()
    arguments["run_config"].worker_runtime_env = {"env_vars": {"JAX_PLATFORMS": "cpu"}}
    result = with_callback(_interrupted_once, place.config, **arguments)
    assert result.return_value == "done", "the user's value, not wrapped"
    groups = _groups(place.said("start"))
    assert [{start["attempt"] for start in group} for group in groups] == [{1}, {2}]
