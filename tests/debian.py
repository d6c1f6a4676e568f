"""Programs of Debian's packages, for tests that check against the real thing."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[1]
_FOLDER = REPO / "build" / "debian"


def debian_program(name: str, *, package: str) -> str:
    """The path of a program: of this machine, or unpacked from Debian's package into `build`, which needs no root.

    The test is skipped where neither is possible: it needs Debian, and a mirror of it.
    """
    if found := shutil.which(name):
        return found
    unpacked = _FOLDER / package
    program = unpacked / "usr" / "bin" / name
    if not program.exists():
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            pytest.skip(f"{name} is not installed, and this is no Debian that could get it: install its package {package!r}")
        fresh = _FOLDER / f"{package}.{os.getpid()}"  # another test process may be at it
        fresh.mkdir(parents=True, exist_ok=True)
        try:
            _download(package, fresh)
            subprocess.run(["dpkg-deb", "-x", *map(str, fresh.glob("*.deb")), str(fresh / "root")], check=True)
            if not program.exists():
                (fresh / "root").rename(unpacked)
        except OSError:
            if not program.exists():
                raise
        finally:
            shutil.rmtree(fresh, ignore_errors=True)
    return str(program)


def _download(package: str, folder: Path) -> None:
    tries = [["apt-get", "download", package]]
    if os.geteuid() == 0:
        tries += [["apt-get", "update"], ["apt-get", "download", package]]
    done = [subprocess.run(["timeout", "120", *command], cwd=folder, capture_output=True, text=True) for command in tries[:1]]
    if done[0].returncode:
        done += [subprocess.run(["timeout", "120", *one], cwd=folder, capture_output=True, text=True) for one in tries[1:]]
    if done[-1].returncode:
        pytest.skip(f"Debian's package {package!r} can't be had here: {done[-1].stderr.strip()[-300:]}")
