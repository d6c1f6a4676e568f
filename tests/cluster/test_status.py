"""`raystate status`, on a cluster with runs and without."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import psutil

import raystate
from jobs.striking import kill_family
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster.training import wait_for
from tests.patience import PATIENCE_S
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
        assert out.splitlines()[0].startswith(f"{run.run}  ") and out.splitlines()[0].endswith(f"  {config.storage}")
        assert re.search(r"^trains on +1 rank: Ray job ", out, re.MULTILINE)
        assert f"pid {os.getpid()} on node" in out
        assert re.search(r"newest 2 \([\d.]+ \w+ ago\)", out) and re.search(r"durable 1 \([\d.]+ \w+ ago\)", out)
        assert "if all hosts are lost, 1 step" in out
        assert re.search(rf"^[0-9a-f]{{8}} +\({re.escape(platform.node())}\) +0 +\d", out, re.MULTILINE)
        code, out, _ = status("--run", run.run, "--json", address=ray_cluster.address)
        (found,) = json.loads(out)["runs"]
        assert (found["storage"], found["status"]["durable_step"], found["status"]["world"]) == (config.storage, 1, 1)
        values = {one["name"]: one["value"] for one in found["metrics"]}
        assert (values["raystate_newest_step"], values["raystate_steps_not_durable"], values["raystate_host_up"]) == (2, 1, 1)
        (host,) = found["status"]["hosts"]
        assert host["ranks"] == [0] and host["up"] and host["machine"] == platform.node()
        assert found["said"][-1].endswith("begins without a step: the run has no step yet"), "no line that comes with each save"
        assert found["status"]["durable_age_s"] > 0
        watches(config.storage, run.run, ray_cluster.address)
        code, _, complaint = status(f"{run.storage}-other", address=ray_cluster.address)
        assert code == 2
        assert "its runs: " in complaint and f"{run.run!r} on {config.storage}" in complaint
    wait_for(lambda: run_actors(run_hash(config.storage, config.run)) == [], "the end of the run's actors")
    code, out, _ = status(run.storage, address=ray_cluster.address)
    assert code == 0 and "FINISHED  step 2 is durable" in out
    assert re.search(r"^durable +step 2 \(", out, re.MULTILINE) and re.search("^attempts +1 of the Coordinator", out, re.MULTILINE)
    code, _, complaint = status("--run", run.run, address=ray_cluster.address)
    assert code == 2
    assert f"there is no run {run.run!r} on the Ray cluster at {ray_cluster.address}" in complaint


def watches(storage: str, run: str, address: str) -> None:
    """In a pipe: blocks without colours, also after the process that asks has died; Ctrl-C ends it."""
    environment = {**os.environ, "RAY_ADDRESS": address, "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "raystate", "status", storage, "--watch", "--every", "0.2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, process_group=0)
    assert process.stdout is not None and process.stderr is not None
    ends = threading.Timer(PATIENCE_S, process.kill)
    ends.start()
    try:
        lines = iter(process.stdout.readline, "")
        assert next(line for line in lines if line.startswith(f"{run}  "))
        for child in psutil.Process(process.pid).children():
            child.kill()
            child.wait(PATIENCE_S)
        for _ in range(3):
            assert next(line for line in lines if line.startswith(f"{run}  "))
        process.send_signal(signal.SIGINT)
        left, complaint = process.communicate(timeout=PATIENCE_S)
    finally:
        ends.cancel()
        kill_family(process.pid)
    assert process.returncode == 0 and "Traceback" not in complaint
    assert "\x1b" not in left


def test_no_cluster_is_one_sentence() -> None:
    code, out, complaint = status(address="ftp://nowhere")
    assert (code, out) == (2, "")
    assert complaint.startswith("raystate: the Ray of RAY_ADDRESS='ftp://nowhere' could not be joined")
