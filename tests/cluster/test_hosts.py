"""HostActors that wait on nodes where a rank could go: real ones, called as a run's Coordinator calls them, at the worst moments."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError

import raystate
from raystate.actors.hosts import RayHosts, waiting_key
from raystate.actors.kv_store import Kept
from raystate.actors.naming import find_hosts, host_name, run_actors
from raystate.actors.release import release
from raystate.arena import arena_path, default_root
from raystate.arena.files import PREFIX
from raystate.core.formats.messages import HostId
from raystate.storage import run_hash
from raystate.storage.names import log_name
from tests.cluster.strikes import pid_of, wait_for_line
from tests.cluster.training import wait_for
from tests.patience import PATIENCE_S


class Nodes:
    """A run's HostActors on the nodes of the cluster, and whoever is its Coordinator now."""

    def __init__(self, run: Any):
        self.config = raystate.StateConfig(storage=run.storage, run=run.run)
        self.name = run_hash(run.storage, run.run)
        self.ids = [HostId(info["NodeID"]) for info in ray.nodes() if info["Alive"]]
        self.errors: list[str] = []
        self.coordinator = self.another()

    def another(self, **changed: Any) -> RayHosts:
        """A Coordinator that is started again."""
        config = self.config.model_copy(update=changed)
        self.coordinator = RayHosts(config, self.name, lambda: ray.get_runtime_context().get_job_id())
        return self.coordinator

    def pid(self, host: HostId) -> int:
        return wait_for(lambda: pid_of(host_name(self.name, host)), "a HostActor")

    def become_host(self, host: HostId) -> None:
        self.coordinator.ensure(host, self.errors.append)
        wait_for(lambda: self.arena_is_there(host), "a host", failed=lambda: self.errors or None)

    def arena(self, host: HostId) -> Path:
        return arena_path(default_root(None), self.name, host)

    def arena_is_there(self, host: HostId) -> bool:
        return self.coordinator._handle(host) is not None and self.arena(host).exists()


@pytest.fixture
def nodes(ray_cluster: Any, make_run: Any) -> Iterator[Nodes]:
    del ray_cluster
    nodes = Nodes(make_run())
    yield nodes
    nodes.coordinator.close_all(remove_arena=True)
    wait_for(lambda: not find_hosts(nodes.name), "the end of all HostActors")
    assert not any(nodes.arena(host).exists() for host in nodes.ids)
    assert Kept(waiting_key(nodes.name)).get() is None


def test_one_that_gives_up_late_is_no_obstacle(nodes: Nodes) -> None:
    """It was asked to when it could not hear; meanwhile it is wanted again, and a rank comes."""
    node = nodes.ids[0]
    nodes.coordinator.prepare([node])
    pid = nodes.pid(node)
    os.kill(pid, signal.SIGSTOP)
    try:
        nodes.coordinator.prepare([])
        nodes.coordinator.prepare([node])
    finally:
        os.kill(pid, signal.SIGCONT)
    nodes.become_host(node)
    assert nodes.another().known() == (node,)


def test_one_that_gives_up_is_made_again_when_it_is_gone(nodes: Nodes) -> None:
    node = nodes.ids[0]
    nodes.coordinator.prepare([node])
    pid = nodes.pid(node)
    nodes.coordinator.prepare([])

    def is_another() -> bool:
        nodes.coordinator.prepare([node])
        return pid_of(host_name(nodes.name, node)) not in (None, pid)

    wait_for(is_another, "another HostActor")


def test_a_coordinator_that_starts_again_takes_a_silent_one_for_no_host(nodes: Nodes) -> None:
    waits, host = nodes.ids[:2]
    nodes.become_host(host)
    nodes.coordinator.prepare([waits])
    pid = nodes.pid(waits)
    os.kill(pid, signal.SIGSTOP)
    try:
        assert nodes.another().known() == (host,)
    finally:
        os.kill(pid, signal.SIGCONT)
    nodes.coordinator.prepare([])
    wait_for(lambda: tuple(find_hosts(nodes.name)) == (host,), "the end of the one that waited")
    nodes.coordinator.prepare([host])
    assert nodes.another().known() == (host,), "a host stays one"


def test_one_that_is_killed_becomes_a_host_all_the_same(nodes: Nodes) -> None:
    """The call that was to make it one may meet a process that has just died."""
    node = nodes.ids[0]
    nodes.coordinator.prepare([node])
    os.kill(nodes.pid(node), signal.SIGKILL)
    nodes.become_host(node)
    assert nodes.another().known() == (node,)


def test_one_that_cannot_start_again_does_so_later(nodes: Nodes, tmp_path: Path) -> None:
    """It is killed while there is no way into the arena, such as with a full /dev/shm. Ray makes none again whose constructor raises."""
    node = nodes.ids[0]
    nodes.become_host(node)
    slots = {
        "incarnation": "t",
        "rank": 0,
        "pid": os.getpid(),
        "data_bytes": 4096,
        "table_bytes": 100,
        "buffer_bytes": 4096,
        "slots": 1,
    }

    def allotted() -> Any:
        handle: Any = nodes.coordinator._handle(node)
        try:
            return ray.get(handle.allot.remote(**slots), timeout=PATIENCE_S)
        except ActorUnavailableError:
            return None

    before, arena, aside = allotted(), nodes.arena(node), nodes.arena(node).with_name(f"{tmp_path.name}-{os.getpid()}")
    arena.rename(aside)
    try:
        arena.touch()
        os.kill(nodes.pid(node), signal.SIGKILL)
        told = f"host {node[:8]} is of no use to run '{nodes.config.run}' yet: its HostActor was started again, and can't take up"
        wait_for_line(told, failed=lambda: None if find_hosts(nodes.name) else "Ray has given it up")
        assert allotted() is None, "it is being started again, for whoever calls"
    finally:
        arena.unlink()
        aside.rename(arena)
    assert wait_for(allotted, "a HostActor") == before, "with the slots that it had"


def test_a_node_on_which_none_can_start_is_told_of_once(nodes: Nodes, caplog: pytest.LogCaptureFixture) -> None:
    node = nodes.ids[0]
    coordinator = nodes.another(arena_dir="/nonexistent")
    coordinator.prepare([node])
    wait_for(lambda: "no HostActor can wait on node" in caplog.text, "a line")
    wait_for(lambda: not find_hosts(nodes.name), "its end")
    coordinator.prepare([node])
    assert not find_hosts(nodes.name)
    assert "arena_dir" in caplog.text
    coordinator._unfit[node] = 0.0  # a minute later
    coordinator.prepare([node])
    wait_for(lambda: coordinator._unfit[node], "another try")
    assert caplog.text.count("no HostActor can wait on node") == 1
    nodes.another()


def test_a_run_that_is_refused_keeps_what_it_has_in_memory(nodes: Nodes) -> None:
    """Such as one that a newer raystate has left: who may read its log takes the steps from there."""
    holds, empty, waits = nodes.ids[:3]
    nodes.become_host(holds)
    nodes.become_host(empty)
    nodes.coordinator.prepare([waits])
    sizes = {"data_bytes": 4096, "table_bytes": 100, "buffer_bytes": 4096, "slots": 1}
    handle: Any = nodes.coordinator._handle(holds)
    ray.get(handle.allot.remote(incarnation="t", rank=0, pid=os.getpid(), **sizes), timeout=PATIENCE_S)
    nodes.another().close_empty()
    wait_for(lambda: tuple(find_hosts(nodes.name)) == (holds,), "the end of those that hold nothing")
    assert nodes.arena(holds).exists()
    assert not nodes.arena(empty).exists()
    refused = raystate.CorruptCheckpointError("the log can't be read", begun=False)
    for error in (refused, raystate.RunFailedError("three times", error=refused)):
        release(nodes.config, "the launch that was refused ends", after=error)
        assert tuple(find_hosts(nodes.name)) == (holds,)
    nodes.another()


def inside_another(root: Path) -> tuple[Path, str]:
    raystate.save(root / "one", {"w": np.zeros(2)})
    return root / "one" / "run", "no run can begin in"


def with_a_broken_log(root: Path) -> tuple[Path, str]:
    first = root / "run" / log_name(1)
    first.parent.mkdir(parents=True)
    first.write_text("{")
    return root / "run", "is not a log entry"


@pytest.mark.parametrize("refused", [inside_another, with_a_broken_log])
def test_a_start_that_is_refused_leaves_nothing(ray_cluster: Any, tmp_path: Path, refused: Any) -> None:
    del ray_cluster
    place, words = refused(tmp_path)
    storage, run = str(place), f"{refused.__name__}-{os.getpid()}"

    @ray.remote(num_cpus=0)
    def start() -> str:
        try:
            raystate.StateManager(raystate.StateConfig(storage=storage, run=run))
        except (raystate.ConfigError, raystate.CorruptCheckpointError) as error:
            return f"{error} begun: {error.begun}"
        return "it has begun"

    said = ray.get(start.remote(), timeout=PATIENCE_S)
    assert words in said and said.endswith("begun: False")
    name = run_hash(raystate.StateConfig(storage=storage, run=run).storage, run)
    wait_for(lambda: not run_actors(name), "the end of all that was started for it")
    assert not list(default_root(None).glob(f"{PREFIX}{name}*"))
