"""What a snapshot of every step costs a training, with a copy of it in a peer's memory: beside the same steps without, in turn.

    python benchmarks/snapshots.py [--mib 256] [--step-s 0.5] [--steps 20] [--rounds 5] [--replicas 1]

Two trainers on two simulated nodes of this machine, each with so many MiB of state, which each step replaces. The rest of a step is
sleep: it stands for devices that compute, so that the cores which snapshots need are free. `throughput` is that of the steps with
snapshots, in parts of that without; `complete` counts the steps that came to lie in memory with their copies. Medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.recovery import started_ray

LEAVES = 16
WARM_STEPS = 6
SETTLE_STEPS = 3  # not measured, at the beginning of each phase: what the phase before has left behind ends meanwhile


def train(config: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import ray
    from jax.experimental.multihost_utils import sync_global_devices
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import raystate
    from raystate.actors.naming import NAMESPACE, coordinator_name
    from raystate.storage import run_hash

    rows = max(1, config["mib"] * (1 << 20) // LEAVES // 4 // 1024) * jax.process_count()
    split = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    names = [f"w{i}" for i in range(LEAVES)]

    def init() -> Any:
        return {name: jax.random.normal(jax.random.key(i), (rows, 1024), jnp.float32) for i, name in enumerate(names)}

    step_fn = jax.jit(
        lambda tree: jax.tree.map(lambda x: x + 1e-3, tree), donate_argnums=0, out_shardings=dict.fromkeys(names, split)
    )
    facts: dict[str, list[float]] = {"off": [], "on": [], "complete": [], "blocked": []}
    with raystate.StateManager() as manager:
        state = manager.restore_or_init(init, dict.fromkeys(names, split)).state
        coordinator: Any = ray.get_actor(
            coordinator_name(run_hash(manager.config.storage, manager.config.run)), namespace=NAMESPACE
        )
        step, seen = 0, set[int]()

        def phase(steps: int, *, save: bool) -> float:
            """Seconds."""
            nonlocal step, state
            sync_global_devices(f"{step}")
            begin_s = time.perf_counter()
            for number in range(steps):
                started_s = time.perf_counter()
                step += 1
                state = jax.block_until_ready(step_fn(state))
                saving_s = time.perf_counter()
                if save:
                    manager.save(step, state)
                facts["blocked"].append(time.perf_counter() - saving_s)
                if save and jax.process_index() == 0:
                    report: Any = ray.get(coordinator.status.remote())
                    seen.add(report.status.memory_step)
                del number
                time.sleep(max(0.0, config["step_s"] - (time.perf_counter() - started_s)))
            return time.perf_counter() - begin_s

        phase(WARM_STEPS, save=True)
        for _ in range(config["rounds"]):
            phase(SETTLE_STEPS, save=False)
            facts["off"].append(phase(config["steps"], save=False) / config["steps"])
            phase(SETTLE_STEPS, save=True)
            seen.clear()
            facts["blocked"].clear()
            facts["on"].append(phase(config["steps"], save=True) / config["steps"])
            facts["complete"].append(len(seen))
            blocked = statistics.median(facts["blocked"])
        facts["blocked"] = [blocked]
    if jax.process_index() == 0:
        Path(config["out"]).write_text(json.dumps(facts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of each host's state")
    parser.add_argument("--step-s", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=20, help="of each phase")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    found = measure(args)
    if args.json:
        print(json.dumps(found))
        return
    off, on = (1e3 * statistics.median(found[name]) for name in ("off", "on"))
    ratios = [before / after for before, after in zip(found["off"], found["on"], strict=True)]
    print(f"{os.cpu_count()} cores, load {load:.1f} at the start; {args.mib} MiB on each of two hosts, replicas={args.replicas}")
    print(f"a step: {off:.0f} ms without snapshots, {on:.0f} ms with; save() blocked {1e3 * found['blocked'][0]:.0f} ms")
    print(f"complete: {statistics.median(found['complete']):.0f} of {args.steps} steps")
    print(f"throughput: {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}), median of {args.rounds}")


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    import raystate

    folder = Path(tempfile.mkdtemp(prefix="snapshots-"))
    config = raystate.StateConfig(
        storage=str(folder / "storage"), run="snapshots", save_every_steps=1_000_000, replicas=args.replicas,
    )  # fmt: skip
    loop = {"mib": args.mib, "step_s": args.step_s, "steps": args.steps, "rounds": args.rounds, "out": str(folder / "facts")}
    try:
        with started_ray(nodes=2):
            from ray.train import RunConfig

            raystate.fit(
                train, config, num_workers=2, train_loop_config=loop, run_config=RunConfig(storage_path=str(folder / "results"))
            )
        return json.loads((folder / "facts").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
