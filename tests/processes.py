"""JAX jobs of several processes, and Ray, on this machine."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jobs.striking import start_ray
from tests.patience import PATIENCE_S

REPO = Path(__file__).parents[1]


@contextlib.contextmanager
def standing_ray(num_cpus: int) -> Iterator[str]:
    """A Ray that stands, as after `ray start --head`, and that this process has joined; yields its address."""
    import ray

    start_ray(
        lambda: ray.init("local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def free_port() -> int:
    """That nobody listens on now, for the job's own coordinator."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def collect_rarely() -> None:
    """Python's collector looks at new objects after 100,000 instead of 700: for a process that makes many and ends soon."""
    gc.set_threshold(100_000, 20, 100)


def xla_flags(devices: int) -> str:
    """For a process with so many CPU devices. Its small programs run once or for a moment: optimizing them costs more than it saves."""
    return f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"


def job_environment(devices: int) -> dict[str, str]:
    """Of a process with so many CPU devices."""
    return {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices), "PYTHONPATH": str(REPO)}


def run_python(
    *arguments: object,
    code: int | None = 0,
    timeout_s: float = PATIENCE_S,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """A Python with these arguments, to its end. Fails with what it said if its exit status is not `code`; None: any will do."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd, env=env
    )
    assert code in (None, done.returncode), f"exit status {done.returncode}: {done.stdout[-3000:]}{done.stderr[-5000:]}"
    return done


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
