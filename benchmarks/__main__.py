"""The benchmarks, each in a process of its own: all of them, or one with its own options.

    python -m benchmarks                       all; tables, and their JSON in build/bench
    python -m benchmarks --quick               the same with small states, two at a time: shows that they run, measures nothing
    python -m benchmarks --list
    python -m benchmarks recovery --help
    python -m benchmarks save_cost --state-mib 128

They compare on one machine, in turn: read ratios, and let nothing else run beside them.
"""

from __future__ import annotations

import argparse
import ast
import functools
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent

# Options of a run in seconds: it shows that the benchmark works; its numbers say nothing. The longest first.
QUICK = {
    "recovery": ["--ranks", "1", "--width", "64", "--save-every", "6", "--settle-s", "1"],
    "beside": ["--quick"],
    "growth": ["--quick"],
    "ledger": ["--quick"],
    "sections": ["--rounds", "100"],
    "watched": ["--quick"],
    "save_cost": ["--state-mib", "8", "--step-s", "0.05", "--steps", "4", "--every", "4", "--rounds", "1"],
    "accelerator": ["--quick", "--parts", "correct", "limits", "states"],
}
FULL = {  # of all together: fewer rounds than each takes alone
    "growth": ["--rounds", "2"],
    "accelerator": ["--quick"],  # its states are as large as an accelerator's memory
}
AT_A_TIME = 2  # with --quick: about as much of the time they wait as they work

TABLE = "beside"
IN_THE_TABLE = ("recovery", "save_cost")  # it runs them, but for --quick, and has their figures
REPORTS = {TABLE: "bench.json", "growth": "growth.json"}
REPORT = HERE.parent / "build" / "bench"


def title(name: str) -> str:
    """The first line of a benchmark's docstring."""
    return (ast.get_docstring(ast.parse((HERE / f"{name}.py").read_text())) or "").split("\n")[0]


def run(name: str, options: list[str], *, told_later: bool = False) -> tuple[int, str]:
    """(the benchmark's exit status, what it has printed: nothing if it has shown that itself)."""
    places = filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
    out, errors = (subprocess.PIPE, subprocess.STDOUT) if told_later else (None, None)
    command = [sys.executable, str(HERE / f"{name}.py"), *options]
    ended = subprocess.run(command, env=environment, text=True, check=False, stdout=out, stderr=errors)
    return ended.returncode, ended.stdout or ""


def run_one(name: str, *, quick: bool) -> bool:
    """Whether it has succeeded. With --quick another one runs beside it, so all that it says comes at its end."""
    heading = f"\n== {name}: {title(name)}\n"
    options = list(QUICK[name] if quick else FULL.get(name, ()))
    if name in REPORTS:
        options += ["--json", str(REPORT / REPORTS[name])]
    if not quick:
        print(heading, end="", flush=True)
        heading = ""
    begin_s = time.monotonic()
    status, text = run(name, options, told_later=quick)
    print(f"{heading}{text}({name} took {time.monotonic() - begin_s:.0f} s)", flush=True)
    return status == 0


def run_all(names: list[str], *, quick: bool) -> list[str]:
    """Those that have failed. After Ctrl-C, which those that run hear too, no other one begins."""
    with ThreadPoolExecutor(AT_A_TIME if quick else 1) as pool:
        succeeded = pool.map(functools.partial(run_one, quick=quick), names)
        return [name for name, is_fine in zip(names, succeeded, strict=True) if not is_fine]


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0: all have run; 1: one has failed; 2: bad usage."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="say which there are")
    parser.add_argument("--quick", action="store_true", help="small, short, two at a time: shows that they run, measures nothing")
    parser.add_argument("name", nargs="?", choices=sorted(QUICK), help="one of them; without it: all")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that one")
    asked = parser.parse_args(arguments)
    if asked.list:
        print("\n".join(f"{name:12}{title(name)}" for name in sorted(QUICK)))
        return 0
    if asked.name:
        return int(bool(run(asked.name, [*(QUICK[asked.name] if asked.quick else []), *asked.options])[0]))
    if asked.quick:
        names = list(QUICK)
    else:  # the shortest first, the table last
        names = [*(name for name in reversed(QUICK) if name not in (TABLE, *IN_THE_TABLE)), TABLE]
    failed = run_all(names, quick=asked.quick)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
