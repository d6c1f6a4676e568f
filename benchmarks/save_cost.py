"""Training time lost per save: raystate beside Orbax's CheckpointManager, in the same loop on the same machine.

    python benchmarks/save_cost.py [--state-mib 256] [--every 10] [--steps 10] [--rounds 9]

A loop of jitted steps that donate their state runs in turn without saves, with Orbax and with raystate, `rounds` times; then the same
with a snapshot of every step. What a save costs is measured as a user feels it: blocked inside `save`, and all that the loop takes
longer than the loop without saves. Medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.side.measure import own_cluster
from benchmarks.side.savers import OrbaxManager, Raystate, Saver
from benchmarks.side.states import Case, Work

Save = Callable[[int, Any], Any]


def loop(work: Work, steps: int, first: int, every: int, save: Save | None) -> tuple[float, list[float]]:
    """Run `steps` steps; (seconds, seconds blocked by each durable save).

    Saves come in the middle of each `every` steps, so that what a save leaves to the background falls into the time measured.
    """
    blocked: list[float] = []
    begin = time.perf_counter()
    for step in range(first, first + steps):
        work()
        if save is not None:
            number = step + 1 + every // 2
            begin_save = time.perf_counter()
            save(number, work.state)
            if number % every == 0:
                blocked.append(time.perf_counter() - begin_save)
    work.wait()
    return time.perf_counter() - begin, blocked


def measure(args: argparse.Namespace) -> dict[str, Any]:
    work = Work(Case(mib=args.state_mib, arrays=32, devices=4), args.step_s)
    snapshot_every = {"raystate": args.every} | ({} if args.skip_every_step else {"raystate, snapshot every step": 1})
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in ("orbax", *snapshot_every)}
    baseline: list[float] = []
    with own_cluster(args.dir) as folder, contextlib.closing(OrbaxManager(folder / "orbax")) as orbax:
        first = dict.fromkeys(results, 0)

        def save_orbax(step: int, tree: Any) -> None:
            if step % args.every == 0:
                orbax.save(step, tree)

        for number, (name, snapshots) in enumerate(snapshot_every.items()):  # a process has one StateManager at a time
            place = folder / f"raystate-{number}"
            with contextlib.closing(Raystate(place, every=args.every, snapshot_every_steps=snapshots)) as ours:
                ours.manager.restore(work.state)
                savers: dict[str, tuple[Saver, Save]] = {"orbax": (orbax, save_orbax), name: (ours, ours.save)}
                for round_ in range(args.rounds + 1):  # the first one warms up
                    base, _ = loop(work, args.steps, 0, args.every, None)
                    for saver, (waited, save) in savers.items():
                        took, blocked = loop(work, args.steps, first[saver], args.every, save)
                        first[saver] += args.steps
                        waited.wait()
                        if round_:
                            results[saver].append((statistics.median(blocked), (took - base) / (args.steps // args.every)))
                    if round_:
                        baseline.append(base / args.steps)
    found = {
        name: {
            "blocked_ms": 1e3 * statistics.median(blocked for blocked, _ in rows),
            "lost_ms": 1e3 * statistics.median(lost for _, lost in rows),
        }
        for name, rows in results.items()
    }
    return {"step_ms": 1e3 * statistics.median(baseline), "state_mib": args.state_mib, "every": args.every, "per_save": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-mib", type=int, default=256)
    parser.add_argument("--step-s", type=float, default=0.2)
    parser.add_argument("--every", type=int, default=10, help="steps between durable saves")
    parser.add_argument("--steps", type=int, default=10, help="steps of one loop; each round runs one loop of each kind")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--skip-every-step", action="store_true", help="leave out the run with a snapshot of every step")
    parser.add_argument("--dir", default=None, help="where checkpoints go (default: the system's temporary directory)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = measure(args)
    if args.json:
        print(json.dumps(result))
        return
    print(
        f"{result['state_mib']} MiB of state, steps of {result['step_ms']:.0f} ms, a durable save every {result['every']} steps; "
        f"medians of {args.rounds} rounds"
    )
    print(f"{'':32}{'blocked in save':>18}{'training time lost per save':>30}")
    orbax = result["per_save"]["orbax"]["lost_ms"]
    for name, row in result["per_save"].items():
        print(f"{name:32}{row['blocked_ms']:15.1f} ms{row['lost_ms']:24.0f} ms ({row['lost_ms'] / orbax:.2f} x)")


if __name__ == "__main__":
    main()
