"""What this machine is, and which packages it lacks."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import tempfile
import time
from importlib import metadata
from typing import Any

VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "ray", "grain")
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
    """Device, link, cores, memory, versions and date."""
    import jax

    devices = jax.devices()
    kinds = sorted({memory.kind for memory in devices[0].addressable_memories()})
    shm = shutil.disk_usage("/dev/shm")
    disk = shutil.disk_usage(tempfile.gettempdir())
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "platform": devices[0].platform,
        "devices": f"{len(devices)} x {devices[0].device_kind}, memories {', '.join(kinds)}",
        "device_memory_gib": round((devices[0].memory_stats() or {}).get("bytes_limit", 0) / 2**30, 1),
        "link": _nvidia(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "shm_free_gib": f"{shm.free / 2**30:.1f} of {shm.total / 2**30:.1f}",
        "disk_free_gib": round(disk.free / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": {name: version for name in VERSIONS if (version := _version(name))},
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


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


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
