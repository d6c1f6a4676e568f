"""Packs what a machine without package registries lacks, so that all of benchmarks/accelerator.py runs there.

    python benchmarks/device/pack.py packed.tar.xz --python 3.12 --have jax jaxlib numpy flax …
    python benchmarks/device/pack.py packed.tar.xz --python 3.12 --have-file names.txt

On that machine, in a checkout: tar xf packed.tar.xz -C SITE; PYTHONPATH=SITE python3 benchmarks/accelerator.py

Ray comes without its Java parts, its dashboard's pages, RLlib and Serve: a third of its size.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIMIT_MIB = 64
WHEELS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (17, 24, 27, 28, 31, 34)))  # pip matches exactly
EXTRAS = ("jobs",)  # of raystate: what the language model needs
# What trains nothing, by folder of the packed packages.
LEFT_OUT = (
    "ray/jars",
    "ray/cpp",
    "ray/include",
    "ray/rllib",
    "ray/serve",
    "ray/llm",
    "ray/dashboard/client/build",
    "ray/core/libjemalloc.so",
    "scipy",
    "sklearn",
    "bin",
    "share",
)
NOT_NEEDED = {"scikit-learn", "scipy", "joblib", "threadpoolctl", "narwhals"}  # of jobs: only its digits need them


def main() -> int:
    """Exit status 0: packed, and small enough; 1: too large to travel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="version on that machine")
    parser.add_argument("--machine", default="x86_64", help="its processor")
    parser.add_argument("--have", nargs="*", default=[], help="packages that it has")
    parser.add_argument("--have-file", type=Path, help="the same, one or more a line")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    args = parser.parse_args()
    names = [*args.have, *re.findall(r"[A-Za-z0-9._-]+", args.have_file.read_text() if args.have_file else "")]
    have = {_plain(name) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        chosen = {name: version for name, version in resolved(args).items() if name not in have | NOT_NEEDED}
        if chosen:
            pip(args, "--no-deps", "--no-compile", "--target", str(site), *(f"{n}=={v}" for n, v in chosen.items()))
        for name in LEFT_OUT:
            shutil.rmtree(site / name, ignore_errors=True)
        with tarfile.open(args.out, "w:xz", preset=6) as archive:
            for path in sorted(site.iterdir()):
                archive.add(path, path.name)
    mib = args.out.stat().st_size / 2**20
    print(f"{args.out}: {mib:.1f} MiB, {len(chosen)} packages: {', '.join(f'{n} {v}' for n, v in chosen.items())}")
    return int(mib > args.limit_mib)


def resolved(args: argparse.Namespace) -> dict[str, str]:
    """Name -> version of all that raystate and the language model need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in EXTRAS for one in project["optional-dependencies"][extra])]
    wanted = [one.replace("ray[default,train]", "ray[train]") for one in wanted]
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip(args, "--dry-run", "--ignore-installed", "--target", "unused", "--report", report.name, *wanted)
        found: Any = json.loads(Path(report.name).read_text())
    return {_plain(one["metadata"]["name"]): one["metadata"]["version"] for one in found["install"]}


def pip(args: argparse.Namespace, *arguments: str) -> None:
    """`pip install` for that machine's Python: wheels only, of the versions that the tests ran with."""
    platforms = [option for wheel in WHEELS for option in ("--platform", f"{wheel}_{args.machine}")]
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
    command += ["--python-version", args.python, "--implementation", "cp", *platforms, "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*command, *arguments], check=True)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
