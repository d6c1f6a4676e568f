"""One table: what saving, restoring and recovering cost, beside Orbax and the machine's own limits.

    python benchmarks/beside.py [--quick] [--json FILE] [--only TEXT …]

For each state a process of its own (one for all those of --quick) in which raystate and its peers take turns: blocked in save, until
durable, restored from storage and from memory. Then the memory that saving takes, what starting costs, and the figures of save_cost.py
and recovery.py. The first round warms up; medians of the others, with the lowest and the highest. Caches are warm for all, and nobody's
files are dropped from them. --quick: small states, to see that it runs, and neither save_cost.py nor recovery.py. All on
CPU devices: accelerator.py has the others.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.side import rows as table  # noqa: E402
from benchmarks.side.machine import describe_machine, is_busy, others_share, said  # noqa: E402
from benchmarks.side.process import json_of, on_cpu  # noqa: E402
from benchmarks.side.savers import OURS, SAVERS  # noqa: E402
from benchmarks.side.show import show  # noqa: E402
from benchmarks.side.states import Case  # noqa: E402

ROOM = 9  # times a state's size must be free: the state, its copies, slots, and what the peers keep
UNCOMPRESSED = ("Orbax v0, uncompressed", "Orbax v1, uncompressed")  # left out of three states, so that all takes 40 minutes
QUICK = (
    Case(mib=16, shape="mixed", arrays=150, dtype="bfloat16", rounds=1),
    Case(mib=4, shape="small", arrays=200, rounds=1),
)
FULL = (
    Case(mib=64),
    Case(mib=1024, rounds=2),
    Case(mib=256, dtype="bfloat16", rounds=2),
    Case(mib=4096, rounds=2),
    Case(mib=256, shape="mixed", arrays=150, rounds=2, without=UNCOMPRESSED),
    Case(mib=256, devices=4, rounds=2, without=UNCOMPRESSED),
    # A save takes Orbax half a minute. Compressed or not is the same here: what it does for each array is what costs.
    Case(mib=160, shape="small", arrays=10_000, rounds=1, without=UNCOMPRESSED),
)
OTHERS = {  # benchmarks whose figures are in the table, too, but for --quick: their options
    "save_cost": ["--state-mib", "128", "--rounds", "3"],
    "recovery": ["--ranks", "1", "0"],
}


def main() -> int:
    """Exit status 0: all was measured; 1: a part failed."""
    asked = arguments()
    if asked.part:
        print(json.dumps(part(asked)))
        return 0
    machine, rows, failed = describe_machine(), [], []
    print(said(machine), flush=True)
    for name, work in works(asked):
        print(f"measuring: {name}", end="", file=sys.stderr, flush=True)
        begin_s = time.monotonic()
        try:
            rows += work()
        except (subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
            failed.append(f"{name}: {error}")
        print(f" ({time.monotonic() - begin_s:.0f} s)", file=sys.stderr, flush=True)
        write(asked, machine, rows, failed)  # what was measured is kept if the rest is not waited for
    machine["load_after"] = round(others_share(), 3)
    show(rows, machine)
    write(asked, machine, rows, failed)
    for text in failed:
        print(f"failed: {text}", file=sys.stderr)
    return int(bool(failed))


def write(asked: argparse.Namespace, machine: dict[str, Any], rows: list[table.Row], failed: list[str]) -> None:
    """The JSON, if it is asked for."""
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        report = {"machine": machine, "busy": is_busy(machine), "rows": [row.as_json() for row in rows], "failed": failed}
        asked.json.write_text(json.dumps(report, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small states and few rounds: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="parts whose name has one of these in it")
    parser.add_argument("--peers", nargs="*", choices=list(SAVERS)[1:], help="beside these only")
    parser.add_argument("--rounds", type=int, help="instead of each state's own number")
    parser.add_argument("--dir", default=None, help="where checkpoints go (default: the system's temporary directory)")
    parser.add_argument("--part", choices=("case", "memory", "start"), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--saver", help=argparse.SUPPRESS)
    return parser.parse_args()


def works(asked: argparse.Namespace) -> list[tuple[str, Any]]:
    """(name, function that gives rows) of what is to be measured."""
    found: list[tuple[str, Any]] = []
    for cases in (QUICK,) if asked.quick else ((case,) for case in FULL):  # of --quick all on one Ray
        if asked.rounds:
            cases = tuple(replace(case, rounds=asked.rounds) for case in cases)
        found.append(("; ".join(case.name for case in cases), lambda cases=cases: _cases(asked, cases)))
    memory = Case(mib=16 if asked.quick else 256)
    found.append((f"memory, {memory.name}", lambda: _memory(asked, memory)))
    found.append(("start", lambda: _start(asked)))
    for name, options in OTHERS.items():
        if not asked.quick:
            found.append((name, lambda name=name, options=options: _other(name, options)))
    return [(name, work) for name, work in found if not asked.only or any(text in name for text in asked.only)]


# ------------------------------------------------------------ each in a process of its own


def part(asked: argparse.Namespace) -> Any:
    """What a part's process prints."""
    import logging

    logging.disable(logging.WARNING)
    if asked.part == "case":
        from benchmarks.side.measure import measure

        return measure([Case(**one) for one in asked.case], _contestants(asked), asked.dir)
    if asked.part == "memory":
        from benchmarks.side.measure import own_cluster, own_folder
        from benchmarks.side.memory import peak_mib

        with (own_cluster if asked.saver == OURS else own_folder)(asked.dir) as folder:
            return peak_mib(Case(**asked.case[0]), asked.saver, folder / "saves")
    from benchmarks.side.start import started

    return started(asked.dir, 1 if asked.quick else 3)


def _contestants(asked: argparse.Namespace) -> list[str]:
    return [name for name in SAVERS if name == OURS or asked.peers is None or name in asked.peers]


def _cases(asked: argparse.Namespace, cases: tuple[Case, ...]) -> list[table.Row]:
    """In one process."""
    import psutil

    free = min(psutil.virtual_memory().available, shutil.disk_usage(asked.dir or tempfile.gettempdir()).free)
    for case in cases:
        if free < ROOM * case.nbytes:
            print(f"left out: {case.name} wants {ROOM * case.mib / 1024:.0f} GiB of memory and disk", file=sys.stderr)
            cases = tuple(other for other in cases if other is not case)
    if not cases:
        return []
    options = ["--part", "case", "--case", json.dumps([asdict(case) for case in cases])]
    if asked.peers is not None:
        options += ["--peers", *asked.peers]
    found = _own_process(asked, options, devices=cases[0].devices)
    return [row for case, one in zip(cases, found, strict=True) for row in table.rows_of(one, case.shape)]


def _memory(asked: argparse.Namespace, case: Case) -> list[table.Row]:
    peaks: dict[str, float] = {}
    for name in _contestants(asked)[: 1 if asked.quick else None]:  # raystate comes first
        peaks[name] = _own_process(asked, ["--part", "memory", "--case", json.dumps([asdict(case)]), "--saver", name])
    return [table.row_of_memory(peaks, case.name, 3 * case.mib + 64)]


def _start(asked: argparse.Namespace) -> list[table.Row]:
    return table.rows_of_start(_own_process(asked, ["--part", "start", *(["--quick"] if asked.quick else [])]))


def _other(name: str, options: list[str]) -> list[table.Row]:
    found = json_of([sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options, "--json"])
    return table.rows_of_save_cost(found) if name == "save_cost" else table.rows_of_recovery(found)


def _own_process(asked: argparse.Namespace, options: list[str], *, devices: int = 1) -> Any:
    where = ["--dir", asked.dir] if asked.dir else []
    return json_of([sys.executable, str(Path(__file__).resolve()), *options, *where], on_cpu(devices))


if __name__ == "__main__":
    sys.exit(main())
