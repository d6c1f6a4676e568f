"""Train on a node whose Ray is told of GPUs that aren't there. JAX's backend is never started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.v2.jax import JaxTrainer
from ray.train.v2.jax.config import JaxConfig

import raystate
from jobs.striking import start_ray

GPUS = "2,3,5,7,11"  # all that the node's Ray may give


def train(config: dict[str, Any]) -> None:
    from jax._src import xla_bridge

    assert not xla_bridge.backends_are_initialized()
    seen = {"visible": os.environ["CUDA_VISIBLE_DEVICES"], "jax": xla_bridge.CUDA_VISIBLE_DEVICES.value}
    (Path(config["folder"]) / f"rank-{get_context().get_world_rank()}").write_text(json.dumps(seen))


def main(folder: str) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = GPUS
    start_ray(lambda: ray.init(address="local", num_cpus=4, num_gpus=len(GPUS.split(",")), include_dashboard=False))
    JaxTrainer(
        train,
        train_loop_config={"folder": folder},
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker={"CPU": 1, "GPU": 2}),
        run_config=RunConfig(
            storage_path=f"{folder}/ray",
            callbacks=[raystate.RayTrainCallback(raystate.StateConfig(storage=f"{folder}/runs", run="a"))],
        ),
    ).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
