"""What saving, restoring and recovering cost, beside Orbax and the machine's own limits.

    python benchmarks/beside.py [--quick] [--json FILE] [--only TEXT …]

For each state a process of its own (one for all those of --quick) in which raystate and its peers take turns: blocked in save, until
durable, restored from storage and from memory. Then the memory that saving takes, what starting costs, and the figures of save_cost.py
and recovery.py. The first round warms up; medians of the others, with the lowest and the highest. Caches are warm for all, and nobody's
files are dropped from them. --quick: small states, to see that it runs, and neither save_cost.py nor recovery.py. All on
CPU devices: accelerator.py has the others.
"""

from __future__ import annotations

import argparse
import functools
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.side.figures import Figures, Teller, table  # noqa: E402
from benchmarks.side.goals import LIMIT, Goal, tell_beside, tell_case  # noqa: E402
from benchmarks.side.machine import describe_machine, others_share, said  # noqa: E402
from benchmarks.side.process import json_of, on_cpu  # noqa: E402
from benchmarks.side.savers import OURS, SAVERS  # noqa: E402
from benchmarks.side.states import Case  # noqa: E402

ROOM = 9  # times a state's size must be free: the state, its copies, slots, and what the peers keep
MOST_S = 3600.0  # of one part
ALL_S = 6 * MOST_S
IMPORT = "import time; begin = time.perf_counter(); import raystate; print(time.perf_counter() - begin)"
IMPORTS = 5
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one process measures, and with how many CPU devices."""

    name: str
    measure: Callable[[Teller], None]
    devices: int = 1


def main() -> int:
    """Exit status 0: all was measured; 1: a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small states and few rounds: shows that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", default=ROOT / "build/bench/bench.json", help="of all figures")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="parts whose name has one of these in it")
    parser.add_argument("--peers", nargs="*", choices=list(SAVERS)[1:], default=list(SAVERS)[1:], help="beside these only")
    parser.add_argument("--rounds", type=int, help="instead of each state's own number")
    parser.add_argument("--dir", help="where checkpoints go (default: the system's temporary directory)")
    parser.add_argument("--one", nargs=3, metavar=("PART", "S", "FOLDER"), help=argparse.SUPPRESS)  # in its own process
    asked = parser.parse_args()
    if asked.one:
        logging.disable(logging.WARNING)
        name, limit_s, _ = asked.one
        tell = Teller(float(limit_s))
        next(part for part in parts(asked) if part.name == name).measure(tell)
        tell.tell(done=True)
        return 0
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    figures, machine = Figures(asked.json, ALL_S), describe_machine()
    figures.content["machine"] = machine
    print(said(machine), flush=True)
    me = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--one"]
    for part in parts(asked):
        if not asked.only or any(text in part.name for text in asked.only):
            figures.part(part.name, [*me, part.name], least_s=0.0, most_s=MOST_S, environment=on_cpu(part.devices))
    machine["load_after"] = round(others_share(), 3)
    figures.finish()
    print(table(figures.content))
    return int(bool(figures.content["failed"]))


def parts(asked: argparse.Namespace) -> list[Part]:
    """All of them, in order."""
    found: list[Part] = []
    for cases in (QUICK,) if asked.quick else ((case,) for case in FULL):  # of --quick all on one Ray
        if asked.rounds:
            cases = tuple(replace(case, rounds=asked.rounds) for case in cases)
        names = "; ".join(case.name for case in cases)
        found.append(Part(name=names, measure=functools.partial(states, asked, cases), devices=cases[0].devices))
    of_memory = Case(mib=16 if asked.quick else 256)
    found.append(Part(name=f"memory, {of_memory.name}", measure=functools.partial(memory, asked, of_memory)))
    found.append(Part(name="start", measure=functools.partial(start, asked)))
    return found if asked.quick else [*found, Part(name="save_cost", measure=save_cost), Part(name="recovery", measure=recovery)]


# ------------------------------------------------------------ each in a process of its own


def states(asked: argparse.Namespace, cases: tuple[Case, ...], tell: Teller) -> None:
    import psutil

    from benchmarks.side.measure import measure

    free = min(psutil.virtual_memory().available, shutil.disk_usage(asked.dir or tempfile.gettempdir()).free)
    fit = [case for case in cases if free >= ROOM * case.nbytes]
    for case in cases:
        if case not in fit:
            tell.note(f"left out: {case.name} wants {ROOM * case.mib / 1024:.0f} GiB of memory and disk")
    for case, found in zip(fit, measure(fit, [OURS, *asked.peers], asked.dir), strict=True):
        tell_case(tell, case.name, found["seconds"], small=case.shape == "small")
        for figure, share in found["facts"].items():
            tell.note(f"{case.name}: {figure} {share:.3f}")


def memory(asked: argparse.Namespace, case: Case, tell: Teller) -> None:
    """Each contestant in a process of its own again: they share no allocator."""
    names = [OURS, *([] if asked.quick else asked.peers)]
    peaks = {name: [json_of([sys.executable, "-m", "benchmarks.side.memory", str(case.mib), name])] for name in names}
    limit = ("3 slots + 64 MiB", [3.0 * case.mib + 64])
    tell_beside(tell, "extra memory while saving, peak", peaks, "MiB", of=case.name, goals=[Goal(1, LIMIT)], limit=limit)


def start(asked: argparse.Namespace, tell: Teller) -> None:
    """The import, and the first StateManager of a run on a Ray that runs."""
    from benchmarks.side.measure import own_cluster
    from benchmarks.side.savers import Raystate

    imports: list[float] = []
    for _ in range(IMPORTS + 1):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        imports.append(1e3 * float(done.stdout))
    managers: list[float] = []
    with own_cluster(asked.dir) as folder:
        import jax

        jax.devices()
        for number in range(1 if asked.quick else 3):
            begin_s = time.perf_counter()
            saver = Raystate(folder / f"run{number}")
            managers.append(1e3 * (time.perf_counter() - begin_s))
            saver.close()
    for name, values, wanted_ms in (
        ("import raystate", imports[1:], 30.0),
        ("first StateManager on a running Ray", managers, 1500.0),
    ):
        limit = ("as long as is wanted", [wanted_ms])
        tell_beside(tell, name, {OURS: values}, "ms", of="start", goals=[Goal(1, LIMIT)], limit=limit)


def _other(name: str, *options: str) -> Any:
    return json_of([sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), *options, "--json"])


def save_cost(tell: Teller) -> None:
    found = _other("save_cost", "--state-mib", "128", "--rounds", "3")
    cost = {name: [row["lost_ms"]] for name, row in found["per_save"].items()}
    case, orbax = f"{found['state_mib']} MiB, steps of {found['step_ms']:.0f} ms", cost.pop("orbax")
    for name, values in cost.items():
        both = {OURS: values, "Orbax v0": orbax}
        goals = [Goal(0.2, "Orbax v0")] if name == OURS else []
        tell_beside(tell, f"training time lost per save, {name}", both, "ms", of=case, goals=goals)


def recovery(tell: Teller) -> None:
    found: dict[str, list[dict[str, Any]]] = _other("recovery", "--ranks", "1", "0")
    plain = "JaxTrainer with Orbax"
    for rank in (1, 0):
        took = {
            {"plain": plain}.get(name, name): [1e3 * row["to_new_step_s"] for row in rows if row["rank"] == rank]
            for name, rows in found.items()
        }
        repeated = max(row["repeated_steps"] for row in found[OURS] if row["rank"] == rank)
        name = f"kill -9 of rank {rank} to the next new step"
        tell_beside(tell, name, took, "ms", of="two ranks, one node", goals=[Goal(0.25, plain)])
        tell.note(f"{name}: at most {repeated} steps repeated")


if __name__ == "__main__":
    sys.exit(main())
