"""One Ray cluster for the whole session: three simulated nodes on this machine, each with room for one trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import toy

NODES = 3
OBJECT_STORE_BYTES = 100 << 20


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    import ray
    from ray import cloudpickle
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "resources": {"trainer": 1}, "object_store_memory": OBJECT_STORE_BYTES}
    os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    for _ in range(NODES - 1):
        cluster.add_node(**node)
    ray.init(address=cluster.address, namespace="tests", log_to_driver=False)
    cluster.wait_for_nodes()
    # Waiting processes double what each of the many short runs costs. Where they matter a test switches them on: so not before Ray
    # has started, whose processes inherit it.
    os.environ["RAYSTATE_STANDBY"] = "0"
    cloudpickle.register_pickle_by_value(toy)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
