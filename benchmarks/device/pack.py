"""Packs what a machine without package registries lacks, so that all of benchmarks/accelerator.py runs there.

    python benchmarks/device/pack.py packed.tar.xz --python 3.12 --have jax flax pandas …
    python benchmarks/device/pack.py packed.tar.xz --python 3.12 --have-file names.txt    names.txt: of all packages there

On that machine, in a checkout:

    tar xf packed.tar.xz -C SITE; python3 -m compileall -q -j 0 SITE; PYTHONPATH=SITE python3 benchmarks/accelerator.py

With --have, what a package needs counts as there, too. A list of all says what is missing: versions there may need less.
Ray comes without its Java parts, its dashboard's pages, RLlib and Serve; pyarrow without what reads other places and formats. If it
is still too large, Ray and the language model stay behind, and kills with them: the other figures need neither.
"""

from __future__ import annotations

import argparse
import json
import lzma
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
LIMIT_MIB = 56.0  # 64 are usual for what travels, and the checkout is 6
WHEELS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(17, 40)))  # pip matches exactly
NOT_NEEDED = {"gcsfs", "google-cloud-storage", "jinja2", "scikit-learn"}  # no bucket, manifest or digits here
FOR_KILLS = {"ray", "flax", "grain", "optax", "psutil"}
# Ray's three programs are much alike: a dictionary that is larger than one finds it.
FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 128 << 20}]
# What trains nothing, by pattern in the folder of the packed packages.
LEFT_OUT = (
    *(
        f"ray/{name}"
        for name in ("jars", "cpp", "include", "rllib", "serve", "llm", "dashboard/client/build", "core/libjemalloc.so")
    ),
    *(
        f"pyarrow/{name}"
        for name in ("include", "src", "libarrow_python.so", "libarrow_python.so.*.*.*", "*.a", "**/*.pyx", "**/*.pxd")
    ),
    *(f"pyarrow/*{name}*" for name in ("flight", "s3", "gcs", "orc")),
    "*/tests",
    "bin",
    "share",
)


def main() -> int:
    """Exit status 0: packed, all of it or without kills; 1: too large to travel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", help="version on that machine")
    parser.add_argument("--machine", default="x86_64", help="its processor")
    parser.add_argument("--have", nargs="*", default=["jax"], help="packages that it has, with all that they need")
    parser.add_argument("--have-file", type=Path, help="the names of all that it has, one or more a line")
    parser.add_argument("--limit-mib", type=float, default=LIMIT_MIB)
    parser.add_argument("--without-kills", action="store_true", help="neither Ray nor the language model")
    args = parser.parse_args()
    for kills in (True, False)[args.without_kills :]:
        chosen = missing_there(args, kills=kills)
        mib = pack(args, chosen)
        print(f"{args.out}: {mib:.1f} MiB, {len(chosen)} packages: {', '.join(f'{n} {v}' for n, v in chosen.items())}")
        if mib <= args.limit_mib:
            return 0
        print(f"more than {args.limit_mib:g} MiB" + (": without what kills need" if kills else ""))
    return 1


def missing_there(args: argparse.Namespace, *, kills: bool) -> dict[str, str]:
    """Name -> version of what raystate needs, and the language model for kills, and the machine lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["jobs"]]
    out = NOT_NEEDED if kills else NOT_NEEDED | FOR_KILLS
    wanted = [one for one in wanted if _plain(re.split(r"[\[<>=]", one)[0]) not in out]
    needed = resolved(args, [one.replace("ray[default,train]", "ray[train]") for one in wanted])
    if args.have_file:
        there = {_plain(name) for name in re.findall(r"[A-Za-z][A-Za-z0-9._-]*", args.have_file.read_text())}
    else:
        there = {*resolved(args, sorted({_plain(name) for name in args.have} & needed.keys()))}
    return {name: version for name, version in needed.items() if name not in there}


def resolved(args: argparse.Namespace, wanted: list[str]) -> dict[str, str]:
    """Name -> version of these and all that they need."""
    if not wanted:
        return {}
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        pip(args, "--dry-run", "--ignore-installed", "--target", "unused", "--report", report.name, *wanted)
        found: Any = json.loads(Path(report.name).read_text())
    return {_plain(one["metadata"]["name"]): one["metadata"]["version"] for one in found["install"]}


def pack(args: argparse.Namespace, chosen: dict[str, str]) -> float:
    """Write the archive; its MiB."""
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder) / "site"
        site.mkdir()
        if chosen:
            pip(args, "--no-deps", "--no-compile", "--target", str(site), *(f"{n}=={v}" for n, v in chosen.items()))
        for place in [path for pattern in LEFT_OUT for path in site.glob(pattern)]:
            shutil.rmtree(place) if place.is_dir() else place.unlink(missing_ok=True)
        strip(site)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with lzma.open(args.out, "w", filters=FILTERS) as file, tarfile.open(fileobj=file, mode="w") as archive:
            for path in sorted(site.iterdir()):
                archive.add(path, path.name)
    return args.out.stat().st_size / 2**20


def strip(site: Path) -> None:
    """Leave the symbols behind, a quarter of the programs and libraries, if there is a `strip`."""
    if shutil.which("strip"):
        programs = [path for path in site.rglob("*") if path.is_file() and path.open("rb").read(4) == b"\x7fELF"]
        subprocess.run(["strip", "--strip-unneeded", *map(str, programs)], check=False, stderr=subprocess.DEVNULL)


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
