"""Several processes start from a source: all from the same step, and none waits for one that has found nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

import raystate
from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[2]


def test_row10_all_processes_read_the_same_source(tmp_path: Path):
    for step in (1, 2):
        raystate.save(tmp_path / f"run/{step}", {"w": np.full(3, float(step))})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "XLA_FLAGS": ""}
    program = [sys.executable, str(Path(__file__).with_name("source_worker.py")), "2"]
    processes = [
        subprocess.Popen(
            [*program, str(index), str(port), str(tmp_path / "run")],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            out, error = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0 and out.endswith("done\n"), error[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait()
