"""Plain scripts that use raystate, each a process and a Ray job of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.cluster.training import REPO

TRAINS = """
import json, multiprocessing, os, sys, time
import jax.numpy as jnp, ray, raystate
given = json.loads(sys.argv[1])
if given["address"]:
    ray.init(address=given["address"], namespace=given["namespace"] or None, log_to_driver=False, logging_level="ERROR")
try:
    config = raystate.StateConfig(storage=given["storage"], run=given["run"], save_every_steps=1000, snapshot_every_steps=1)
    with raystate.StateManager(config) as manager:
        if given["forks"]:  # as a data loader does
            multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
        x = manager.restore_or_init(lambda: {"x": jnp.zeros(4)}).state["x"]
        step = int(x[0])
        print("from", step, flush=True)
        while not os.path.exists(given["stop"]):
            step, x = step + 1, x + 1
            manager.save(step, {"x": x})
            print("step", step, flush=True)
            time.sleep(0.05)
except raystate.RunInUseError as error:
    print("in use:", error, flush=True)
    sys.exit(3)
"""


class Script:
    """Trains until `out.parent / "stop"` exists.

    Args:
        address: of a Ray cluster; "" for the script to start its own.
        forks: it forks a child, which outlives it.
    """

    def __init__(self, address: str, namespace: str, run: Any, out: Path, *, forks: bool = False):
        self.out = out
        given = {
            "address": address,
            "namespace": namespace,
            "storage": run.storage,
            "run": run.run,
            "stop": str(out.parent / "stop"),
            "forks": forks,
        }
        with open(out, "wb") as stream:
            environment = {**os.environ, "PYTHONPATH": str(REPO)}
            command = [sys.executable, "-c", TRAINS, json.dumps(given)]
            # In a session of its own, so that a forked child can be found when the script is gone.
            self.process = subprocess.Popen(
                command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    @property
    def error(self) -> str | None:
        return None if self.process.poll() in (None, 0) else self.out.read_text()[-3000:]

    def said(self, word: str) -> list[str]:
        whole, _, _ = self.out.read_text().rpartition("\n")  # the last line may be half written
        return [line for line in whole.splitlines() if line.startswith(word)]

    def newest(self) -> int:
        steps = self.said("step")
        return int(steps[-1].split()[1]) if steps else -1

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """SIGKILL, the script only."""
        self.process.kill()
        self.process.wait()
