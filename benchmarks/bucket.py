"""A step in a bucket: the requests and the seconds of a save and of a restore, beside Orbax, against the local Cloud Storage server.

    python benchmarks/bucket.py [--mib 64] [--arrays 16] [--rounds 3] [--json]

One process; raystate and the others take turns with the same tree, and keep two steps each. Class A are the requests that create or
list, class B those that read: Cloud Storage bills the first about ten times the second. The server is in memory on this machine:
read the counts, and of the seconds the ratio. The first save of each is not counted.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side.process import on_cpu
from benchmarks.side.savers import SAVERS, Saver, folder_name
from benchmarks.side.states import Case, build

Figures = dict[str, list[float]]  # what is counted -> one value per round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--arrays", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.update(on_cpu())
    load = os.getloadavg()[0]
    found = measure(Case(mib=args.mib, shape="big" if args.arrays <= 16 else "small", arrays=args.arrays), args.rounds)
    if args.json:
        print(json.dumps(found))
        return
    print(
        f"{os.cpu_count()} cores, load {load:.1f} at the start; {args.mib} MiB in {args.arrays:,} arrays, medians of {args.rounds}"
    )
    for name, figures in found.items():
        print(f"{name:24}" + ", ".join(f"{what} {statistics.median(values):.3g}" for what, values in figures.items()))


def measure(case: Case, rounds: int) -> dict[str, Figures]:
    """By contestant. Starts the server and a Ray cluster, and ends both."""
    from raystate.testing.gcs import GcsServer

    with GcsServer(buckets=["bench"]) as server:
        os.environ.update(server.environment())  # before the contestants make their clients
        from benchmarks.side.measure import own_cluster

        with own_cluster(None):
            return _in_turn(server, case, rounds)


def _in_turn(server: Any, case: Case, rounds: int) -> dict[str, Figures]:
    import jax

    state = build(case)
    reference = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    savers: dict[str, Saver] = {name: make(f"gs://bench/{folder_name(name)}") for name, make in SAVERS.items()}
    found: dict[str, Figures] = {name: {} for name in savers}
    try:
        for step in range(1, rounds + 2):
            for name, saver in savers.items():
                figures: Figures = {}
                _counted(server, figures, "save", functools.partial(_save, saver, step, state))
                _counted(server, figures, "restore", functools.partial(_restore, saver, step, reference))
                if step == 1:
                    continue  # it warms up, and makes what each keeps once for a run
                for what, values in figures.items():
                    found[name].setdefault(what, []).extend(values)
    finally:
        for saver in savers.values():
            saver.close()
    return found


def _save(saver: Saver, step: int, state: Any) -> None:
    saver.save(step, state)
    saver.wait()


def _restore(saver: Saver, step: int, reference: Any) -> None:
    import jax

    jax.block_until_ready(saver.restore(step, reference))


def _counted(server: Any, figures: Figures, what: str, work: Callable[[], Any]) -> None:
    server.reset_counts()
    begin_s = time.perf_counter()
    work()
    figures[f"{what} s"] = [time.perf_counter() - begin_s]
    counts = server.counts()
    figures[f"{what}: class A"] = [counts.class_a]
    figures[f"{what}: class B"] = [counts.class_b]


if __name__ == "__main__":
    main()
