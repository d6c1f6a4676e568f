"""kill -9 of one trainer: seconds until the first step that had not been done before.

    python benchmarks/recovery.py --ranks 1 0 1 0 --save-every 20

The same training under plain JaxTrainer with Orbax's CheckpointManager, restored from its newest checkpoint, and under `raystate.fit`.
The kill comes half-way between two durable saves. Both run on one Ray, in turn; read the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

POLL_S = 0.02
DEADLINE_S = 180.0
SETTLE_S = 12.0  # of training before a kill: failures come in mid-training, seldom in the first seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 0, 1, 0], help="whom to kill, in turn")
    parser.add_argument("--save-every", type=int, default=20, help="steps between durable saves, of both")
    parser.add_argument("--step-s", type=float, default=0.1, help="shortest step")
    parser.add_argument("--width", type=int, default=512, help="of the 8 weight matrices")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="of training before a kill")
    parser.add_argument("--only", choices=("plain", "raystate"))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # before the import
    import ray

    repository = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [repository, os.environ.get("PYTHONPATH")]))
    ray_folder = tempfile.mkdtemp(prefix="recovery-ray-")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=ray_folder)
    try:
        found = {name: measure(way, args) for name, way in WAYS.items() if args.only in (None, name)}
    finally:
        ray.shutdown()
        shutil.rmtree(ray_folder, ignore_errors=True)
    if args.json:
        print(json.dumps(found))
        return
    for name, rows in found.items():
        for row in rows:
            print(f"{name:9} kill of rank {row['rank']}: train function after {row['to_function_s']:5.2f} s, ", end="")
            print(f"new step after {row['to_new_step_s']:5.2f} s, {row['repeated_steps']} steps repeated")
    for rank in sorted(set(args.ranks)):
        middle = {name: _median(rows, rank) for name, rows in found.items()}
        ratio = f", ratio {middle['raystate'] / middle['plain']:.2f}" if len(middle) == 2 else ""
        print(f"rank {rank}, median: " + ", ".join(f"{name} {value:.2f} s" for name, value in middle.items()) + ratio)


def _median(rows: list[dict[str, Any]], rank: int) -> float:
    return statistics.median(row["to_new_step_s"] for row in rows if row["rank"] == rank)


# ---------------------------------------------------------------- the training


def build(width: int) -> tuple[Any, Any, Any]:
    """(init, sharding, step): an MLP whose weights are split over the processes."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 8)
        return {f"w{i}": jax.random.normal(keys[i], (width, width)) / width**0.5 for i in range(8)}

    def loss_of(params: Any, x: Any) -> Any:
        for i in range(8):
            x = jnp.tanh(x @ params[f"w{i}"])
        return (x**2).mean()

    @jax.jit
    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss

    x = jax.make_array_from_callback((8, width), sharding, lambda index: np.ones((8, width), np.float32)[index])
    return init, sharding, lambda params: step(params, x)


def loop(config: dict[str, Any], first: int, state: Any, step: Any, save: Callable[[int, Any], Any], say: Any) -> None:
    for i in range(first, 1_000_000):
        begin_s = time.perf_counter()
        state, loss = step(state)
        loss.block_until_ready()
        save(i + 1, state)
        say(event="step", step=i + 1)
        if os.path.exists(config["stop"] + f"-{i + 1}"):  # rank 0's word, below: all stop at the same step
            return
        time.sleep(max(0.0, config["step_s"] - (time.perf_counter() - begin_s)))
        if config["rank"] == 0 and os.path.exists(config["stop"]) and not config.get("stopping"):
            config["stopping"] = True
            Path(config["stop"] + f"-{i + 4}").touch()


def teller(config: dict[str, Any], rank: int) -> Callable[..., None]:
    config["rank"] = rank
    stream = open(Path(config["events"]) / f"{os.getpid()}.jsonl", "a", buffering=1)  # noqa: SIM115 - ends with the process

    def say(**facts: Any) -> None:
        stream.write(json.dumps({"t": time.time(), "pid": os.getpid(), "rank": rank, **facts}) + "\n")

    say(event="function")
    return say


def train_plain(config: dict[str, Any]) -> None:
    """What a careful user writes with Orbax."""
    from ray.train import get_context

    say = teller(config, get_context().get_world_rank())
    import jax
    import orbax.checkpoint as ocp

    init, sharding, step = build(config["width"])
    options = ocp.CheckpointManagerOptions(save_interval_steps=config["save_every"], max_to_keep=3)
    with ocp.CheckpointManager(config["storage"], options=options) as manager:
        newest = manager.latest_step()
        if newest is None:
            first, state = 0, jax.jit(init, out_shardings=sharding)()
        else:
            shapes = jax.eval_shape(init)
            abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)
            first, state = newest, manager.restore(newest, args=ocp.args.StandardRestore(abstract))
        loop(config, first, state, step, lambda i, tree: manager.save(i, args=ocp.args.StandardSave(tree)), say)


def train_raystate(config: dict[str, Any]) -> None:
    from ray.train import get_context

    say = teller(config, get_context().get_world_rank())
    import raystate

    init, sharding, step = build(config["width"])
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(init, sharding)
        loop(config, restored.step, restored.state, step, manager.save, say)


# ---------------------------------------------------------------- launching


def run_plain(config: dict[str, Any], folder: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    JaxTrainer(
        train_plain,
        train_loop_config=config,
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="plain",
            storage_path=str(folder / "results"),
            failure_config=FailureConfig(max_failures=-1),
            worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
        ),
    ).fit()


def run_raystate(config: dict[str, Any], folder: Path) -> None:
    from ray.train import RunConfig

    import raystate

    state = raystate.StateConfig(storage=config["storage"], run="recovery", save_every_steps=config["save_every"])
    run_config = RunConfig(name="raystate", storage_path=str(folder / "results"))
    result = raystate.fit(train_raystate, state, num_workers=2, train_loop_config=config, run_config=run_config)
    for recovery in result.recoveries:
        print(recovery)


WAYS: dict[str, Callable[[dict[str, Any], Path], None]] = {"plain": run_plain, "raystate": run_raystate}


def measure(way: Callable[[dict[str, Any], Path], None], args: argparse.Namespace) -> list[dict[str, Any]]:
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    (folder / "events").mkdir()
    config = {
        "events": str(folder / "events"),
        "stop": str(folder / "stop"),
        "storage": str(folder / "storage"),
        "save_every": args.save_every,
        "step_s": args.step_s,
        "width": args.width,
    }
    errors: list[BaseException] = []

    def go() -> None:
        try:
            way(dict(config), folder)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=go, daemon=True)
    try:
        thread.start()
        watch = Watch(folder / "events", errors)
        rows = [watch.kill(rank, args.save_every, args.settle_s) for rank in args.ranks]
        Path(config["stop"]).touch()
        thread.join(DEADLINE_S)
        if errors:
            raise errors[0]
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Watch:
    """What the trainers have written."""

    def __init__(self, folder: Path, errors: list[BaseException]):
        self._folder, self._errors = folder, errors

    def _events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in self._folder.iterdir():
            lines = path.read_text().split("\n")[:-1]  # the last one may be half written
            found += [json.loads(line) for line in lines]
        return sorted(found, key=lambda event: event["t"])

    def _wait(self, condition: Callable[[list[dict[str, Any]]], Any], what: str) -> Any:
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            if self._errors:
                raise self._errors[0]
            if found := condition(self._events()):
                return found
            time.sleep(POLL_S)
        raise TimeoutError(f"no {what} within {DEADLINE_S:.0f} s")

    def kill(self, rank: int, save_every: int, settle_s: float) -> dict[str, Any]:
        """Kill that rank half-way between two saves, once the newest start has trained for `settle_s`."""

        def ready(events: list[dict[str, Any]]) -> dict[int, int] | None:
            pids = {event["rank"]: event["pid"] for event in events if event["event"] == "function"}
            steps = {r: [e["step"] for e in events if e["pid"] == pid and e["event"] == "step"] for r, pid in pids.items()}
            if len(pids) < 2 or any(len(done) < 1.5 * save_every for done in steps.values()):
                return None
            if time.time() - min(e["t"] for e in events if e["event"] == "step" and e["pid"] == pids[0]) < settle_s:
                return None
            return pids if steps[0][-1] % save_every == save_every // 2 else None

        pids = self._wait(ready, "steady training")
        os.kill(pids[rank], signal.SIGKILL)
        killed_s = time.time()
        before = self._events()
        newest = max(event["step"] for event in before if event["event"] == "step")
        old = {event["pid"] for event in before}
        new = self._wait(lambda events: [e for e in events if e["event"] == "step" and e["step"] > newest], "new step")
        fresh = [event for event in self._events() if event["pid"] not in old]
        first = next(event["step"] for event in fresh if event["event"] == "step")
        return {
            "rank": rank,
            "to_function_s": fresh[0]["t"] - killed_s,
            "to_new_step_s": new[0]["t"] - killed_s,
            "repeated_steps": newest + 1 - first,
        }


if __name__ == "__main__":
    main()
