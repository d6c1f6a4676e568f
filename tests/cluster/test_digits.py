"""The second job, a Flax linen TrainState with batch statistics: as a script with workers."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.processes import REPO, job_environment, run_python


def _run(folder: Path, *options: str, code: int) -> subprocess.CompletedProcess[str]:
    command = ("-m", "jobs.train_digits", "--storage", folder, *options)
    return run_python(*command, code=code, cwd=REPO, env={**job_environment(1), "RAY_ADDRESS": "local"})


def test_the_script_itself_trains_with_workers(tmp_path: Path) -> None:
    assert "after step 20" in _run(tmp_path / "run", "--workers", "1", "--steps", "20", code=0).stdout


def test_bad_usage_is_one_line(tmp_path: Path) -> None:
    for arguments in (["--steps", "0"], ["--batch-size", "7", "--workers", "2"], ["--storage", "nosuch://x/y"]):
        done = _run(tmp_path, *arguments, code=2)
        assert "Traceback" not in done.stderr
        assert done.stderr.splitlines()[-1].startswith("train_digits: ")
