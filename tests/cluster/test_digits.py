"""The second job, a Flax linen TrainState with batch statistics: as a notebook cell run twice, and as a script with workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[2]

# A cell, run again after an exception, and again with more steps.
CELLS = """
import json, logging, sys, ray
from jobs import train_digits
ray.init("local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
storage = sys.argv[1]
class Broken(train_digits.Batches):
    def __next__(self):
        if self.get_state()["given"] == 40:
            raise OSError("the disk with the images is gone")
        return super().__next__()
whole, train_digits.Batches = train_digits.Batches, Broken
try:
    train_digits.train(storage, steps=150)
except OSError:
    print("failed once")
train_digits.Batches = whole
print(json.dumps(train_digits.train(storage, steps=150)._asdict()))
print(json.dumps(train_digits.train(storage, steps=150)._asdict()))
"""


def _run(*command: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(REPO), "RAY_ADDRESS": "local"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout_s, check=False, cwd=REPO, env=environment
    )


@pytest.mark.long
def test_a_cell_that_is_run_again(tmp_path: Path) -> None:
    done = _run("-c", CELLS, str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert "failed once" in lines
    found = [json.loads(line) for line in lines if line.startswith("{")]
    # Steps of milliseconds are not all snapshotted, so a few may be repeated.
    assert 1 <= found[0]["resumed_at"] <= 40
    assert found[1]["resumed_at"] == 150
    assert all(summary["test_accuracy"] >= 0.97 and summary["step"] == 150 for summary in found), found


def test_the_script_itself_trains_with_workers(tmp_path: Path) -> None:
    done = _run(
        "-m", "jobs.train_digits", "--storage", str(tmp_path / "run"), "--workers", "1", "--steps", "20", timeout_s=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "after step 20" in done.stdout


def test_bad_usage_is_one_line(tmp_path: Path) -> None:
    for arguments in (["--steps", "0"], ["--batch-size", "7", "--workers", "2"], ["--storage", "nosuch://x/y"]):
        done = _run("-m", "jobs.train_digits", "--storage", str(tmp_path), *arguments)
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("train_digits: ")
