"""Nothing is left behind, also if somebody dies just before the end."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import ray

from raystate.actors.hosts import RayHosts
from raystate.actors.naming import find_actor, host_name, wait_until_gone
from raystate.config.state_config import StateConfig
from raystate.core.formats.messages import HostId
from raystate.storage import run_hash
from tests.patience import PATIENCE_S


@pytest.mark.long
@pytest.mark.parametrize("killed", [False, True])
def test_a_host_that_is_killed_before_the_end_leaves_no_memory(killed: bool, ray_cluster: Any, make_run: Any) -> None:
    run = make_run()
    config = StateConfig(storage=run.storage, run=run.run)
    name = run_hash(run.storage, run.run)
    hosts = RayHosts(config, name, lambda: ray.get_runtime_context().get_job_id())
    nodes = [HostId(node["NodeID"]) for node in ray.nodes() if node["Alive"]][:2]
    failed: list[str] = []
    for node in nodes:
        hosts.ensure(node, failed.append)
    actors: list[Any] = [find_actor(host_name(name, node)) for node in nodes]
    pids: list[int] = ray.get([actor.pid.remote() for actor in actors], timeout=PATIENCE_S)
    assert len(run.arenas()) == 2
    if killed:
        os.kill(pids[0], signal.SIGKILL)
    hosts.close_all(remove_arena=True)
    assert run.arenas() == []
    assert wait_until_gone(name, PATIENCE_S)
    assert failed == []
