"""Parts of a benchmark in processes of their own: nothing that one leaves behind is in the next one's figures."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 1500.0  # for one part


def json_of(command: list[str], environment: dict[str, str] | None = None) -> Any:
    """The last line that a command prints, parsed. Raises ValueError with what it said, if it fails."""
    environment = {**os.environ, **(environment or {})}
    places = filter(None, [str(ROOT), environment.get("PYTHONPATH")])
    environment["PYTHONPATH"] = os.pathsep.join(places)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment)
    if done.returncode:
        raise ValueError(f"exit status {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def end_with_parent() -> None:
    """From now on the kernel kills this process when the thread that started it is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def on_gpu() -> dict[str, str]:
    """The environment of a process that sees this machine's GPUs."""
    return {"JAX_PLATFORMS": "cuda,cpu", "RAY_AUTH_MODE": "disabled"}


def on_cpu(devices: int = 1) -> dict[str, str]:
    """The environment of a process that sees so many CPU devices."""
    return {
        "JAX_PLATFORMS": "cpu",
        "RAY_AUTH_MODE": "disabled",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
