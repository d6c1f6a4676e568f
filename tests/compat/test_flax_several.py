"""flax's calls in a program of several processes, whose arrays none of them holds in full."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import run_job

WORKER = Path(__file__).with_name("flax_several_worker.py")


@pytest.mark.long
def test_row17_several_processes_save_and_restore(tmp_path: Path):
    for out in run_job(lambda index, port: [WORKER, 2, index, port, tmp_path / "run"], devices=2):
        assert out.endswith("done\n")
