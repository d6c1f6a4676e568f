"""flax's calls in a program of several processes, whose arrays none of them holds in full."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[2]


@pytest.mark.long
def test_row17_several_processes_save_and_restore(tmp_path: Path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    program = [sys.executable, str(Path(__file__).with_name("flax_several_worker.py")), "2"]
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
