"""Which GPUs a worker uses.

Ray's JaxTrainer shows each worker of a node the GPUs 0 to n-1, so that several workers of a node all
get the first. Here a worker is shown those that Ray gave its process.
"""

from __future__ import annotations

import os
from typing import Any

import ray
from ray.train.v2.jax import config as jax_setup

from raystate.patching import patch

_VISIBLE, _PLATFORMS = "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS"


def prepare_worker() -> None:
    """Let Ray's set-up of JAX, which runs in this process later, show JAX this worker's own GPUs."""

    def set_up(*args: Any, **kwargs: Any) -> None:
        theirs(*args, **kwargs)  # it sets the variable, too, and doesn't start NVIDIA's driver, which reads it once
        if _is_cuda() and (own := given()):
            os.environ[_VISIBLE] = ",".join(own)

    theirs = patch(jax_setup, "_setup_jax_distributed_environment", set_up)  # tests/cluster/test_train_internals.py


def given() -> list[str]:
    """The GPUs that Ray gave this process: numbers or names, in order."""
    names = [str(one) for one in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
    return sorted(names, key=lambda name: (len(name), name))


def _is_cuda() -> bool:
    return "cuda" in os.environ.get(_PLATFORMS, "").lower().split(",")
