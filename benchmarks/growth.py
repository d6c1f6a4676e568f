"""How what saving and restoring cost grows: with bytes, arrays, kept steps and hosts, each with a fitted slope.

    python benchmarks/growth.py [--quick] [--json FILE] [--only TEXT …]

Real saves of one process for bytes, arrays and kept steps; real trainers on simulated nodes of this machine for 1, 2 and 4 hosts; and
the Coordinator's own CPU time with up to 4,096 hosts that answer at once. The slope is that of log(figure) over log(size) in the larger
half of the sizes: 1 grows with the size, 0 not at all. Hosts of one machine share its cores and its disk: what they write together
takes longer with each. raystate alone; beside.py has its peers.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.recovery import started_ray  # noqa: E402
from benchmarks.side.machine import describe_machine, is_busy, others_share, said  # noqa: E402
from benchmarks.side.process import json_of, on_cpu  # noqa: E402
from benchmarks.side.savers import OURS, from_memory  # noqa: E402
from benchmarks.side.states import Case  # noqa: E402

STEEP = 1.15  # a slope above this is more than noise
FIGURES = ("blocked, ready", "durable", "restore from memory", "restore from storage")
LINES = {
    "bytes": ("MiB in 16 arrays", (16, 64, 256, 512), (4, 8)),
    "arrays": ("arrays, 64 MiB", (64, 256, 1024, 4096), ()),
    "kept steps": ("steps kept in storage", (10, 30, 100, 300), (2, 4)),
    "hosts": ("hosts of 32 MiB", (1, 2, 4), ()),
    "simulated hosts": ("simulated hosts, CPU time of the Coordinator", (16, 64, 256, 1024, 4096), (16, 64)),
}  # name -> (what its sizes are, sizes, sizes of --quick: none, it is left out)

Line = dict[str, list[float]]  # figure -> one value in ms per size


def main() -> int:
    """Exit status 0: all was measured; 1: a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, and not all lines: shows that it runs")
    parser.add_argument("--rounds", type=int, default=3, help="of each size; medians")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything that was measured")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="lines whose name has one of these in it")
    parser.add_argument("--part", choices=sorted(PARTS), help=argparse.SUPPRESS)  # in a process of its own
    parser.add_argument("--sizes", type=int, nargs="+", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.part:
        print(json.dumps(PARTS[asked.part](asked.sizes, asked.rounds)))
        return 0
    machine, lines, failed = describe_machine(), {}, []
    for name, (_, full, quick) in LINES.items():
        if asked.only and not any(text in name for text in asked.only):
            continue
        sizes = quick if asked.quick else full
        if not sizes:
            continue
        print(f"measuring: {name}", end="", file=sys.stderr, flush=True)
        begin_s = time.monotonic()
        try:
            lines[name] = measured(name, sizes, 1 if asked.quick else asked.rounds, quick=asked.quick)
        except (subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
            failed.append(f"{name}: {error}")
        print(f" ({time.monotonic() - begin_s:.0f} s)", file=sys.stderr, flush=True)
    machine["load_after"] = round(others_share(), 3)
    show(lines, machine, quick=asked.quick)
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        asked.json.write_text(
            json.dumps({"machine": machine, "busy": is_busy(machine), "lines": lines, "failed": failed}, indent=1) + "\n"
        )
    for text in failed:
        print(f"failed: {text}", file=sys.stderr)
    return int(bool(failed))


def measured(name: str, sizes: tuple[int, ...], rounds: int, *, quick: bool) -> Line:
    """One line: a process for each size of a state, but of --quick and the rest one for all sizes."""
    line: Line = {}
    for together in [[size] for size in sizes] if name in ("bytes", "arrays") and not quick else [sizes]:
        options = ["--part", name, "--rounds", str(rounds), "--sizes", *map(str, together)]
        for figure, values in json_of([sys.executable, str(Path(__file__).resolve()), *options], on_cpu()).items():
            line.setdefault(figure, []).extend(values)
    return line


# ------------------------------------------------------------ each in a process of its own


def in_bytes(sizes: list[int], rounds: int) -> Line:
    """States of so many MiB."""
    return states([Case(mib=size, rounds=rounds) for size in sizes])


def in_arrays(sizes: list[int], rounds: int) -> Line:
    """States of so many arrays."""
    return states([Case(mib=64, shape="small", arrays=size, rounds=rounds) for size in sizes])


def states(cases: list[Case]) -> Line:
    """What raystate alone takes for each."""
    from benchmarks.side.measure import measure

    line: Line = {}
    for found in measure(cases, [OURS], None):
        _add(line, {figure: found["seconds"][figure][OURS] for figure in FIGURES})
    return line


def kept_steps(sizes: list[int], rounds: int) -> Line:
    """A small state, saved until so many steps are kept; the figures are those of the last saves, and of restores then."""
    import jax
    import jax.numpy as jnp

    import raystate
    from benchmarks.side.measure import own_cluster

    line: Line = {}
    state = {f"w{i}": jnp.arange(4096.0) + i for i in range(8)}
    with own_cluster(None) as folder:
        config = raystate.StateConfig(storage=str(folder / "kept"), run=f"growth-{os.getpid()}", save_every_steps=1, keep_last=None)
        manager, step = raystate.StateManager(config), 0
        with manager:
            for size in sizes:
                took: Line = {}
                while step < size:
                    step += 1
                    begin_s = time.perf_counter()
                    manager.save(step, state)
                    manager.wait_until_finished()
                    if step > size - rounds:
                        took.setdefault("durable", []).append(time.perf_counter() - begin_s)
                for _ in range(rounds):
                    begin_s = time.perf_counter()
                    jax.block_until_ready(from_memory(manager, state))
                    took.setdefault("restore from memory", []).append(time.perf_counter() - begin_s)
                    begin_s = time.perf_counter()
                    jax.block_until_ready(raystate.Reader(config.storage).restore(state).state)
                    took.setdefault("restore from storage", []).append(time.perf_counter() - begin_s)
                _add(line, took)
    return line


def hosts(sizes: list[int], rounds: int) -> Line:
    """So many trainers, each on a simulated node of its own."""
    line: Line = {}
    for size in sizes:
        _add(line, _on_hosts(size, rounds))
    return line


def _on_hosts(count: int, rounds: int) -> Line:
    from ray.train import RunConfig

    import raystate

    folder = Path(tempfile.mkdtemp(prefix="growth-"))
    config = raystate.StateConfig(storage=str(folder / "storage"), run="growth", save_every_steps=1, replicas=0)
    loop = {"rounds": rounds, "out": str(folder / "facts")}
    try:
        with started_ray(nodes=count):
            raystate.fit(
                _train,
                config,
                num_workers=count,
                train_loop_config=loop,
                run_config=RunConfig(storage_path=str(folder / "results")),
            )
        return json.loads((folder / "facts").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.multihost_utils import sync_global_devices
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import raystate

    rows = 256 * jax.process_count()  # 16 arrays of 2 MiB for each host
    split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    names = [f"w{i}" for i in range(16)]

    def init() -> Any:
        return {name: jax.random.normal(jax.random.key(i), (rows, 2048), jnp.float32) for i, name in enumerate(names)}

    took: Line = {}

    def timed(figure: str, work: Any) -> Any:
        sync_global_devices(figure)
        begin_s = time.perf_counter()
        result = jax.block_until_ready(work())
        took.setdefault(figure, []).append(time.perf_counter() - begin_s)
        return result

    with raystate.StateManager() as manager:
        shardings = dict.fromkeys(names, split)
        state = manager.restore_or_init(init, shardings).state
        reference = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split), state)
        for step in range(1, config["rounds"] + 2):
            if step == 2:
                took.clear()  # the first round warms up
            timed("blocked, ready", functools.partial(manager.save, step, state))
            begin_s = time.perf_counter()
            manager.wait_until_finished()
            took.setdefault("durable", []).append(time.perf_counter() - begin_s)
            restored = timed("restore from memory", lambda: from_memory(manager, reference))
            timed("restore from storage", lambda: raystate.Reader(manager.config.storage).restore(reference).state)
            state = restored
    if jax.process_index() == 0:
        Path(config["out"]).write_text(json.dumps(took))


def simulated_hosts(sizes: list[int], rounds: int) -> Line:
    """CPU time of the Coordinator's decisions: one rank on each host, no network, no storage."""
    from tests.core.fleet import PHASES, ready

    line: Line = {}
    for size in sizes:
        took: Line = {}
        for _ in range(rounds):
            fleet = ready(size)
            for name, phase in PHASES.items():
                begin_s = time.process_time()
                phase(fleet)
                took.setdefault(name, []).append(time.process_time() - begin_s)
        _add(line, took)
    return line


def _add(line: Line, took: Line) -> None:
    for figure, seconds in took.items():
        line.setdefault(figure, []).append(1e3 * statistics.median(seconds))


PARTS = {"bytes": in_bytes, "arrays": in_arrays, "kept steps": kept_steps, "hosts": hosts, "simulated hosts": simulated_hosts}


# ------------------------------------------------------------ what it says


def slope(sizes: tuple[int, ...], values: list[float]) -> float:
    """Of log(value) over log(size), fitted by least squares to the larger half of the sizes; nan: of one size."""
    if len(sizes) < 2:
        return math.nan
    keep = max(2, (len(sizes) + 1) // 2)
    points = [(math.log(size), math.log(max(value, 1e-6))) for size, value in list(zip(sizes, values, strict=True))[-keep:]]
    x0, y0 = (statistics.fmean(axis) for axis in zip(*points, strict=True))
    return sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)


def show(lines: dict[str, Line], machine: dict[str, Any], *, quick: bool) -> None:
    """A table for each line."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=120)
    for name, line in lines.items():
        what, full, few = LINES[name]
        sizes = few if quick else full
        table = Table(title=f"{name}: ms by {what}", title_justify="left", pad_edge=False)
        table.add_column("figure")
        for size in sizes:
            table.add_column(f"{size:,}", justify="right")
        table.add_column("slope", justify="right")
        for figure, values in line.items():
            steep = slope(sizes, values)
            told = "" if math.isnan(steep) else f"[red]{steep:.2f}[/red]" if steep > STEEP else f"{steep:.2f}"
            table.add_row(figure, *(f"{value:.3g}" if value < 1000 else f"{value:,.0f}" for value in values), told)
        console.print(table)
    console.print(said(machine))


if __name__ == "__main__":
    sys.exit(main())
