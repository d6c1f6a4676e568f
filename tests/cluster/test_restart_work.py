"""What a restart under `fit` has to do again: nothing is compiled, on any rank, not even on nodes that are new. A process that waited
imports nothing of ours, and no well-known library that the script imports."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import raystate
from raystate.compilation.store import SUFFIX
from tests.cluster.training import wait_for

pytestmark = pytest.mark.usefixtures("by_value")


def _train(config: dict[str, Any]) -> None:
    """Say, after three steps, what was compiled and imported; go on until there is a second start, or the test says so."""
    import sys

    imported = set(sys.modules)
    import grain.python
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    counts: dict[str, int] = {}
    jax.monitoring.register_event_listener(lambda event, **_: counts.update({event: counts.get(event, 0) + 1}))
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    split = NamedSharding(mesh, PartitionSpec("x"))
    folder = Path(config["folder"])
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"w": jnp.ones((64, 64)) / 64}, {"w": split})
        state = restored.state
        step = jax.jit(lambda state: {"w": jnp.tanh(state["w"] @ state["w"].T) @ state["w"]}, donate_argnums=0)
        for number in range(restored.step, 10_000):
            state = step(state)
            stop = jnp.int32((folder / "stop").exists())
            manager.save(number + 1, state)
            if number == restored.step + 3:
                name = "/jax/compilation_cache/"
                said = {
                    "t": time.time(),
                    "rank": jax.process_index(),
                    "pid": os.getpid(),
                    "restored": restored.step,
                    "asked": counts.get(f"{name}compile_requests_use_cache", 0),
                    "found": counts.get(f"{name}cache_hits", 0),
                    "ahead": [one.__name__ for one in (grain.python, optax) if one.__name__ in imported],
                    "imported": sorted(one for one in set(sys.modules) - imported if one.startswith("raystate.")),
                }
                (folder / f"new-{os.getpid()}").write_text(json.dumps(said))
                (folder / f"new-{os.getpid()}").rename(folder / f"said-{os.getpid()}")
            from jax.experimental import multihost_utils

            if int(multihost_utils.process_allgather(stop).max()):
                return
            time.sleep(0.05)


@pytest.mark.long
def test_a_restart_compiles_and_imports_nothing(
    ray_cluster: Any, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig

    monkeypatch.setenv("RAYSTATE_STANDBY", "1")
    run = make_run()
    folder = tmp_path / "said"
    folder.mkdir()
    beside = Path(ray.get_runtime_context().get_temp_dir()).parent
    failed: list[BaseException] = []

    def fit() -> None:
        try:
            raystate.fit(
                _train,
                raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=10_000),
                train_loop_config={"folder": str(folder)},
                scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1, "trainer": 1}),
                run_config=RunConfig(name="run", storage_path=str(tmp_path / "ray")),
                # What tests/conftest.py spares the other tests with.
                env={"JAX_COMPILATION_CACHE_DIR": "", "RAYSTATE_STANDBY": "1"},
            )
        except BaseException as error:
            failed.append(error)

    def said(count: int) -> list[dict[str, Any]]:
        def enough() -> list[dict[str, Any]]:
            found = [json.loads(path.read_text()) for path in folder.glob("said-*")]
            return sorted(found, key=lambda one: one["t"]) if len(found) >= count else []

        return wait_for(enough, f"{count} starts", failed=lambda: failed[0] if failed else None)

    storage = Path(run.storage)

    def lists() -> list[Path]:
        return [*storage.glob(".raystate/compiled/*/used/[0-9]*.json")]

    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    try:
        first = said(2)
        wait_for(lambda: sum(map(_waits, _idle_trainers(first))) == 2, "processes that wait")
        before = {*lists()}
        os.kill(next(one["pid"] for one in first if one["rank"] == 1), signal.SIGKILL)
        again = said(4)[2:]
        # As if both nodes were replaced: they have none of this run's programs. Other runs of this user keep theirs.
        wait_for(lambda: {path.name.split(".")[2] for path in {*lists()} - before} == {"0", "1"}, "what both ranks use in storage")
        removed = 0
        for path in storage.glob(".raystate/compiled/*/*.*"):
            for held in beside.glob(f"raystate-programs-{os.getuid()}-*/{path.name.partition('.')[0]}{SUFFIX}"):
                held.unlink()
                removed += 1
        os.kill(next(one["pid"] for one in again if one["rank"] == 0), signal.SIGKILL)
        replaced = said(6)[4:]
    finally:
        (folder / "stop").touch()
        thread.join()
    assert not failed, failed
    assert all(one["asked"] and not one["restored"] for one in first), first
    assert all(one["restored"] for one in again), again
    assert [one["found"] for one in again] == [one["asked"] for one in again], again
    assert removed and all(one["restored"] for one in replaced), replaced
    assert [one["found"] for one in replaced] == [one["asked"] for one in replaced], replaced
    assert [one["imported"] for one in again] == [[], []]
    assert [one["ahead"] for one in first + again] == [[], [], ["grain.python", "optax"], ["grain.python", "optax"]]
    assert list(beside.glob(f"raystate-programs-{os.getuid()}-*/*{SUFFIX}"))


def _idle_trainers(training: list[dict[str, Any]]) -> list[int]:
    """Pids of Ray Train workers beside those that train."""
    import ray._private.state

    actors = ray._private.state.actors().values()
    alive = [actor["Pid"] for actor in actors if actor["ActorClassName"] == "RayTrainWorker" and actor["State"] != "DEAD"]
    return [pid for pid in alive if pid not in {one["pid"] for one in training}]


def _waits(pid: int) -> bool:
    """Whether the process has imported everything, and does nothing any more."""
    if not pid:  # Ray is about to start it
        return False
    try:
        process = psutil.Process(pid)
        maps = Path(f"/proc/{pid}/maps").read_text()
        return "tensorstore" in maps and "index_shuffle" in maps and process.cpu_percent(interval=0.3) < 5
    except (psutil.NoSuchProcess, OSError):
        return False
