"""`raystate status`, on a cluster with runs and without."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np

import raystate
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster.training import wait_for
from tests.processes import run_python

STATE = {"w": np.zeros(1000)}


def status(*arguments: str, address: str) -> tuple[int, str, str]:
    environment = {**os.environ, "RAY_ADDRESS": address, "COLUMNS": "80", "NO_COLOR": "1"}
    done = run_python("-m", "raystate", "status", *arguments, code=None, env=environment)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_what_a_run_does_now(ray_cluster: Any, make_run: Any) -> None:
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000)
    with raystate.StateManager(config) as manager:
        manager.restore(STATE)
        manager.save(1, STATE, force=True)
        manager.wait_until_finished()
        manager.save(2, STATE)
        code, out, _ = status(run.storage, address=ray_cluster.address)
        assert code == 0
        assert out.splitlines()[0] == f"{run.run}  {config.storage}"
        assert "trains on 1 rank: Ray job " in out
        assert f"pid {os.getpid()} on node" in out
        assert "newest steps: 2 trained" in out and "1 durable" in out
        assert all(len(line) <= 80 for line in out.splitlines()[1:])
        code, out, _ = status("--run", run.run, "--json", address=ray_cluster.address)
        (found,) = json.loads(out)["runs"]
        assert (found["storage"], found["status"]["durable_step"], found["status"]["world"]) == (config.storage, 1, 1)
        values = {one["name"]: one["value"] for one in found["metrics"]}
        assert (values["raystate_newest_step"], values["raystate_steps_not_durable"], values["raystate_host_up"]) == (2, 1, 1)
        (host,) = found["status"]["hosts"]
        assert host["ranks"] == [0] and host["up"]
        code, _, complaint = status(f"{run.storage}-other", address=ray_cluster.address)
        assert code == 2
        assert "its runs: " in complaint and f"{run.run!r} on {config.storage}" in complaint
    wait_for(lambda: run_actors(run_hash(config.storage, config.run)) == [], "the end of the run's actors")
    code, _, complaint = status("--run", run.run, address=ray_cluster.address)
    assert code == 2
    assert f"there is no run {run.run!r} on the Ray cluster at {ray_cluster.address}" in complaint


def test_no_cluster_is_one_sentence() -> None:
    code, out, complaint = status(address="ftp://nowhere")
    assert (code, out) == (2, "")
    assert complaint.startswith("raystate: the Ray of RAY_ADDRESS='ftp://nowhere' could not be joined")
