"""All processes of a run stand still together, its Ray's too, for longer than any deadline, and go on.

The decisions alone: test_simulator.test_processes_that_stand_still_together_go_on_as_if_nothing_had_been.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs.striking import family, kill_family
from tests.cluster.training import REPO, wait_for
from tests.processes import job_environment

STEPS = 40
LIMIT_S = 12.0
STILL_S = 1.5 * LIMIT_S

TRAINS = """
import json, sys, time
import jax.numpy as jnp, raystate
given = json.loads(sys.argv[1])

def train():
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
        for step in range(restored.step, given["steps"]):
            time.sleep(0.25)
            manager.save(step + 1, {"x": restored.state["x"] + step})
            if manager._rank == 0:
                open(given["reached"], "a").write(f"{step + 1}\\n")

config = raystate.StateConfig(storage=given["storage"], run=given["run"], save_every_steps=10, **given["limits"])
result = raystate.fit(train, config, num_workers=2)
print(json.dumps([result.step, [one.cause for one in result.recoveries], list(result.lost)]))
"""


def stop(pid: int) -> set[psutil.Process]:
    """SIGSTOP all of them; one that has just been started, too."""
    stopped: set[psutil.Process] = set()
    while new := {*family(pid)} - stopped:
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
        stopped |= new
    return stopped


@pytest.mark.long
def test_a_run_whose_processes_stood_still_together_goes_on(make_run: Any, tmp_path: Path) -> None:
    run, reached = make_run(), tmp_path / "reached"
    limits = dict.fromkeys(("host_timeout_s", "barrier_timeout_s", "hang_timeout_s", "save_timeout_s"), LIMIT_S)
    given = {"storage": run.storage, "run": run.run, "steps": STEPS, "reached": str(reached), "limits": limits}
    environment = {**job_environment(1), "RAY_ADDRESS": "local"}
    with subprocess.Popen(
        [sys.executable, "-c", TRAINS, json.dumps(given)], cwd=REPO, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0,
    ) as driver:  # fmt: skip
        try:
            wait_for(lambda: reached.exists() and len(reached.read_text().splitlines()) >= 12, "step 12")
            stopped = stop(driver.pid)
            time.sleep(STILL_S)  # it is what is tested
            for process in stopped:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
            said, _ = driver.communicate()
        finally:
            kill_family(driver.pid)
    assert driver.returncode == 0, said[-3000:]
    assert json.loads(said.splitlines()[-1]) == [STEPS, [], []], said[-3000:]
    assert "is down" not in said and "made no step" not in said, said[-3000:]
