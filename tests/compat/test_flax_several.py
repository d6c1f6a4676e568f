"""flax's calls in a program of several processes, whose arrays none of them holds in full."""

from __future__ import annotations

from pathlib import Path

from tests.processes import run_job

WORKER = Path(__file__).with_name("flax_several_worker.py")


def test_several_processes_save_together_beside_the_training_and_name_who_is_missing(tmp_path: Path):
    for out in run_job(lambda index, port: [WORKER, 2, index, port, tmp_path / "run"], devices=2):
        assert out.endswith("done\n")
