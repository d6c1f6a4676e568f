"""Train on a node whose Ray is told of GPUs that aren't there, and be killed. JAX's backend is never started."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig
from ray.util.placement_group import placement_group

import raystate
from jobs.striking import start_ray
from raystate.actors import launch_context
from raystate.train import devices
from tests.patience import PATIENCE_S

GPUS = "2,3,5,7"  # all that the node's Ray may give: two workers have two each


def train(config: dict[str, Any]) -> None:
    """The first group says what it sees and dies once processes wait, the second says it."""
    from jax._src import xla_bridge

    context = launch_context.current()
    assert context is not None and not xla_bridge.backends_are_initialized()
    folder, group = Path(config["folder"]), len(context.restarts)
    seen = {
        "pid": os.getpid(),
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "jax": xla_bridge.CUDA_VISIBLE_DEVICES.value,
        "platforms": os.environ["JAX_PLATFORMS"],
        "starts of the driver": ctypes.CDLL(config["driver"]).fake_calls(0),
    }
    (folder / f"group-{group}-rank-{get_context().get_world_rank()}").write_text(json.dumps(seen))
    while not group:
        launch_context.count_save()  # as `save` does: what waits for the first steps starts
        waiting = [int(maps.parent.name) for maps in Path("/proc").glob("[0-9]*/maps") if config["plugin"] in _text(maps)]
        if len(waiting) == 2 and context.rank == 0:
            (folder / "waiting").write_text(json.dumps(waiting))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended
        return ""


class Holder:
    """Of some of the node's devices."""

    def names(self) -> list[str]:
        return devices.given()


def main(folder: str, driver: str, plugin: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = GPUS
    start_ray(lambda: ray.init(address="local", num_cpus=4, num_gpus=len(GPUS.split(",")), include_dashboard=False))
    config = raystate.StateConfig(storage=f"{folder}/runs", run="a")
    JaxTrainer(
        train,
        train_loop_config={"folder": folder, "driver": driver, "plugin": plugin},
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 2}),
        run_config=RunConfig(
            storage_path=f"{folder}/ray",
            callbacks=[raystate.RayTrainCallback(config)],
            failure_config=FailureConfig(max_failures=-1),
        ),
    ).fit()
    _ask_for_a_part_of_the_node(Path(folder))


def _ask_for_a_part_of_the_node(folder: Path) -> None:
    devices.ANSWER_S = PATIENCE_S
    holder: Any = ray.remote(num_cpus=0, num_gpus=1)(Holder).remote()
    held = ray.get(holder.names.remote())
    places = placement_group([{"GPU": 1}, {"GPU": 2}])
    ray.get(places.ready())
    node = ray.get_runtime_context().get_node_id()
    (folder / "asked").write_text(json.dumps([held, *(devices.of_places([node], [None], 1, places))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
