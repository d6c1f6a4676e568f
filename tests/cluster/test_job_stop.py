"""`ray job stop` in mid-training: the driver has three seconds, and the run ends in order without it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.observe.ledger.reader import read_ledger
from raystate.storage import open_storage, run_hash
from tests.processes import run_python

REPO = Path(__file__).parents[2]
AGENT_PORT = 52365  # Ray's own choice for what takes jobs, on each node

STOPS = """
import json, sys, time
from pathlib import Path
from jobs.demo.cluster import local_cluster, submit
from ray.job_submission import JobSubmissionClient
from raystate.actors.naming import run_actors
given, out, run = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

def wait(condition, what):
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s, f"no {what}: {client.get_job_logs(job)[-2000:]}"
        time.sleep(0.1)

def steps():
    lines = [line for path in out.glob("events-*") for line in path.read_text().split("\\n")[:-1]]
    return max([event["step"] for event in map(json.loads, lines) if event["event"] == "step"], default=0)

with local_cluster() as address:
    client = JobSubmissionClient(address)
    job = submit(client, f"{sys.executable} -m tests.cluster.drive {given}")
    wait(lambda: steps() >= 8, "step 8")
    client.stop_job(job)
    wait(lambda: client.get_job_status(job).is_terminal(), "end of the job")
    before = steps()
    wait(lambda: not run_actors(run), "end of the run's actors")
    said = client.get_job_logs(job)
    print(json.dumps({"status": client.get_job_status(job).value, "steps": before, "said": said}))
"""


@pytest.mark.long
def test_a_stopped_job_leaves_its_newest_snapshot_and_nothing_else(make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    out = tmp_path / "out"
    out.mkdir()
    given = {
        "address": "auto", "storage": run.storage, "run": run.run, "out": str(out), "steps": 1000, "step_s": 0.2,
        "settings": {"save_every_steps": 1000},
    }  # fmt: skip
    (tmp_path / "given.json").write_text(json.dumps(given))
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with socket.socket() as another_ray:
        with contextlib.suppress(OSError):  # there is one on this machine
            another_ray.bind(("", AGENT_PORT))
        given = (tmp_path / "given.json", out, run_hash(run.storage, run.run))
        done = run_python("-c", STOPS, *given, cwd=REPO, env=environment)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["status"] == "STOPPED"
    assert raystate.Reader(run.storage).latest_step() >= found["steps"] - 2
    # A stop is no failure, and no restart follows on it.
    assert "starting again" not in found["said"] and " died" not in found["said"], found["said"][-3000:]
    assert read_ledger(open_storage(run.storage)).recoveries == ()
