"""The machine and what else runs on it: without that no figure says anything. Needs none of the packages that are measured."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

BUSY = 0.1  # of the cores in use by others: a figure then says more about them
LOOK_S = 2.0
VERSIONS = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "tensorstore", "numpy", "ray", "grain")


def others_share() -> float:
    """How much of all cores is in use now, by anybody, looked at for two seconds; this process sleeps meanwhile."""

    def ticks() -> tuple[int, int]:
        found = [int(text) for text in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(found), found[3] + found[4]  # idle, and waiting for a disk

    all_before, idle_before = ticks()
    time.sleep(LOOK_S)
    all_after, idle_after = ticks()
    return 1 - (idle_after - idle_before) / max(1, all_after - all_before)


def describe_machine() -> dict[str, Any]:
    """Cores, memory, versions, date and what was called."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": " ".join(["python", *(arg if " " not in arg else repr(arg) for arg in _command())]),
        "commit": _commit(),
        "cores": len(os.sched_getaffinity(0)),
        "cpu": model,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "versions": {name: version for name in VERSIONS if (version := _version(name))},
        "load_before": round(others_share(), 3),
        "load_average_before": os.getloadavg()[0],
    }


def is_busy(machine: dict[str, Any]) -> bool:
    """Whether others used the machine before the run or after it."""
    return max(machine["load_before"], machine.get("load_after", 0.0)) > BUSY


def said(machine: dict[str, Any]) -> str:
    """Two or three lines for the terminal."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    text = (
        f"{machine['date']}, commit {machine['commit']}: {machine['command']}\n"
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, {machine['system']}; {versions}\n"
        f"others used {machine['load_before']:.0%} of the cores before"
    )
    text += f" and {machine['load_after']:.0%} after" if "load_after" in machine else ""
    return text + (": A BUSY MACHINE, read none of this as a measurement" if is_busy(machine) else "")


def _commit() -> str:
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # no git on a machine that is lent
        return "unknown"
    return done.stdout.strip() or "unknown"


def _command() -> list[str]:
    return ["benchmarks/" + Path(sys.argv[0]).name, *sys.argv[1:]]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
