"""Training throughput with all that watches a run, as a share of that without: ledger, goodput, exporters, sections, `on_event`.

    python benchmarks/watched.py [--state-mib 64] [--step-s 0.05] [--steps 20] [--rounds 200] [--quick]

One loop of jitted steps that donate their state, with snapshots and durable saves. In turn, `steps` steps run with everything and as
many without: the functions of this process, its Coordinator and its HostActor that watch do nothing then. Which of the two is first
is drawn. The figure is the median of the pairs, with the interval that has the true one in 19 of 20 times; beside it the processor time
of all processes, which the rest of the machine disturbs less. There is no such switch for users.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_enable_metrics_collection", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GOAL = 0.995
SWITCH = "RAYSTATE_BENCHMARK_UNWATCHED"  # the path of a file: while it is there, nothing watches
SECTIONS = ("data", "to device", "metrics")
DURABLE_EVERY = 10  # sides of a pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Of some steps: seconds of the wall clock, and of the processors, for this process and all that it has started."""

    wall_s: float
    cpu_s: float


def can_be_off() -> None:
    """In this process what watches does nothing while the file is there. To look costs both sides the same."""
    from raystate.actors.exporting import Exporter
    from raystate.machine.counts import ProcessCounts
    from raystate.observe.ledger.happenings import Happenings
    from raystate.observe.ledger.writer import LedgerWriter
    from raystate.observe.running_goodput import RunningGoodput
    from raystate.train import events

    off = os.environ[SWITCH]

    def switched(owner: Any, name: str, instead: Any = None) -> None:
        real = getattr(owner, name)

        @functools.wraps(real)
        def call(*given: Any, **rest: Any) -> Any:
            return instead if os.path.exists(off) else real(*given, **rest)

        setattr(owner, name, call)

    for owner, name in (
        (Exporter, "export"), (ProcessCounts, "add"), (ProcessCounts, "took"), (Happenings, "look"), (LedgerWriter, "note"),
        (RunningGoodput, "note"),
    ):  # fmt: skip
        switched(owner, name)
    switched(events, "_from_coordinator", ())


def cpu_s() -> float:
    """Of this process and those that it has started; what has ended since doesn't count, so nothing may end meanwhile."""
    import psutil

    me = psutil.Process()
    return sum(sum(one.cpu_times()[:2]) for one in (me, *me.children(recursive=True)))


def measure(asked: argparse.Namespace) -> list[tuple[Side, Side]]:
    """(with everything, without) of each pair."""
    import logging

    import ray

    from benchmarks.side.measure import own_folder
    from benchmarks.side.savers import Raystate
    from benchmarks.side.states import Case, Work
    from raystate.train.events import RunEvent, telling

    heard: list[RunEvent] = []
    pairs: list[tuple[Side, Side]] = []
    draw = random.Random(asked.rounds)
    with own_folder(asked.dir) as folder, contextlib.ExitStack() as stack:
        off = folder / "off"
        os.environ[SWITCH] = str(off)
        can_be_off()
        environment = {"env_vars": {SWITCH: str(off), "PYTHONPATH": str(ROOT)}, "worker_process_setup_hook": can_be_off}
        ray.init(
            "local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False, runtime_env=environment
        )
        stack.callback(ray.shutdown)
        work = Work(Case(mib=asked.state_mib, arrays=32), asked.step_s)
        ours = stack.enter_context(contextlib.closing(Raystate(folder / "run", every=DURABLE_EVERY * asked.steps)))
        stack.enter_context(telling(heard.append, ours.config))
        ours.manager.restore(work.state)
        step = 0

        def side(*, watched: bool) -> Side:
            nonlocal step
            off.unlink(missing_ok=True) if watched else off.touch()
            begun_cpu_s, begin_s = cpu_s(), time.perf_counter()
            for _ in range(asked.steps):
                if watched:
                    for name in SECTIONS:
                        with ours.manager.section(name):
                            pass
                work()
                work.keep_up()
                step += 1
                ours.save(step, work.state)
            work.wait()
            return Side(wall_s=time.perf_counter() - begin_s, cpu_s=cpu_s() - begun_cpu_s)

        for _ in range(DURABLE_EVERY + 1):  # warms up, and a step becomes durable
            side(watched=True)
        for _ in range(asked.rounds):
            took = {watched: side(watched=watched) for watched in draw.sample((True, False), 2)}
            pairs.append((took[True], took[False]))
        off.unlink(missing_ok=True)
        ours.wait()
    if not any(event.kind == "durable" for event in heard):
        raise RuntimeError("on_event has heard of no durable step: not everything was on")
    return pairs


def within(ordered: list[float]) -> tuple[float, float]:
    """In 19 of 20 times their true median lies there: by the sign test, whatever their distribution."""
    away = math.ceil(0.98 * math.sqrt(len(ordered)))
    middle = len(ordered) // 2
    return ordered[max(0, middle - away)], ordered[min(len(ordered) - 1, middle + away)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state-mib", type=int, default=64)
    parser.add_argument("--step-s", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=20, help="of one side of a pair")
    parser.add_argument("--rounds", type=int, default=200, help="pairs")
    parser.add_argument("--quick", action="store_true", help="few and short: shows that it runs")
    parser.add_argument("--dir", default=None, help="where checkpoints go (default: the system's temporary directory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds of each pair")
    asked = parser.parse_args()
    if asked.quick:
        asked.state_mib, asked.step_s, asked.steps, asked.rounds = 4, 0.02, 5, 8
    pairs = measure(asked)
    if asked.json:
        asked.json.write_text(json.dumps([[asdict(side) for side in pair] for pair in pairs]))
    shares = sorted(without.wall_s / everything.wall_s for everything, without in pairs)
    low, high = within(shares)
    step_ms = 1e3 * statistics.median(without.wall_s for _, without in pairs) / asked.steps
    more_ms = 1e3 * statistics.mean(everything.cpu_s - without.cpu_s for everything, without in pairs) / asked.steps
    print(f"{asked.state_mib} MiB of state, steps of {step_ms:.1f} ms; {len(pairs)} pairs of {asked.steps} steps")
    print(f"throughput with everything on: {statistics.median(shares):.2%} of that without ({low:.2%} to {high:.2%})")
    print(
        f"processor time with everything on: {more_ms:+.2f} ms a step, {more_ms / step_ms / (os.cpu_count() or 1):+.2%} of all cores"
    )
    print(f"the goal is {GOAL:.1%} or more")


if __name__ == "__main__":
    main()
