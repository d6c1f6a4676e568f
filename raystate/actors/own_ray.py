"""Starting Ray for a script that has none."""

from __future__ import annotations

import logging
import warnings

import ray

from raystate.ray_version import ray_internals

with ray_internals():
    from ray._private import worker

logger = logging.getLogger("raystate")


def start_ray() -> None:
    """`ray.init()`, which joins a cluster that runs on this machine. If it had to start one, say what that means."""
    with warnings.catch_warnings():
        # Of a fork in a process that uses JAX. Ray only starts programs, which is safe.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        ray.init(include_dashboard=False, logging_level=logging.WARNING)
    node = worker._global_node
    if node is not None and node.is_head():
        # A warning, because nothing less is shown unless the script has set logging up.
        logger.warning(
            "raystate: this Ray was started by this process and ends with it: after a crash of the process the run goes on from its "
            "newest durable step. Run `ray start --head` first to keep the snapshots in memory, too"
        )
