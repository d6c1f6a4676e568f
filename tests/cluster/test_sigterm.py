"""SIGTERM to a plain script that has started its own Ray."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import raystate
from jobs.striking import kill_family
from tests.cluster.training import REPO, wait_for
from tests.processes import job_environment

TRAINS = """
import os, signal, sys, time
import jax.numpy as jnp, ray, raystate
storage, run, how = sys.argv[1:]
told = []
if how == "own":
    signal.signal(signal.SIGTERM, lambda *_: told.append(1))

@ray.remote
def stop(pid):
    os.kill(pid, signal.SIGTERM)
    time.sleep(600)

def trains(manager):
    x = manager.restore_or_init(lambda: {"x": jnp.zeros(4)}).state["x"]
    step = 0
    while not told:
        step, x = step + 1, x + 1
        manager.save(step, {"x": x})
        print("step", step, flush=True)
        if how == "in ray" and step == 5:
            ray.get(stop.remote(os.getpid()))  # Ray puts its own SystemExit(1) in the place of ours
        time.sleep(0.05)
    manager.close()
    print("the loop has ended", flush=True)

config = raystate.StateConfig(storage=storage, run=run, save_every_steps=1000)
if how == "bare":
    trains(raystate.StateManager(config))
else:
    with raystate.StateManager(config) as manager:
        trains(manager)
"""


@pytest.mark.parametrize(
    ("how", "signals", "code"),
    [
        ("with", 2, 143),
        ("in ray", 0, 143),
        ("asyncio", 1, 143),
        pytest.param("bare", 1, 143, marks=pytest.mark.long),
        pytest.param("own", 1, 0, marks=pytest.mark.long),
    ],
)
def test_its_newest_step_is_durable(make_run: Any, tmp_path: Path, how: str, signals: int, code: int) -> None:
    """Ray's handler ended its Ray before that, and then the process, with the stack of its C++."""
    run, out = make_run(), tmp_path / "out"
    environment = {**job_environment(1), "RAY_ADDRESS": "local"}
    command = [sys.executable, "-c", TRAINS, run.storage, run.run, how]
    with (
        out.open("wb") as stream,
        subprocess.Popen(command, cwd=REPO, env=environment, stdout=stream, stderr=subprocess.STDOUT, process_group=0) as script,
    ):
        try:
            wait_for(lambda: "step 5\n" in out.read_text(), "step 5", failed=lambda: out.read_text() if script.poll() else None)
            for _ in range(signals):
                script.send_signal(signal.SIGTERM)
                time.sleep(0.1)  # the second one comes in the midst of what the first one began
            script.wait()
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                kill_family(script.pid)
    said = out.read_text()
    assert script.returncode == code, said[-3000:]
    steps = [int(line.split()[1]) for line in said.splitlines() if line.startswith("step ")]
    assert raystate.Reader(run.storage).latest_step() in (steps[-1], steps[-1] + 1), said[-3000:]
    assert ("the loop has ended" in said) == (how == "own")
    assert not any(text in said for text in ("Traceback", "StackTrace", "SIGABRT", "was not closed")), said[-3000:]
