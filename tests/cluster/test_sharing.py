"""One storage and several who want it: after a death, and under another name; all on one standing cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import raystate
from raystate.actors.admission import enter
from raystate.actors.naming import find_hosts, host_name, run_actors
from raystate.storage import run_hash
from tests.cluster.scripts import Script
from tests.cluster.strikes import newest_in_memory, pid_of
from tests.cluster.training import wait_for

pytestmark = pytest.mark.usefixtures("by_value")


def opened(config: raystate.StateConfig, **more: Any) -> raystate.StateManager:
    """A manager as soon as the run is free: on a busy machine the news of a death takes a moment."""

    def attempt() -> raystate.StateManager | None:
        try:
            return raystate.StateManager(config, **more)
        except raystate.RunInUseError:
            return None

    return wait_for(attempt, "a free run")


def entered(config: raystate.StateConfig, owner: Any) -> bool:
    """Whether `owner` has got the run by now."""
    try:
        enter(config, run_hash(config.storage, config.run), owner, takeover=False)
    except raystate.RunInUseError:
        return False
    return True


def init() -> dict[str, Any]:
    return {"x": jnp.zeros(4)}


def config_of(run: Any, **settings: Any) -> raystate.StateConfig:
    return raystate.StateConfig(storage=run.storage, run=run.run, **{"save_every_steps": 1000, **settings})


@pytest.mark.long
@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_script_frees_its_run(forks: bool, ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    """Long before it counts as idle; also when a child that it forked lives on with a copy of all its sockets."""
    run = make_run()
    script = Script(ray_cluster.address, "", run, tmp_path / "log", forks=forks)
    try:
        wait_for(lambda: script.newest() >= 5, "some steps", failed=lambda: script.error)
        script.end()
        newest = newest_in_memory(run)
        with opened(config_of(run)) as manager:
            restored = manager.restore_or_init(init)
            assert (restored.tier, restored.step) == ("memory", newest)
    finally:
        script.end()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.process.pid, signal.SIGKILL)  # what it forked


@pytest.mark.long
def test_an_interrupted_script_frees_its_run(ray_cluster: Any, make_run: Any) -> None:
    """It has left on purpose, and is not released: the next one goes on with its snapshots."""
    run = make_run()
    manager = raystate.StateManager(config_of(run))
    manager.save(1, manager.restore_or_init(init).state)
    with pytest.raises(raystate.Interrupted), manager:
        raise raystate.Interrupted("the node goes away", step=1)
    link: Any = manager._session.link
    owner = link._owner
    elsewhere = dataclasses.replace(owner, launch="another process")
    wait_for(lambda: entered(config_of(run), elsewhere), "a free run")
    with opened(config_of(run)) as manager:
        assert manager.restore_or_init(init).step <= 1


def test_a_script_that_was_killed_a_moment_ago(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    """The next one doesn't hear that it is in use, although its HostActor has had no time yet to notice the death."""
    run = make_run()
    script = Script(ray_cluster.address, "", run, tmp_path / "log")
    wait_for(lambda: script.newest() > 3, "some steps", failed=lambda: script.error)
    (host,) = find_hosts(run_hash(run.storage, run.run))
    pid = pid_of(host_name(run_hash(run.storage, run.run), host))
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    goes_on = threading.Timer(1.0, os.kill, (pid, signal.SIGCONT))
    try:
        script.end()
        goes_on.start()
        with raystate.StateManager(config_of(run)) as manager:
            assert manager.restore_or_init(init).tier == "memory"
    finally:
        goes_on.cancel()
        with contextlib.suppress(ProcessLookupError):  # the run has ended, and its actors
            os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------- another name


def test_a_second_name_on_one_storage(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    """Refused while the first is alive; when it is dead, what it held becomes durable and the second goes on from there."""
    run = make_run()
    renamed = config_of(dataclasses.replace(run, run=f"{run.run}-renamed"))
    with Script(ray_cluster.address, "", run, tmp_path / "log") as script:
        wait_for(lambda: script.newest() > 3, "some steps", failed=lambda: script.error)
        with pytest.raises(raystate.RunInUseError) as caught:
            raystate.StateManager(renamed)
        assert f"run '{renamed.run}' can't use {renamed.storage}: run '{run.run}' uses it" in str(caught.value)
        assert (caught.value.run, caught.value.pid) == (run.run, script.process.pid)
        wait_for(lambda: run_actors(run_hash(run.storage, renamed.run)) == [], "the end of the refused one's Coordinator")
        script.end()
        newest = newest_in_memory(run)
        with opened(renamed) as manager:
            restored = manager.restore_or_init(init)
            assert (restored.tier, restored.step) == ("storage", newest)
            np.testing.assert_array_equal(restored.state["x"], np.full(4, float(restored.step)))
            assert find_hosts(run_hash(run.storage, run.run)) == ()
            manager.save(restored.step + 1, restored.state)
    with raystate.StateManager(config_of(run)) as manager:  # and back again
        assert manager.restore_or_init(init).step == restored.step + 1


# ---------------------------------------------------------------- a Ray of its own


@pytest.mark.long
@pytest.mark.parametrize("own", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_script_with_a_ray_of_its_own_is_told_what_that_means(
    own: bool, ray_cluster: Any, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if own:
        monkeypatch.setenv("RAY_ADDRESS", "local")  # not the test's cluster, which runs on this machine
    else:
        monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
    with Script("", "", make_run(), tmp_path / "log") as script:
        wait_for(lambda: script.newest() > 0, "a step", failed=lambda: script.error)
        told = [line for line in script.out.read_text().splitlines() if "ends with it" in line]
        assert len(told) == own
        if own:
            assert "newest durable step" in told[0]
            assert "ray start --head" in told[0]
        (tmp_path / "stop").touch()
        assert script.process.wait(90.0) == 0, script.error
