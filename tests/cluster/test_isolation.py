"""Several that want the same storage, and runs that outlive what began them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import raystate
from raystate.actors.admission import this_owner
from raystate.actors.coordinator import CoordinatorActor, Welcome
from raystate.actors.host import HostActor
from raystate.actors.naming import NAMESPACE, coordinator_name, find_actor, find_hosts, host_name, protocol, run_actors
from raystate.core.formats.log import claim_entry
from raystate.core.formats.messages import Failure
from raystate.storage import RunLog, open_storage, run_hash
from tests.cluster.scripts import Script
from tests.cluster.strikes import newest_in_memory, pid_of
from tests.cluster.training import wait_for
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("by_value")


@pytest.mark.long
def test_two_submissions_that_race_for_one_storage(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    scripts = [Script(ray_cluster.address, namespace, run, tmp_path / f"{i}.log") for i, namespace in enumerate(("", "mine"))]
    try:
        loser = wait_for(lambda: next((one for one in scripts if one.process.poll() is not None), None), "an end")
        (winner,) = set(scripts) - {loser}
        assert loser.process.returncode == 3, loser.out.read_text()
        (message,) = loser.said("in use:")
        assert re.search(
            rf"run '{run.run}' on file://\S+ is in use by Ray job \w+ \(pid {winner.process.pid} on node \w{{8}}, last", message
        )
        assert "takeover=True" in message
        wait_for(lambda: len(winner.said("step")) > 3, "the winner's training")
        (tmp_path / "stop").touch()
        assert winner.process.wait(PATIENCE_S) == 0, winner.out.read_text()
    finally:
        for script in scripts:
            script.end()
    newest = int(winner.said("step")[-1].split()[1])
    assert raystate.Reader(run.storage).all_steps() == [newest]


class OlderCoordinator(CoordinatorActor):
    """What an installation of another version has left behind."""

    async def hello(self, owner: Any, takeover: bool) -> Welcome:
        del owner, takeover
        return Welcome(protocol="0")

    async def protocol(self) -> int:
        return 0


class OlderHost(HostActor):
    def protocol(self) -> int:
        return 0


@pytest.mark.long
def test_a_newer_version_replaces_the_actors_and_adopts_what_they_held(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    name = run_hash(run.storage, run.run)
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000)
    with Script(ray_cluster.address, "", run, tmp_path / "log") as script:
        wait_for(lambda: len(script.said("step")) > 10, "ten steps")
    newest = newest_in_memory(run)
    (host,) = find_hosts(name)
    for actor in filter(None, [find_actor(coordinator_name(name)), find_actor(host_name(name, host))]):
        ray.kill(actor, no_restart=True)
    wait_for(lambda: run_actors(name) == [], "the end of the run's actors")
    options = {"namespace": NAMESPACE, "lifetime": "detached", "num_cpus": 0, "max_restarts": -1}
    old_coordinator = ray.remote(OlderCoordinator).options(name=coordinator_name(name), **options)
    old_coordinator = old_coordinator.remote(config, name, this_owner("older"))
    old_host = (
        ray.remote(OlderHost)
        .options(name=host_name(name, host), scheduling_strategy=NodeAffinitySchedulingStrategy(host, soft=False), **options)
        .remote(run=run.run, run_hash=name, storage_url=config.storage, host=host, host_memory="40%", arena_dir=None)
    )
    assert ray.get([old_coordinator.protocol.remote(), old_host.protocol.remote()], timeout=PATIENCE_S) == [0, 0]
    with raystate.StateManager(config) as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        assert (restored.tier, restored.step) == ("memory", newest)
        assert np.asarray(restored.state["x"]).tolist() == [restored.step] * 4
        living = [find_actor(actor) for actor in run_actors(name)]
        assert ray.get([actor.protocol.remote() for actor in living if actor is not None], timeout=PATIENCE_S) == [
            protocol(),
            protocol(),
        ]


@pytest.mark.long
def test_a_restarted_coordinator_knows_whose_the_run_is(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    """It comes back with the arguments of its first start, by another job."""
    run = make_run()
    name = run_hash(run.storage, run.run)
    with Script(ray_cluster.address, "", run, tmp_path / "log") as script:
        wait_for(lambda: len(script.said("step")) > 3, "some steps")
    # On a busy machine the news of the killed job's death may still be on its way.
    with raystate.StateManager(raystate.StateConfig(storage=run.storage, run=run.run), takeover=True) as manager:
        state = manager.restore_or_init(lambda: {"x": jnp.zeros(4)}).state
        manager.save(1000, state)
        pid = pid_of(coordinator_name(name))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pid_of(coordinator_name(name)) not in (None, pid), "a new Coordinator")
        coordinator = find_actor(coordinator_name(name))
        assert coordinator is not None
        link: Any = manager._session.link
        mine, other = link._owner, this_owner("another")
        refused, accepted = ray.get([coordinator.hello.remote(one, False) for one in (other, mine)], timeout=PATIENCE_S)
        assert isinstance(refused, Failure)
        assert refused.error == "RunInUseError"
        assert isinstance(accepted, Welcome)


def test_a_run_outlives_the_placement_group_that_began_it(ray_cluster: Any, make_run: Any) -> None:
    """That of a Ray Tune trial, for one: Ray removes it with the trial, and ends the actors in it for good."""
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=100)

    class Trial:
        def train(self) -> int:
            manager = raystate.StateManager(config)
            state = manager.restore_or_init(lambda: {"x": jnp.zeros(4)}).state
            manager.save(1, state)
            manager._pipeline.drain()
            return os.getpid()

    group = placement_group([{"CPU": 1}])
    place = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    trial: Any = ray.remote(num_cpus=1)(Trial).options(scheduling_strategy=place).remote()
    trains: Any = ray.get(trial.train.remote(), timeout=PATIENCE_S)
    name = coordinator_name(run_hash(run.storage, run.run))
    pid = pid_of(name)
    ray.kill(trial)
    remove_placement_group(group)
    wait_for(lambda: placement_group_table(group)["state"] == "REMOVED", "the group is removed")
    wait_for(lambda: not psutil.pid_exists(trains), "the trial's end")
    with raystate.StateManager(config) as manager:
        restored = manager.restore()
        assert restored is not None and restored.step == 1, "from memory: nothing is durable"
        assert pid_of(name) == pid


def test_a_coordinator_that_stops_with_an_exception_comes_back(ray_cluster: Any, make_run: Any) -> None:
    """Whatever it stumbled over: a new attempt begins with what storage and the hosts say. One that stumbles at once again ends."""
    run = make_run()
    with raystate.StateManager(raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1)) as manager:
        state = manager.restore_or_init(lambda: {"x": jnp.zeros(4)}).state
        assert manager.save(1, state)
        manager.wait_until_finished()
        name = coordinator_name(run_hash(run.storage, run.run))
        before, coordinator = pid_of(name), find_actor(name)
        assert coordinator is not None
        coordinator.tell.remote("no event")
        assert manager.save(2, state)
        manager.wait_until_finished()
        assert pid_of(name) not in (None, before)
        assert manager.all_steps() == [1, 2]


def test_a_second_manager_of_the_run_in_one_process_closes_the_first(ray_cluster: Any, make_run: Any) -> None:
    """As where a cell of a notebook is run again; the manager of another run stays."""
    configs = [raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1) for run in (make_run(), make_run())]
    other, first = (raystate.StateManager(config) for config in reversed(configs))
    for manager in (first, other):
        manager.restore()
        manager.save(1, {"x": jnp.zeros(4)})
    with raystate.StateManager(configs[0]) as second, other:
        restored = second.restore()
        assert restored is not None and restored.step == 1
        with pytest.raises(raystate.RaystateError, match="closed"):
            first.save(2, {"x": jnp.zeros(4)})
        other.save(2, {"x": jnp.zeros(4)})
    assert [raystate.Reader(config.storage).all_steps() for config in configs] == [[1], [1, 2]]


def test_a_coordinator_beside_its_own_successor_ends(ray_cluster: Any, make_run: Any) -> None:
    """One that Ray took for dead lives on, and another one of its cluster has claimed the run: trainers go on with the newest."""
    run = make_run()
    name = run_hash(run.storage, run.run)
    with raystate.StateManager(raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1)) as manager:
        state = manager.restore_or_init(lambda: {"x": jnp.zeros(4)}).state
        assert manager.save(1, state)
        manager.wait_until_finished()
        old = pid_of(coordinator_name(name))
        log = RunLog(open_storage(run.storage))
        tail = log.tail()
        assert tail is not None
        log.claim(lambda before: claim_entry(before, f"{tail.writer.rpartition('.')[0]}.successor", run.run))
        assert manager.save(2, state)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]
        assert pid_of(coordinator_name(name)) not in (None, old)
