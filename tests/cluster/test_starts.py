"""A start's HostActor, which is made while the Coordinator starts: in which order, and what is left of it where the start is refused."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from orbax.checkpoint import checkpoint_managers as ocm

import raystate
from raystate.actors import admission as entering
from raystate.actors import coordinator as coordinators
from raystate.actors.admission import this_owner
from raystate.actors.coordinator import CoordinatorActor
from raystate.actors.host import create_host
from raystate.actors.hosts import RayHosts, waiting_key
from raystate.actors.kv_store import Kept
from raystate.actors.naming import coordinator_name, find_actor, find_hosts, host_name, run_actors
from raystate.actors.release import release
from raystate.arena import arena_path, default_root
from raystate.arena.meta import lock_arena
from raystate.core.formats.messages import HostId
from raystate.storage import run_hash
from tests.cluster.strikes import pid_of, wait_for_line
from tests.cluster.training import wait_for
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("by_value")


class Start:
    """A run that nobody has used, and the node of this process."""

    def __init__(self, run: Any, **settings: Any):
        self.run = run
        self.config = raystate.StateConfig(storage=run.storage, run=run.run, **settings)
        self.name = run_hash(run.storage, run.run)
        self.here = HostId(ray.get_runtime_context().get_node_id())
        self.host = host_name(self.name, self.here)

    @property
    def arena(self) -> Path:
        return arena_path(default_root(None), self.name, self.here)

    def enter(self, launch: str = "test", **more: Any) -> None:
        entering.enter(self.config, self.name, dataclasses.replace(this_owner(launch), **more), takeover=False)

    def coordinator(self, *ahead: HostId) -> RayHosts:
        """A Coordinator's view of its hosts."""
        return RayHosts(self.config, self.name, lambda: ray.get_runtime_context().get_job_id(), ahead)

    def waits(self) -> frozenset[HostId] | None:
        return Kept(waiting_key(self.name)).get()

    def nothing_is_left(self) -> None:
        wait_for(lambda: run_actors(self.name) == [], "the end of all that was started")
        assert not self.arena.exists()


@pytest.fixture
def start(ray_cluster: Any, make_run: Any) -> Start:
    del ray_cluster
    return Start(make_run())


def held_until(path: Path) -> type[CoordinatorActor]:
    """A Coordinator whose process goes on when this file is there."""

    class Held(CoordinatorActor):
        def __init__(self, *args: Any):
            deadline_s = time.monotonic() + PATIENCE_S
            while not path.exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            super().__init__(*args)

    return Held


def test_the_host_starts_while_the_coordinator_does(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "CoordinatorActor", held_until(tmp_path / "go on"))
    with concurrent.futures.ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as ends:
        opening = pool.submit(raystate.StateManager, start.config)
        ends.callback(lambda: opening.result(PATIENCE_S).close())
        ends.callback((tmp_path / "go on").touch)
        pid = wait_for(lambda: pid_of(start.host), "a HostActor", failed=lambda: opening.done() or None)
        assert not opening.done(), "the Coordinator can't have answered"
        assert not start.arena.exists(), "nobody has been admitted"
        (tmp_path / "go on").touch()
        opening.result(PATIENCE_S)
        assert pid_of(start.host) == pid
        assert start.waits() == frozenset(), "it is a host"
        assert start.coordinator().known() == (start.here,)
    start.nothing_is_left()
    assert start.waits() is None


def test_a_run_that_is_in_use_gets_no_more_hosts(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Coordinator that refuses would not know of it. Nor does a second process of a launch make one: it is asked for as it joins."""
    made: list[HostId] = []

    def create(config: Any, name: str, host: HostId, **more: Any) -> Any:
        made.append(host)
        return create_host(config, name, host, **more)

    monkeypatch.setattr(entering, "create_host", create)
    with raystate.StateManager(start.config):
        assert made == [start.here]
        elsewhere = next(HostId(info["NodeID"]) for info in ray.nodes() if info["Alive"] and info["NodeID"] != start.here)
        with pytest.raises(raystate.RunInUseError):
            start.enter("another", node=elsewhere)
        assert made == [start.here]
        assert find_hosts(start.name) == (start.here,)
    start.nothing_is_left()


def test_a_start_under_another_name_that_is_refused_leaves_nothing(start: Start) -> None:
    """Its Coordinator is made, and with it a HostActor."""
    renamed = Start(dataclasses.replace(start.run, run=f"{start.run.run}-renamed"))
    with raystate.StateManager(start.config):
        with pytest.raises(raystate.RunInUseError, match=renamed.config.run):
            renamed.enter()
        assert renamed.waits() is None
        renamed.nothing_is_left()


def test_one_that_has_become_a_host_is_not_dismissed(start: Start) -> None:
    """Somebody has taken the run over from the process that made it, and trains beside it."""
    host = create_host(start.config, start.name, start.here)
    hosts = start.coordinator(start.here)
    hosts.ensure(start.here, pytest.fail)
    wait_for(start.arena.exists, "a host")
    entering._dismiss([host])
    assert find_hosts(start.name) == (start.here,)
    hosts.close_all(remove_arena=True)
    start.nothing_is_left()


def test_one_that_is_still_starting_is_dismissed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can't hear yet, and whoever has made it may be gone when it could."""
    host = create_host(start.config, start.name, start.here)
    monkeypatch.setattr(entering, "QUICK_ANSWER_S", 0.0)
    entering._dismiss([host])
    start.nothing_is_left()


def test_a_coordinator_that_never_gets_the_run_ends_those_that_wait(start: Start) -> None:
    """The process that made both is gone, and another run still has the storage."""
    create_host(start.config, start.name, start.here)
    start.coordinator(start.here).end_waiting()
    start.nothing_is_left()
    assert start.waits() is None


def test_a_coordinator_that_starts_again_knows_what_was_made_ahead(start: Start) -> None:
    create_host(start.config, start.name, start.here)
    hosts = start.coordinator(start.here)
    assert hosts.known() == ()
    hosts.keep_waiting()
    again = start.coordinator()
    assert again.known() == ()
    again.ensure(start.here, pytest.fail)
    assert start.coordinator().known() == (start.here,)
    wait_for(start.arena.exists, "a host")
    again.close_all(remove_arena=True)
    start.nothing_is_left()


def test_a_claim_that_fails_ends_one_that_is_still_starting(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    create_host(start.config, start.name, start.here)  # before the Coordinator has looked
    monkeypatch.setattr("raystate.actors.hosts.AT_ONCE_S", 0.0)
    monkeypatch.setattr("raystate.actors.hosts.ENDS_S", 0.0)
    start.coordinator(start.here).close_empty()
    start.nothing_is_left()


@ray.remote(num_cpus=0)
class Starter:
    """A process that is killed in mid-start."""

    def enter(self, config: Any, coordinator: Callable[[], Any]) -> None:
        coordinators.CoordinatorActor = coordinator()
        entering.enter(config, run_hash(config.storage, config.run), this_owner("killed"), takeover=False)

    def pid(self) -> int:
        return os.getpid()


def test_a_process_that_is_killed_in_its_start_leaves_nothing(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    del ray_cluster
    start, path = Start(make_run(), idle_timeout_s=0.5), tmp_path / "go on"
    starter: Any = Starter.options(max_concurrency=2).remote()
    ray.get(starter.pid.remote(), timeout=PATIENCE_S)
    starter.enter.remote(start.config, lambda: held_until(path))
    wait_for(lambda: find_hosts(start.name), "a HostActor")
    assert find_actor(coordinator_name(start.name)) is not None
    ray.kill(starter)
    path.touch()
    start.nothing_is_left()


def accuracy(metrics: dict[str, float]) -> float:
    return metrics["acc"]


@pytest.mark.parametrize("of_main", [False, True])
def test_a_policy_may_hold_a_function_of_the_script(start: Start, of_main: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "__module__", "__main__")
    rank = accuracy if of_main else lambda metrics: metrics["acc"]
    config = start.config.replace(save_every_steps=1, keep_policy=ocm.BestN(get_metric_fn=rank, n=1), start_timeout_s=PATIENCE_S)
    with raystate.StateManager(config) as manager:
        manager.restore({"n": 0})
        for step, metric in enumerate((1.0, 9.0, 3.0, 2.0), start=1):
            manager.save(step, {"n": step}, metrics={"acc": metric})
            manager.wait_until_finished()
    assert raystate.Reader(config.storage).all_steps() == [2, 4], "the best one and the newest"
    start.nothing_is_left()


def test_a_policy_that_cannot_be_brought_to_the_coordinator_is_named(start: Start) -> None:
    lock = threading.Lock()
    policy = ocm.BestN(get_metric_fn=lambda _: float(lock.locked()), n=1)
    with pytest.raises(raystate.ConfigError, match=r"keep_policy must pickle.*lock") as caught:
        raystate.StateManager(start.config.replace(keep_policy=policy))
    assert caught.value.field == "keep_policy"
    assert run_actors(start.name) == []


def test_why_a_host_cannot_begin_is_told(ray_cluster: Any, make_run: Any) -> None:
    """The trainer does not wait for it until its time is over."""
    del ray_cluster
    start = Start(make_run(), idle_timeout_s=0.5, start_timeout_s=PATIENCE_S)
    lock_arena(start.arena, 0.0).release()
    start.arena.chmod(0o777)
    try:
        with pytest.raises(
            raystate.RaystateError, match=rf"^the HostActor of node {start.here[:8]} .* can't begin: .* not a private"
        ) as caught:
            raystate.StateManager(start.config)
        assert not isinstance(caught.value, raystate.BarrierTimeoutError)
        start.arena.chmod(0o700)
        raystate.StateManager(start.config).close()
    finally:
        shutil.rmtree(start.arena, ignore_errors=True)
    start.nothing_is_left()


def test_why_a_coordinator_cannot_begin_is_told(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(CoordinatorActor):
        def __init__(self, *_: Any):
            raise ValueError("no such place")

    monkeypatch.setattr(coordinators, "CoordinatorActor", Broken)
    told = ""
    for timeout_s in (5.0, 20.0, 100.0):  # a busy machine takes long to start a process
        start.config = start.config.replace(start_timeout_s=timeout_s)
        with pytest.raises(raystate.BarrierTimeoutError) as caught:
            start.enter()
        told = str(caught.value)
        if "ValueError" in told:
            break
    assert "ValueError: no such place" in told
    coordinator: Any = find_actor(coordinator_name(start.name))
    if coordinator is not None:  # Ray may have given it up by itself
        ray.kill(coordinator, no_restart=True)
    start.nothing_is_left()


def test_a_coordinator_whose_restart_fails_tries_again(start: Start) -> None:
    """Ray makes none again whose constructor has raised: its trainers would lose it for good."""
    start.enter()
    kept, name = Kept(f"raystate:owner:{start.name}"), coordinator_name(start.name)
    owner, pid = kept.get(), wait_for(lambda: pid_of(name), "a Coordinator")
    kept.put(Unreadable())
    os.kill(pid, signal.SIGKILL)
    told = f"raystate {start.config.run}: WARNING: the Coordinator can't start again yet"
    wait_for_line(told, failed=lambda: None if find_actor(name) else "Ray has given it up")
    kept.put(owner)
    assert wait_for(lambda: pid_of(name), "a Coordinator") != pid
    start.enter()
    release(start.config, "that is all")
    start.nothing_is_left()


class Unreadable:
    """Can't be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)
