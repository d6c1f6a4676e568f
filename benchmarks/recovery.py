"""kill -9 of one trainer, or a notice that its node goes away: seconds until the first step that had not been done before.

    python benchmarks/recovery.py                             # kills: of rank 1, then of rank 0; --rounds N: in N starts
    python benchmarks/recovery.py --drain 15 30               # notices of so many seconds, on three simulated nodes
    python benchmarks/recovery.py --goodput 120 --every-s 30  # useful steps per minute with a kill every so many seconds
    python benchmarks/recovery.py --lm                        # any of these with the demo's language model, not with small matrices

The same training under plain JaxTrainer with Orbax's CheckpointManager, restored from its newest checkpoint, and under `raystate.fit`,
in turn on one Ray; read the ratio. Both have a compilation cache: plain JaxTrainer gets JAX's own, in a local folder, of all programs.
The kill comes half-way between two durable saves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

POLL_S = 0.02
DEADLINE_S = 240.0
# Of training before a kill: failures come in mid-training, seldom in the first seconds. On 2 cores raystate's waiting processes are
# ready about 10 after the first steps.
SETTLE_S = 20.0
LM = "configs/lm_cpu.yaml"
NODE: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}  # room for one trainer
# Of a restart, as the slowest rank reaches each. The language model compiles beside the three in the middle.
PHASES = ("function", "built", "manager", "restored", "compiled", "step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 0], help="whom to kill in each start, in turn")
    parser.add_argument("--rounds", type=int, default=1, help="starts of each")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="each worker has a GPU of its own")
    parser.add_argument("--drain", type=int, nargs="+", metavar="S", help="instead of kills: notices of so many seconds to a node")
    parser.add_argument("--goodput", type=float, metavar="S", help="instead: kills for so long, and the steps that come of it")
    parser.add_argument("--every-s", type=float, default=30.0, help="seconds between two kills, with --goodput")
    parser.add_argument("--save-every", type=int, default=20, help="steps between durable saves, of both")
    parser.add_argument("--step-s", type=float, default=0.1, help="shortest step")
    parser.add_argument("--width", type=int, default=512, help="of the 8 weight matrices")
    parser.add_argument("--lm", action="store_true", help=f"train the model of {LM}, two devices for each rank")
    parser.add_argument("--settle-s", type=float, default=SETTLE_S, help="of training before a kill")
    parser.add_argument("--no-cache", action="store_true", help="both without a compilation cache")
    parser.add_argument("--only", choices=sorted(WAYS))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS if args.only in (None, name)}
    load = os.getloadavg()[0]
    with started_ray(nodes=2 if args.drain else 0, gpus=args.workers if args.gpu else 0) as add_node:
        for _ in range(args.rounds):
            for name in found:
                rows = measure(name, args, add_node)
                found[name] += rows
                if not args.json:
                    told(name, rows)
    if args.json:
        print(json.dumps(found))
        return
    print(f"{os.cpu_count()} cores, load {load:.1f} at the start")
    summary(found)


@contextlib.contextmanager
def started_ray(*, nodes: int, gpus: int = 0) -> Iterator[Callable[[], Any]]:
    """A Ray of this benchmark's own: one node, or a head and so many nodes with room for one trainer each. Gives what adds one more."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # before the import
    import ray
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    folder = tempfile.mkdtemp(prefix="recovery-ray-")
    cluster = None
    try:
        if nodes:
            cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
            for _ in range(nodes):
                cluster.add_node(**NODE)
            ray.init(cluster.address, log_to_driver=False)
        else:
            ray.init("local", num_cpus=4, num_gpus=gpus, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
        yield lambda: cluster.add_node(**NODE) if cluster is not None else None
    finally:
        ray.shutdown()
        if cluster is not None:
            cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def told(name: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        parts = ", ".join(f"{phase} {row['phases'][phase]:.2f}" for phase in PHASES if phase in row.get("phases", {}))
        if "steps_per_minute" in row:
            print(
                f"{name:9} {row['what']}: {row['steps_per_minute']:.0f} useful steps per minute, {row['kills']} kills", flush=True
            )
        else:
            print(f"{name:9} {row['what']}: new step after {row['to_new_step_s']:5.2f} s ({parts}), ", end="")
            print(f"no steps for {row['gap_s']:.2f} s, {row['repeated_steps']} repeated", flush=True)


def summary(found: dict[str, list[dict[str, Any]]]) -> None:
    key, unit = (
        ("steps_per_minute", "steps per minute") if "steps_per_minute" in next(iter(found.values()))[0] else ("to_new_step_s", "s")
    )
    for what in dict.fromkeys(row["what"] for rows in found.values() for row in rows):
        every = {name: [row[key] for row in rows if row["what"] == what] for name, rows in found.items()}
        spread = ", ".join(f"{name} {statistics.median(v):.2f} {unit} ({min(v):.2f} to {max(v):.2f})" for name, v in every.items())
        both = len(every) == 2
        ratio = f", ratio {statistics.median(every['raystate']) / statistics.median(every['plain']):.2f}" if both else ""
        print(f"{what}, median of {len(next(iter(every.values())))}: {spread}{ratio}")


# ---------------------------------------------------------------- the training


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What is trained, whoever keeps its state."""

    init: Callable[[], Any]
    shardings: Callable[[Any], Any]  # abstract state -> shardings
    step: Callable[[Any, int], Any]  # (state, number of the step) -> (state, loss)
    compiled: Callable[[], Any] = lambda: None  # waits until the step is, where that goes on beside the restore


def build(config: dict[str, Any]) -> Training:
    return build_lm(config["lm"]) if config["lm"] else build_matrices(config["width"])


def build_matrices(width: int) -> Training:
    """An MLP whose weights are split over the processes."""
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

    def shardings(abstract: Any) -> Any:
        return jax.tree.map(lambda _: sharding, abstract)

    return Training(init=init, shardings=shardings, step=lambda params, _number: step(params, x))


def build_lm(values: dict[str, Any]) -> Training:
    """The demo's language model, as `jobs.lm.train` builds it: the step is compiled on a thread of its own."""
    import numpy as np

    from jobs.lm import step as lm_step
    from jobs.lm.config import validate
    from jobs.lm.corpus import load_corpus

    config = validate(values)
    mesh = lm_step.make_mesh(config.train.mesh)
    batch_size, seq_len = config.train.batch_size, config.data.seq_len
    computation = lm_step.build(config, mesh)
    compiling = lm_step.CompileAhead(computation, (batch_size, seq_len + 1))
    text = load_corpus(config.data).train
    here = np.arange(*lm_step.local_rows(mesh, batch_size))

    def step(state: Any, number: int) -> Any:
        starts = (number * batch_size + here[:, None]) * seq_len % (text.size - seq_len)
        return compiling.result()(state, computation.batch(text[starts + np.arange(seq_len + 1)]))

    return Training(init=computation.init, shardings=computation.shardings, step=step, compiled=compiling.result)


def loop(config: dict[str, Any], first: int, state: Any, training: Training, save: Callable[[int, Any], Any], say: Any) -> None:
    training.compiled()
    say(event="compiled")
    for i in range(first, 1_000_000):
        begin_s = time.perf_counter()
        state, loss = training.step(state, i)
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

    import ray

    say(event="function", node=ray.get_runtime_context().get_node_id())
    return say


def train_plain(config: dict[str, Any]) -> None:
    """What a careful user writes with Orbax."""
    from ray.train import get_context

    say = teller(config, get_context().get_world_rank())
    import jax
    import orbax.checkpoint as ocp

    training = build(config)
    say(event="built")
    options = ocp.CheckpointManagerOptions(save_interval_steps=config["save_every"], max_to_keep=3)
    with ocp.CheckpointManager(config["storage"], options=options) as manager:
        say(event="manager")
        newest = manager.latest_step()
        abstract = jax.eval_shape(training.init)
        shardings = training.shardings(abstract)
        if newest is None:
            first, state = 0, jax.jit(training.init, out_shardings=shardings)()
        else:
            abstract = jax.tree.map(
                lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract, shardings
            )
            first, state = newest, manager.restore(newest, args=ocp.args.StandardRestore(abstract))
        say(event="restored")
        loop(config, first, state, training, lambda i, tree: manager.save(i, args=ocp.args.StandardSave(tree)), say)


def train_raystate(config: dict[str, Any]) -> None:
    from ray.train import get_context

    say = teller(config, get_context().get_world_rank())
    import raystate

    training = build(config)
    say(event="built")
    with raystate.StateManager() as manager:
        say(event="manager")
        restored = manager.restore_or_init(training.init, training.shardings)
        say(event="restored")
        loop(config, restored.step, restored.state, training, manager.save, say)


# ---------------------------------------------------------------- launching


def lm_config(*, gpu: bool) -> dict[str, Any]:
    from jobs.lm.config import load

    values = load(ROOT / LM).model_dump(mode="json")
    if gpu:  # one to each worker
        values["train"]["mesh"]["model"] = 1
    return values


def device_flags(config: dict[str, Any]) -> dict[str, str]:
    """Environment variables: two devices for each rank of the language model, but where it has a GPU."""
    if config["gpu"]:
        return {"JAX_PLATFORMS": "cuda,cpu"}
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"} if config["lm"] else {}
    return {"JAX_PLATFORMS": "cpu", **flags}


def scaling(config: dict[str, Any]) -> Any:
    from ray.train import ScalingConfig

    return ScalingConfig(num_workers=config["workers"], use_gpu=config["gpu"])


def run_plain(config: dict[str, Any], folder: Path) -> None:
    from ray.train import FailureConfig, RunConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    JaxTrainer(
        train_plain,
        train_loop_config=config,
        jax_config=JaxConfig(use_gpu=True),
        scaling_config=scaling(config),
        run_config=RunConfig(
            name="plain",
            storage_path=str(folder / "results"),
            failure_config=FailureConfig(max_failures=-1),
            worker_runtime_env={"env_vars": {**device_flags(config), **config["environment"]}},
        ),
    ).fit()


def run_raystate(config: dict[str, Any], folder: Path) -> None:
    from ray.train import RunConfig

    import raystate

    state = raystate.StateConfig(storage=config["storage"], run="recovery", save_every_steps=config["save_every"])
    if config["no_cache"]:
        state = state.replace(compilation_cache_bytes=0)
    run_config = RunConfig(
        name="raystate", storage_path=str(folder / "results"), worker_runtime_env={"env_vars": device_flags(config)}
    )
    raystate.fit(train_raystate, state, scaling_config=scaling(config), train_loop_config=config, run_config=run_config)


def _jax_cache(folder: Path) -> dict[str, str]:
    return {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


WAYS: dict[str, Callable[[dict[str, Any], Path], None]] = {"plain": run_plain, "raystate": run_raystate}


def measure(name: str, args: argparse.Namespace, add_node: Callable[[], Any]) -> list[dict[str, Any]]:
    """One start: what became of each kill or notice."""
    folder = Path(tempfile.mkdtemp(prefix="recovery-"))
    (folder / "events").mkdir()
    config = {
        "events": str(folder / "events"),
        "stop": str(folder / "stop"),
        "storage": str(folder / "storage"),
        "save_every": args.save_every,
        "step_s": args.step_s,
        "width": args.width,
        "lm": lm_config(gpu=args.gpu) if args.lm else None,
        "no_cache": args.no_cache,
        "workers": args.workers,
        "gpu": args.gpu,
        "environment": {} if args.no_cache else _jax_cache(folder),
    }
    errors: list[BaseException] = []

    def go() -> None:
        try:
            WAYS[name](dict(config), folder)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=go, daemon=True)
    try:
        thread.start()
        watch = Watch(folder / "events", errors, args)
        if args.drain:
            rows = [watch.drain(notice_s, add_node) for notice_s in args.drain]
        elif args.goodput:
            rows = [watch.goodput(args.goodput, args.every_s, args.ranks)]
        else:
            rows = [watch.kill(rank) for rank in args.ranks]
        Path(config["stop"]).touch()
        thread.join(DEADLINE_S)
        if errors:
            raise errors[0]
        return rows
    finally:
        shutil.rmtree(folder, ignore_errors=True)


Event = dict[str, Any]


class Watch:
    """What the trainers have written."""

    def __init__(self, folder: Path, errors: list[BaseException], args: argparse.Namespace):
        self._folder, self._errors, self._workers = folder, errors, args.workers
        self._save_every, self._settle_s = args.save_every, args.settle_s

    def _events(self) -> list[Event]:
        found: list[Event] = []
        for path in self._folder.iterdir():
            lines = path.read_text().split("\n")[:-1]  # the last one may be half written
            found += [json.loads(line) for line in lines]
        return sorted(found, key=lambda event: event["t"])

    def _wait(self, condition: Callable[[list[Event]], Any], what: str) -> Any:
        end_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < end_s:
            if self._errors:
                raise self._errors[0]
            if found := condition(self._events()):
                return found
            time.sleep(POLL_S)
        raise TimeoutError(f"no {what} within {DEADLINE_S:.0f} s")

    def _steady(self, *, settle_s: float | None = None) -> dict[int, int]:
        """The pids by rank, half-way between two saves, once the newest start has trained for a while."""
        settle_s = self._settle_s if settle_s is None else settle_s

        def ready(events: list[Event]) -> dict[int, int] | None:
            pids = {event["rank"]: event["pid"] for event in events if event["event"] == "function"}
            steps = {r: [e["step"] for e in events if e["pid"] == pid and e["event"] == "step"] for r, pid in pids.items()}
            if len(pids) < self._workers or any(len(done) < 1.5 * self._save_every for done in steps.values()):
                return None
            if time.time() - min(e["t"] for e in events if e["event"] == "step" and e["pid"] == pids[0]) < settle_s:
                return None
            return pids if steps[0][-1] % self._save_every == self._save_every // 2 else None

        return self._wait(ready, "steady training")

    def kill(self, rank: int) -> dict[str, Any]:
        pids = self._steady()
        os.kill(pids[rank], signal.SIGKILL)
        return {"what": f"kill of rank {rank}", "rank": rank, **self._recovered(time.time())}

    def drain(self, notice_s: int, add_node: Callable[[], Any]) -> dict[str, Any]:
        """Tell Ray that rank 1's node goes away; there is another one."""
        import ray

        from jobs.striking import drain

        add_node()
        self._steady()
        node = [event for event in self._events() if event["event"] == "function" and event["rank"] == 1][-1]["node"]
        told_s = time.time()
        drain(ray.get_runtime_context().gcs_address, node, within_s=notice_s)
        return {"what": f"notice of {notice_s} s", **self._recovered(told_s)}

    def goodput(self, for_s: float, every_s: float, ranks: list[int]) -> dict[str, Any]:
        """Steps that were new, while every so often a rank dies, in turn. The first kill is at once."""
        self._steady()
        begin_s, first = time.time(), self._newest(self._events())
        kills = 0
        while (now_s := time.time()) < begin_s + for_s:
            if now_s >= begin_s + kills * every_s:
                pids = {event["rank"]: event["pid"] for event in self._events() if event["event"] == "function"}
                with contextlib.suppress(ProcessLookupError):  # it is just being started again
                    os.kill(pids[ranks[kills % len(ranks)]], signal.SIGKILL)
                kills += 1
            if self._errors:
                raise self._errors[0]
            time.sleep(POLL_S)
        done = self._newest(self._events()) - first
        self._steady(settle_s=0.0)
        return {"what": f"a kill every {every_s:.0f} s", "kills": kills, "steps_per_minute": 60 * done / for_s}

    def _newest(self, events: list[Event]) -> int:
        return max(event["step"] for event in events if event["event"] == "step")

    def _recovered(self, told_s: float) -> dict[str, Any]:
        """Wait for the first new step of a start after this one."""
        old = {event["pid"] for event in self._events()}

        def come(events: list[Event]) -> list[Event]:
            newest = self._newest([event for event in events if event["pid"] in old])
            return [e for e in events if e["pid"] not in old and e["event"] == "step" and e["step"] > newest]

        new = self._wait(come, "new step")[0]
        events = self._events()
        before = [event for event in events if event["pid"] in old and event["event"] == "step"]
        fresh = [event for event in events if event["pid"] not in old]
        first = next(event["step"] for event in fresh if event["event"] == "step")
        phases = {name: max(self._firsts(fresh, name)) - told_s for name in PHASES}
        return {
            "to_function_s": fresh[0]["t"] - told_s,
            "to_new_step_s": new["t"] - told_s,
            "gap_s": new["t"] - before[-1]["t"],
            "repeated_steps": max(0, self._newest(before) + 1 - first),  # an interrupted loop doesn't tell of its last step
            "phases": phases,
        }

    def _firsts(self, events: list[Event], name: str) -> list[float]:
        """When each rank reached it."""
        found: dict[int, float] = {}
        for event in events:
            if event["event"] == name:
                found.setdefault(event["rank"], event["t"])
        return list(found.values())


if __name__ == "__main__":
    sys.exit(main())
