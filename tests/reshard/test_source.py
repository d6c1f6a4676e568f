"""Several processes start from a source: all from the same step, and none waits for one that has found nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import raystate
from tests.processes import run_job

WORKER = Path(__file__).with_name("source_worker.py")


def test_all_processes_read_the_same_source(tmp_path: Path):
    for step in (1, 2):
        raystate.save(tmp_path / f"run/{step}", {"w": np.full(3, float(step))})
    for out in run_job(lambda index, port: [WORKER, 2, index, port, tmp_path / "run"]):
        assert out.endswith("done\n")
