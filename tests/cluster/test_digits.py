"""The second job, a Flax linen TrainState with batch statistics: as a script with workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S
from tests.processes import REPO, job_environment


def _run(*command: str, timeout_s: float = 100.0) -> subprocess.CompletedProcess[str]:
    environment = {**job_environment(1), "RAY_ADDRESS": "local"}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=timeout_s, check=False, cwd=REPO, env=environment
    )


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
