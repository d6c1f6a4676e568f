"""What a snapshot costs the training: ways to keep a state that the next step donates.

    python benchmarks/hold.py --mib 256 --devices 4 --rounds 5

For each way, rounds of a few donating steps with one save each are timed in turn with rounds without any save, so that a busy machine
bothers all alike. `blocked` is the time inside save() on the training thread; `lost` is what a step with a save takes longer than one
without, background work included: the number that counts. CPU only.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

Behind = Callable[[], Any] | None  # what save() leaves to a background thread


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the state")
    parser.add_argument("--arrays", type=int, default=32)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sweeps", type=int, default=8, help="passes over the state per step: how long a step takes")
    parser.add_argument("--steps", type=int, default=3, help="steps, each with a save, per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--replicated", action="store_true", help="every device holds the whole state")
    parser.add_argument("--only", nargs="*", default=None)
    args = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    bench = Bench(args)
    for sync in (False, True):
        print(f"\nloop that {'waits for each step (reads the loss)' if sync else 'runs ahead'}:")
        bench.run(sync)


class Bench:
    def __init__(self, args: argparse.Namespace):
        import jax
        import jax.numpy as jnp
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        from raystate.arrays.stage import copy, hold
        from raystate.arrays.tree import describe

        self.args = args
        self.jax = jax
        mesh = jax.make_mesh((args.devices,), ("x",))
        self.sharding = NamedSharding(mesh, PartitionSpec() if args.replicated else PartitionSpec("x"))

        # Donated as a whole, updated in place: what an optimizer step does to its state.
        @functools.partial(jax.jit, donate_argnums=0)
        def step(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
            def update(x: Any) -> Any:
                return jax.lax.fori_loop(0, args.sweeps, lambda _, y: jnp.sin(y) * 1.0001 + 1e-3, x)

            state = {name: update(x) for name, x in state.items()}
            return state, jnp.mean(state["000"][:8])

        self.step = step
        each = args.mib * (1 << 18) // args.arrays
        self.state = {
            f"{i:03d}": jax.device_put(jnp.arange(each, dtype=jnp.float32) + i, self.sharding) for i in range(args.arrays)
        }
        for _ in range(3):
            self.state, loss = step(self.state)
        loss.block_until_ready()
        self.plan = describe({"state": self.state}).plan
        # Touched, as a slot of an arena is.
        self.slots = [np.full(self.plan.layout.data_bytes, 1, np.uint8) for _ in range(3)]
        self.saves = 0

        def ours() -> Behind:
            held = hold(describe({"state": self.state}, previous=self.plan))
            return lambda: copy(held, self.slot())

        def at_once() -> Behind:
            described = describe({"state": self.state}, previous=self.plan)
            copy(_views(described), self.slot())
            return None

        def views() -> Behind:
            described = describe({"state": self.state}, previous=self.plan)
            held = _views(described)
            held.separate()
            held._parts = [np.asarray(part) for part in held._parts]
            return lambda: copy(held, self.slot())

        def pinned() -> Behind:
            copies = jax.device_put(self.state, self.sharding.with_memory_kind("pinned_host"), may_alias=False)
            held = _views(describe({"state": copies}))
            return lambda: copy(held, self.slot())

        def fresh() -> Behind:
            host = [np.array(x) for x in self.state.values()]
            return host.clear

        def ready_at_once() -> Behind:
            if all(x.is_ready() for x in self.state.values()):
                return at_once()
            return ours()

        self.ways: dict[str, Callable[[], Behind]] = {
            "nothing": lambda: None,
            "hold + copy (raystate)": ours,
            "copy at once, into the slot": at_once,
            "copy at once if ready, else hold": ready_at_once,
            "views, copy behind": views,
            "device_put pinned_host": pinned,
            "copy at once, fresh memory": fresh,
        }
        if args.only is not None:
            self.ways = {name: way for name, way in self.ways.items() if name == "nothing" or any(o in name for o in args.only)}

    def slot(self) -> Any:
        self.saves += 1
        return self.slots[self.saves % len(self.slots)]

    def round(self, way: Callable[[], Behind], sync: bool) -> tuple[float, list[float]]:
        """Seconds per step, seconds blocked per save."""
        self.jax.block_until_ready(self.state)
        blocked: list[float] = []
        threads: list[threading.Thread] = []
        start = time.perf_counter()
        for _ in range(self.args.steps):
            self.state, loss = self.step(self.state)
            if sync:
                float(loss)
            before = time.perf_counter()
            behind = way()
            if behind is not None:
                threads.append(threading.Thread(target=behind))
                threads[-1].start()
            blocked.append(time.perf_counter() - before)
            behind = None
        self.jax.block_until_ready(self.state)
        for thread in threads:
            thread.join()
        return (time.perf_counter() - start) / self.args.steps, blocked

    def run(self, sync: bool) -> None:
        seconds: dict[str, list[float]] = {name: [] for name in self.ways}
        blocked: dict[str, list[float]] = {name: [] for name in self.ways}
        for number in range(self.args.rounds + 1):
            for name, way in self.ways.items():
                each, waits = self.round(way, sync)
                if number:  # the first round warms up
                    seconds[name].append(each)
                    blocked[name].extend(waits)
        base = statistics.median(seconds["nothing"])
        print(f"  {self.args.mib} MiB, {self.args.devices} devices; a step without a save: {base * 1e3:.0f} ms")
        for name in self.ways:
            lost = statistics.median(a - b for a, b in zip(seconds[name], seconds["nothing"], strict=True))
            best = min(seconds[name]) - min(seconds["nothing"])
            wait = statistics.median(blocked[name])
            print(
                f"  {name:34s} blocked {wait * 1e3:7.1f} ms   lost per save {lost * 1e3:6.0f} ms (of the best rounds {best * 1e3:5.0f})"
            )


def _views(described: Any) -> Any:
    """A HeldState of the arrays themselves, unprotected."""
    from raystate.arrays.stage import HeldState

    parts: list[Any] = []
    for leaf in described.plan.arrays:
        parts.extend((described.leaves[leaf.position], shard.position) for shard in leaf.shards)
    return HeldState(described.plan, parts)


if __name__ == "__main__":
    main()
