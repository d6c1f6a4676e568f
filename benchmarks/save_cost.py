"""Training time lost per save: raystate beside Orbax's CheckpointManager, in the same loop on the same machine.

    python benchmarks/save_cost.py [--state-mib 256] [--every 10] [--steps 10] [--rounds 9]

A loop of jitted steps that donate their state runs in turn without saves, with Orbax and with raystate, `rounds` times; then the same
with a snapshot of every step. What a save costs is measured as a user feels it: blocked inside `save`, and all that the loop takes
longer than the loop without saves. Medians.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")

Save = Callable[[int, Any], Any]


def build(state_mib: int, step_s: float) -> tuple[Any, Callable[[Any], Any]]:
    """(state, step function): 32 matrices of float32 over 4 devices; steps of about `step_s` seconds."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))
    leaves = 32
    rows = max(4, state_mib * (1 << 20) // leaves // 4 // 1024)
    sharding = NamedSharding(mesh, PartitionSpec("x"))

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), leaves)  # what compresses like weights do, not like a constant
        return {f"w{i}": jax.random.normal(key, (rows - rows % 4, 1024), jnp.float32) for i, key in enumerate(keys)}

    state = jax.jit(init, out_shardings={f"w{i}": sharding for i in range(leaves)})()

    def make(repeats: int) -> Callable[[Any], Any]:
        def one(x: Any) -> Any:
            # The work is thrown at a copy: iterated itself, x would soon be a constant, which costs Orbax's compression nothing.
            return x + 1e-3 * jax.lax.fori_loop(0, repeats, lambda _, y: jnp.sin(y) * 1.0001 + 1e-3, x)

        return jax.jit(lambda tree: jax.tree.map(one, tree), donate_argnums=0)

    repeats = 1
    while True:
        step = make(repeats)
        state = jax.block_until_ready(step(state))
        begin = time.perf_counter()
        state = jax.block_until_ready(step(state))
        took = time.perf_counter() - begin
        if took >= step_s * 0.7:
            return state, step
        repeats = max(repeats + 1, int(repeats * step_s / max(took, 1e-3)))


def loop(state: Any, step_fn: Any, steps: int, first: int, every: int, save: Save | None) -> tuple[Any, float, list[float], int]:
    """Run `steps` steps; (state, seconds, seconds blocked per save, saves).

    Saves come in the middle of each `every` steps, so that what a save leaves to the background falls into the time measured.
    """
    import jax

    blocked: list[float] = []
    begin = time.perf_counter()
    for step in range(first, first + steps):
        state = step_fn(state)
        if save is not None:
            start = time.perf_counter()
            save(step + 1 + every // 2, state)
            if (step + 1 + every // 2) % every == 0:
                blocked.append(time.perf_counter() - start)
    jax.block_until_ready(state)
    return state, time.perf_counter() - begin, blocked, steps // every


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import jax
    import orbax.checkpoint as ocp
    import ray

    import raystate

    state, step_fn = build(args.state_mib, args.step_s)
    folder = Path(tempfile.mkdtemp(prefix="raystate-bench-", dir=args.dir))
    snapshot_every = {"raystate": args.every} | ({} if args.skip_every_step else {"raystate, snapshot every step": 1})
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in ("orbax", *snapshot_every)}
    baseline: list[float] = []
    ray.init(
        "local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=bool(os.environ.get("VERBOSE"))
    )

    def save_orbax(step: int, tree: Any) -> None:
        if step % args.every == 0:
            orbax.save(step, args=ocp.args.StandardSave(tree))

    try:
        with ocp.CheckpointManager(folder / "orbax", options=ocp.CheckpointManagerOptions(max_to_keep=2)) as orbax:
            first = dict.fromkeys(results, 0)
            for number, (name, snapshots) in enumerate(snapshot_every.items()):  # a process has one StateManager at a time
                config = raystate.StateConfig(
                    storage=str(folder / f"raystate-{number}"), run=f"bench-{os.getpid()}-{number}", save_every_steps=args.every,
                    snapshot_every_steps=snapshots, keep_last=2,
                )  # fmt: skip
                with raystate.StateManager(config) as ours:
                    ours.restore(state)
                    savers: dict[str, tuple[Save, Callable[[], None]]] = {
                        "orbax": (save_orbax, orbax.wait_until_finished),
                        name: (ours.save, ours.wait_until_finished),
                    }
                    for round_ in range(args.rounds + 1):  # the first one warms up
                        state, base, _, _ = loop(state, step_fn, args.steps, 0, args.every, None)
                        for saver, (save, wait) in savers.items():
                            state, took, blocked, saves = loop(state, step_fn, args.steps, first[saver], args.every, save)
                            first[saver] += args.steps
                            wait()
                            if round_:
                                results[saver].append((statistics.median(blocked), (took - base) / saves))
                        if round_:
                            baseline.append(base / args.steps)
        jax.block_until_ready(state)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
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
