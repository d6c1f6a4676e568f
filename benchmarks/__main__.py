"""The benchmarks, each in a process of its own: all of them, or one with its own options.

    python -m benchmarks [--quick]             all; tables, and their JSON and charts in build/bench
    python -m benchmarks --list
    python -m benchmarks recovery --help
    python -m benchmarks save_cost --state-mib 128

They compare on one machine, in turn: read ratios, and let nothing else run beside them.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Options of a run in seconds: it shows that the benchmark works; its numbers say nothing.
QUICK = {
    "barrier": ["--hosts", "4", "--steps", "3"],
    "beside": ["--quick"],
    "bucket": ["--mib", "1", "--arrays", "4", "--rounds", "1"],
    "growth": ["--quick"],
    "hold": ["--mib", "8", "--arrays", "4", "--steps", "2", "--rounds", "1"],
    "recovery": ["--ranks", "1", "--width", "64", "--save-every", "6", "--settle-s", "1"],
    "save_cost": ["--state-mib", "8", "--step-s", "0.05", "--steps", "4", "--every", "4", "--rounds", "1"],
    "snapshots": ["--mib", "8", "--step-s", "0.1", "--steps", "4", "--rounds", "1"],
}


IN_THE_TABLE = ("recovery", "save_cost")  # beside runs them, and has their figures in its table
REPORTS = {"beside": "bench.json", "growth": "growth.json"}
REPORT = HERE.parent / "build" / "bench"


def title(name: str) -> str:
    """The first line of a benchmark's docstring."""
    return (ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or "").split("\n")[0]


def run(name: str, options: list[str]) -> int:
    """The benchmark's exit status; it prints."""
    places = filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    return subprocess.run([sys.executable, str(HERE / f"{name}.py"), *options], env=environment, check=False).returncode


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: all have run; 1: one has failed; 2: bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--quick", action="store_true", help="small and short: shows that they run, measures nothing")
    parser.add_argument("name", nargs="?", choices=sorted(QUICK), help="one of them; without it: all")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that one")
    asked = parser.parse_args(arguments)
    if asked.list:
        print("\n".join(f"{name:12}{title(name)}" for name in sorted(QUICK)))
        return 0
    failed: list[str] = []
    for name in [asked.name] if asked.name else sorted(set(QUICK) - set(IN_THE_TABLE), reverse=True):  # the table comes last
        options = [*(QUICK[name] if asked.quick else []), *asked.options]
        if asked.name is None:
            print(f"\n== {name}: {title(name)}", flush=True)
            if name in REPORTS:
                options += ["--json", str(REPORT / REPORTS[name]), "--chart", str(REPORT)]
        begin_s = time.monotonic()
        if run(name, options):
            failed.append(name)
        if asked.name is None:
            print(f"({name} took {time.monotonic() - begin_s:.0f} s)", flush=True)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
