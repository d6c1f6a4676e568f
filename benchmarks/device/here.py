"""What this machine is, and which packages it lacks."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import tempfile
from typing import Any

from benchmarks.side.machine import describe_machine

# Module -> what cannot be measured without it.
PARTS = {
    "google_crc32c": "anything of raystate",
    "orbax.checkpoint": "Orbax beside it",
    "pydantic": "restores from storage, and kills",
    "fsspec": "restores from storage, and kills",
    "ray": "kills",
    "flax": "kills",
}


def described() -> dict[str, Any]:
    """The machine, its device and its link, what is free, and what is missing."""
    import jax

    devices = jax.devices()
    kinds = sorted({memory.kind for memory in devices[0].addressable_memories()})
    shm = shutil.disk_usage("/dev/shm")
    return {
        **describe_machine(),
        "platform": devices[0].platform,
        "devices": f"{len(devices)} x {devices[0].device_kind}, memories {', '.join(kinds)}",
        "device_memory_gib": round((devices[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30, 1),
        "link": _nvidia(),
        "shm_free_gib": f"{shm.free / 2**30:.1f} of {shm.total / 2**30:.1f}",
        "disk_free_gib": round(shutil.disk_usage(tempfile.gettempdir()).free / 2**30, 1),
        "missing": missing(),
    }


def missing() -> dict[str, str]:
    """Modules that are not installed, and what is left out without each."""
    return {name: what for name, what in PARTS.items() if not has(name)}


def has(module: str) -> bool:
    """Whether a module can be imported, by looking for it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing
        return False


def _nvidia() -> str:
    """The link to the first GPU, as its driver tells it; "" where there is none."""
    names = "name,pcie.link.gen.max,pcie.link.width.max,memory.total,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else ""
