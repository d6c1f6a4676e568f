"""The demo: train_lm on a local Ray cluster of several nodes, with a trainer killed by -9 in mid-run.

    python -m jobs.demo [--full] [--gcs] [--svg PATH] [--verbose]

Trains twice. One run is plain JAX in two processes, with neither Ray nor raystate, and is left alone. The other has
raystate, on a Ray of two nodes, and is killed. `--full` submits both with `ray job submit` to a Ray of three nodes,
trains longer, kills a HostActor, too, and shows digests. Exit code 0 if every claim in its tables held.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

from jobs.demo.cluster import NODES, START_TIMEOUT_S, DemoFailed, free_port, local_bucket, local_cluster
from jobs.demo.runs import JOB_TIMEOUT_S, SHORT, WORKERS, Job, Processes, Run, Submission, settings, wait_for
from jobs.demo.view import Struck, View, ends_table, kills_table
from jobs.lm.config import load
from jobs.striking import actors, place_of

MOST_REPEATED = 2  # steps: the snapshot in flight, and one interval
# Of the quick form: its short steps follow each other faster than a busy machine copies them. Fewer than without the copies, which lie
# between durable steps.
MOST_SHORT_REPEATED = 19
REPORT = Path("build", "demo.html")
# Of the steps. Late in the short form: by then processes wait for the restart, and what is left needs no other ones.
KILL_AT, SHORT_KILL_AT, HOST_ACTOR_AT = 0.35, 0.75, 0.7

READ_WITH_ORBAX = """
import hashlib, json, sys
import jax, numpy as np, orbax.checkpoint as ocp
from orbax.checkpoint import v1
with ocp.CheckpointManager(sys.argv[1]) as manager:
    steps = sorted(manager.all_steps())
path = f"{sys.argv[1]}/{steps[-1]}"
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
tree = v1.load(path, jax.tree.map(place, v1.metadata(path).metadata))
found = hashlib.sha256()
for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    found.update(jax.tree_util.keystr(path).encode() + np.asarray(leaf).tobytes())
assert not any(name.split(".")[0] == "raystate" for name in sys.modules)
print(json.dumps({"steps": steps, "sha256": found.hexdigest(), "arrays": len(jax.tree.leaves(tree))}))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    what: str
    pid: int
    at_step: int
    at_s: float
    spares_trainers: bool = False  # the training goes on meanwhile


def kill_trainer(run: Run, rank: int) -> Kill:
    pid = [event["pid"] for event in run.events() if event["rank"] == rank][-1]
    step, now_s = run.newest_step(), time.time()
    os.kill(pid, signal.SIGKILL)
    return Kill(what=f"trainer, rank {rank}", pid=pid, at_step=step, at_s=now_s)


def kill_host_actor(run: Run) -> Kill:
    """The HostActor of one of the nodes: the actors of a run live in the Ray namespace `raystate`."""
    place = next((place_of(name, 20.0) for name in actors() if name.startswith("host-")), None)
    if place is None:
        raise DemoFailed("there is no HostActor to kill: has the run ended already?")
    _, pid = place
    step, now_s = run.newest_step(), time.time()
    os.kill(pid, signal.SIGKILL)
    return Kill(what="HostActor", pid=pid, at_step=step, at_s=now_s, spares_trainers=True)


def what_followed(run: Run, kill: Kill) -> tuple[float, int, int] | None:
    """(seconds from the kill to the next new step, step it went on from, steps repeated); None: there is no new step yet."""
    events = [event for event in run.events() if event["rank"] == 0]
    before = max((event["step"] for event in events if event["t"] <= kill.at_s), default=0)
    # Steps that were finished between the kill and the death's effect on rank 0 count as progress before it.
    old = {event["pid"] for event in events if event["t"] <= kill.at_s}
    reached = max([before, *(event["step"] for event in events if event["pid"] in old)])
    new = [event for event in events if event["t"] > kill.at_s and (kill.spares_trainers or event["pid"] not in old)]
    end = next((event for event in new if event["step"] > (before if kill.spares_trainers else reached)), None)
    if end is None:
        return None
    start = new[0]["step"] - 1
    return end["t"] - kill.at_s, start, 0 if kill.spares_trainers else reached - start


def tier_of(run: Run) -> str:
    """Where the trainer came back from, as the run itself has written it down."""
    batches = sorted((epath.Path(run.storage) / ".raystate" / "events").iterdir())
    lines = [json.loads(line) for path in batches for line in path.read_text().splitlines()]
    return next((one["tier"] for one in lines if one.get("kind") == "recovery" and one["back"]), "?")


class Demo:
    """Runs, and what is said of them, with the seconds since the start."""

    def __init__(self, args: argparse.Namespace, view: View, folder: Path):
        self.args, self.view, self.folder = args, view, folder
        self.steps = args.steps or (load(args.config, []).train.steps if args.full else SHORT["train.steps"])
        self._began_s = time.monotonic()
        self._started: list[tuple[Run, Job]] = []

    def say(self, what: str) -> None:
        self.view.say(f"[dim]{time.monotonic() - self._began_s:4.0f} s[/]  {what}")

    def started(self, run: Run, job: Job) -> Run:
        self._started.append((run, job))
        return run

    def wait(self, condition: Callable[[], Any], what: str) -> None:
        """Until it holds. How far the runs are is told meanwhile, and a run that fails ends it."""

        def look() -> Any:
            for run, _ in self._started:
                self.view.move(run.name, run.newest_step(), self.steps)
            return condition()

        def check() -> None:
            for _, job in self._started:
                job.check()

        wait_for(look, what, JOB_TIMEOUT_S, check)

    def kill(self, run: Run, share: float, kill: Callable[[Run], Kill]) -> Kill:
        """Kill after that share of the steps. Say what was killed, and what followed as soon as it has."""
        self.wait(lambda: run.newest_step() >= self.steps * share, "progress")
        done = kill(run)
        self.say(f"[bold red]kill -9: the {done.what}[/] (process {done.pid}), after step {done.at_step}")
        self.wait(lambda: what_followed(run, done), "new step")
        seconds, start, repeated = what_followed(run, done) or (0.0, 0, 0)
        again = {0: "no step", 1: "1 step"}.get(repeated, f"{repeated} steps")
        how = "the training goes on beside it" if done.spares_trainers else f"back at step {start}"
        self.say(f"[bold green]{how}: the next new step after {seconds:.1f} s[/], {again} repeated")
        return done

    def finish(self, run: Run) -> None:
        self.wait(lambda: run.newest_step() >= self.steps and run.has_ended(), "end of the training")
        next(job for each, job in self._started if each is run).finish()
        self.say(f"{run.name}: all {self.steps} steps")


def short(demo: Demo, stack: contextlib.ExitStack, bucket: str | None) -> tuple[Run, Run, list[Kill]]:
    """(undisturbed, killed, kills) of the form for somebody who watches."""
    from jobs.train_lm import worker_env

    args, folder = demo.args, demo.folder

    def start(run: Run, commands: list[list[str]], env: Mapping[str, str]) -> Run:
        job = Processes(run, commands, env, verbose=args.verbose)
        stack.callback(job.close)
        return demo.started(run, job)

    # Nothing beside Ray's start, which fails when it takes 30 s.
    address = stack.enter_context(local_cluster(jobs=False))
    demo.say("Ray is up: two nodes on this machine")
    calm = Run(name="undisturbed", folder=folder)
    given = [*settings(calm, args), "--storage", calm.storage, "--address", f"127.0.0.1:{free_port()}"]
    ranks = [["jobs.lm.plain", *given, "--rank", str(rank)] for rank in range(WORKERS)]
    start(calm, ranks, worker_env(load(args.config, [f"{key}={value}" for key, value in SHORT.items()]).ray))
    demo.say("undisturbed: plain JAX in two processes, no Ray, no raystate")
    demo.finish(calm)
    rough = Run(name="killed", folder=folder, bucket=bucket)
    start(rough, [["jobs.train_lm", *settings(rough, args)]], {"RAY_ADDRESS": address})
    demo.say("with raystate: the same training, a process on each node")
    kills = [demo.kill(rough, SHORT_KILL_AT, lambda run: kill_trainer(run, 1))]
    demo.finish(rough)
    return calm, rough, kills


def full(demo: Demo, stack: contextlib.ExitStack, bucket: str | None) -> tuple[Run, Run, list[Kill]]:
    """(undisturbed, killed, kills) of the long form."""
    address = stack.enter_context(local_cluster())
    demo.say(f"Ray is up: a head and {NODES} nodes on this machine")
    demo.say(f"Twice: ray job submit -- python -m jobs.train_lm --config {demo.args.config}")
    calm, rough = (Run(name=name, folder=demo.folder, bucket=bucket) for name in ("undisturbed", "killed"))
    demo.started(calm, Submission(address, calm, demo.args))
    demo.finish(calm)
    demo.started(rough, Submission(address, rough, demo.args))
    kills = [demo.kill(rough, KILL_AT, lambda run: kill_trainer(run, 1)), demo.kill(rough, HOST_ACTOR_AT, kill_host_actor)]
    demo.finish(rough)
    return calm, rough, kills


def run_demo(args: argparse.Namespace, view: View) -> None:
    folder = Path(tempfile.mkdtemp(prefix="raystate-demo-"))
    demo = Demo(args, view, folder)
    try:
        with contextlib.ExitStack() as stack:
            bucket = stack.enter_context(local_bucket(demo.say)) if args.gcs else None
            calm, rough, kills = (full if args.full else short)(demo, stack, bucket)
            show(view, calm, rough, kills, full=args.full)
            view.say()
            demo.say(f"everything held; the story of the run that was killed: {REPORT}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show(view: View, calm: Run, rough: Run, kills: list[Kill], *, full: bool) -> None:
    """Print the tables and check every claim in them."""
    problems: list[str] = []
    struck: list[Struck] = []
    for kill in kills:
        followed = what_followed(rough, kill)
        if followed is None:
            raise DemoFailed(f"no new step came after the {kill.what} was killed")
        seconds, start, repeated = followed
        tier = "not needed" if kill.spares_trainers else tier_of(rough)
        struck.append((kill.what, kill.at_step, tier, start, seconds, repeated))
        if not kill.spares_trainers and tier != "memory":
            problems.append(f"the {kill.what} came back from {tier}, not from memory")
        if repeated > (MOST_REPEATED if full else MOST_SHORT_REPEATED):
            problems.append(f"{repeated} steps were repeated after the {kill.what} was killed")
    view.say(kills_table(struck))

    calm_end, rough_end = calm.digests(), rough.digests()
    with ThreadPoolExecutor() as pool:
        report = pool.submit(write_report, rough)
        calm_disk, rough_disk = pool.map(read_with_orbax, (calm, rough))
        report.result()
    loss = "final loss" if full else f"final loss, {float.fromhex(calm_end[0]['loss_hex']):.6f} nats per byte"
    rows = [(loss, calm_end[0]["loss_hex"], rough_end[0]["loss_hex"])]
    for a, b in zip(calm_end, rough_end, strict=True):
        rows.append((f"state and iterator, rank {a['rank']}", a["sha256"][:16], b["sha256"][:16]))
    if full:  # the plain run of the short form keeps its last step only
        rows.append(("steps on disk (stock Orbax)", str(calm_disk["steps"]), str(rough_disk["steps"])))
    rows.append(("newest step (stock Orbax)", calm_disk["sha256"][:16], rough_disk["sha256"][:16]))
    problems += [f"{name}: {a} and {b} differ" for name, a, b in rows if a != b]
    view.say(ends_table(rows, full=full))
    left = [path.name for path in Path("/dev/shm").glob("raystate-*/raystate-*") if _is_ours(path, rough, calm)]
    if left:
        problems.append(f"left in shared memory: {left}")
    if problems:
        raise DemoFailed("; ".join(problems))


def write_report(run: Run) -> None:
    """The run's story on one page, and its numbers beside it: `raystate report`."""
    REPORT.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "raystate", "report", run.storage, "-o", str(REPORT), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if done.returncode:
        raise DemoFailed(f"raystate report failed:\n{done.stderr[-2000:]}")
    REPORT.with_suffix(".json").write_text(done.stdout)


def _is_ours(path: Path, *runs: Run) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((path / "meta.json").read_text())["storage"].endswith(tuple(run.storage for run in runs))
    return False


def read_with_orbax(run: Run) -> dict[str, Any]:
    """The steps on disk and the newest one's content, read by stock Orbax in a process without raystate."""
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_ORBAX, run.storage],
        capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=run.folder,
    )  # fmt: skip
    if done.returncode:
        raise DemoFailed(f"stock Orbax could not read {run.storage}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=None, help="configs/lm_cpu.yaml, with --gcs configs/lm_gcs.yaml")
    parser.add_argument("--gcs", action="store_true", help="keep the runs in a bucket of a GCS server on this machine")
    parser.add_argument("--full", action="store_true", help="longer, with a second kill, and digests in the tables")
    parser.add_argument("--steps", type=int, default=None, help="instead of the config's")
    parser.add_argument("--svg", type=Path, default=None, metavar="PATH", help="a picture of what was printed, and a dark one")
    parser.add_argument("--verbose", action="store_true", help="show the end of the jobs' logs")
    args = parser.parse_args()
    args.config = args.config or ("configs/lm_gcs.yaml" if args.gcs else "configs/lm_cpu.yaml")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    view = View()
    try:
        run_demo(args, view)
    except DemoFailed as error:
        view.say(f"[bold red]It did not hold:[/] {error}")
        return 1
    except KeyboardInterrupt:
        view.say("Interrupted. Nothing is left behind.")
        return 130
    finally:
        if args.svg:
            view.save_svg(args.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
