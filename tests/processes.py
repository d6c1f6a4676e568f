"""JAX jobs of several processes on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[1]


def free_port() -> int:
    """That nobody listens on now, for the job's own coordinator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def job_environment(devices: int) -> dict[str, str]:
    """Of a process with so many CPU devices."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PYTHONPATH": str(REPO)}


def run_job(
    command: Callable[[int, int], Sequence[object]],
    *,
    processes: int = 2,
    devices: int = 1,
    cwd: Path | None = None,
) -> list[str]:
    """The standard outputs of a job's processes, by index; fails with the end of a process's errors if it fails.

    Args:
        command: (index of the process, port of the job's coordinator) -> arguments for python.
        devices: of each process.
    """
    port = free_port()
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, command(index, port))],
            env=job_environment(devices), cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    try:
        answers = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for process, (_, error) in zip(started, answers, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [out for out, _ in answers]
