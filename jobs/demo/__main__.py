"""The demo: train_lm on a local Ray cluster of several nodes, with a trainer killed by -9 in mid-run.

    python -m jobs.demo [--full] [--gcs] [--svg PATH] [--verbose]

Runs the job twice with `ray job submit`: once undisturbed, once with the kill. `--full` trains longer, kills a
HostActor, too, and shows digests. Exit code 0 if every claim in its tables held.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from etils import epath

from jobs.demo.cluster import NODES, START_TIMEOUT_S, DemoFailed, local_bucket, local_cluster, submit
from jobs.demo.view import Struck, View, ends_table, kills_table
from jobs.lm.config import load

MOST_REPEATED = 2  # steps: the snapshot in flight, and one interval
MOST_SHORT_REPEATED = 5  # the short steps of the quick form follow each other faster than a busy machine copies them
WORKERS = 2
JOB_TIMEOUT_S = 900.0  # a machine that does much else takes three minutes for one
POLL_S = 0.1
CHECK_S = 5.0
ARRAYS = "state"
REPORT = Path("build", "demo.html")
# Of --config, for a demo that ends while somebody watches: less to compute, and nothing beside the training.
SHORT = {
    "model.n_layers": 1,
    "train.steps": 60,
    "train.batch_size": 16,
    "train.eval_every_steps": 0,
    "train.eval_bytes": 4096,
    "train.sample_bytes": 0,
}

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One submission: where it keeps things, and its events so far."""

    name: str
    folder: Path
    bucket: str | None = None  # instead of a directory

    @property
    def storage(self) -> str:
        return f"gs://{self.bucket}/{self.name}" if self.bucket else str(self.folder / self.name)

    def events(self) -> list[dict[str, Any]]:
        path = self.folder / f"{self.name}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return sorted((json.loads(line) for line in lines), key=lambda event: event["t"])

    def newest_step(self) -> int:
        return max((event["step"] for event in self.events()), default=0)

    def has_ended(self) -> bool:
        return all((self.folder / f"{self.name}.digest.{rank}").exists() for rank in range(WORKERS))

    def digests(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{self.name}.digest.{rank}").read_text()) for rank in range(WORKERS)]


class Submission:
    """`ray job submit -- python -m jobs.train_lm …`, and what comes of it."""

    def __init__(self, address: str, run: Run, args: argparse.Namespace):
        from ray.job_submission import JobSubmissionClient

        overrides = {
            **({} if args.full else SHORT),
            "state.storage": run.storage,
            "state.run": f"demo-{run.name}-{os.getpid()}",
            "train.events": run.folder / f"{run.name}.jsonl",
            "train.digest_out": run.folder / f"{run.name}.digest",
            "ray.scaling": json.dumps({"resources_per_worker": {"CPU": 1, "trainer": 1}}),
        }
        if args.steps is not None:
            overrides["train.steps"] = args.steps
        sets = " ".join(f"--set '{key}={value}'" for key, value in overrides.items())
        self._client = JobSubmissionClient(address)
        self._verbose = args.verbose
        self.id = submit(self._client, f"{sys.executable} -m jobs.train_lm --config {args.config} {sets}")

    def status(self) -> str:
        return str(self._client.get_job_status(self.id))

    def check(self) -> None:
        status = self.status()
        if status in ("FAILED", "STOPPED"):
            why = self._client.get_job_info(self.id).message  # of a job whose driver was lost the log has no reason
            raise DemoFailed(f"the job ended with {status} ({why}):\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        return "\n".join(self._client.get_job_logs(self.id).splitlines()[-lines:])

    def finish(self) -> None:
        _wait(lambda: self.status() in ("SUCCEEDED", "FAILED", "STOPPED"), "end of the job", JOB_TIMEOUT_S, poll_s=0.5)
        self.check()
        if self._verbose:
            print(self.tail(100))


def _wait(
    condition: Callable[[], Any], what: str, timeout_s: float, check: Callable[[], None] = lambda: None, poll_s: float = POLL_S
) -> None:
    begin_s = checked_s = time.monotonic()
    while not condition():
        now_s = time.monotonic()
        if now_s - checked_s > CHECK_S:  # asking the cluster takes much longer than looking at a file
            check()
            checked_s = now_s
        if now_s - begin_s > timeout_s:
            raise DemoFailed(f"no {what} within {timeout_s:.0f} s")
        time.sleep(poll_s)


def kill_trainer(run: Run, rank: int) -> Kill:
    pid = [event["pid"] for event in run.events() if event["rank"] == rank][-1]
    step, now_s = run.newest_step(), time.time()
    os.kill(pid, signal.SIGKILL)
    return Kill(what=f"trainer, rank {rank}", pid=pid, at_step=step, at_s=now_s)


def kill_host_actor(run: Run) -> Kill:
    """The HostActor of one of the nodes: the actors of a run live in the Ray namespace `raystate`."""
    import ray
    from ray.util import list_named_actors

    actors: list[Any] = list_named_actors(all_namespaces=True)  # dicts then, although Ray's type says str
    names = sorted(actor["name"] for actor in actors if actor["namespace"] == "raystate" and actor["name"].startswith("host-"))
    if not names:
        raise DemoFailed("there is no HostActor to kill: has the run ended already?")
    pid: Any = ray.get(ray.get_actor(names[0], namespace="raystate").pid.remote(), timeout=20)
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
    events = sorted((epath.Path(run.storage) / ".raystate" / "events").iterdir())
    recoveries = [json.loads(path.read_text()) for path in events]
    return next((one["tier"] for one in recoveries if one.get("kind") == "recovery" and one["back"]), "?")


def strike(view: View, run: Run, kill: Kill, watch: Callable[[], None], check: Callable[[], None]) -> None:
    """Say what was killed, and what followed as soon as it has."""
    view.say(f"[bold red]kill -9: the {kill.what}[/] (process {kill.pid}), after step {kill.at_step}")

    def followed() -> tuple[float, int, int] | None:
        watch()
        return what_followed(run, kill)

    _wait(followed, "new step", JOB_TIMEOUT_S, check)
    seconds, start, repeated = followed() or (0.0, 0, 0)
    again = {0: "no step", 1: "1 step"}.get(repeated, f"{repeated} steps")
    how = "the training goes on beside it" if kill.spares_trainers else f"back at step {start}"
    view.say(f"[bold green]{how}: the next new step after {seconds:.1f} s[/], {again} repeated")


def demo(args: argparse.Namespace, view: View) -> None:
    folder = Path(tempfile.mkdtemp(prefix="raystate-demo-"))
    began_s = time.monotonic()
    steps = args.steps or (load(args.config, []).train.steps if args.full else SHORT["train.steps"])

    def train(name: str, bucket: str | None, address: str, kills: dict[float, Callable[[Run], Kill]]) -> tuple[Run, list[Kill]]:
        run, done = Run(name=name, folder=folder, bucket=bucket), []
        bar = view.bar(name, steps)
        job = Submission(address, run, args)

        def watch() -> None:
            view.move(bar, run.newest_step())

        def has_reached(step: float) -> bool:
            watch()
            return run.newest_step() >= step

        for share, kill in kills.items():
            _wait(lambda at=steps * share: has_reached(at), "progress", JOB_TIMEOUT_S, job.check)
            done.append(kill(run))
            strike(view, run, done[-1], watch, job.check)
        _wait(lambda: has_reached(steps) and run.has_ended(), "end of the training", JOB_TIMEOUT_S, job.check)
        view.end(bar)
        job.finish()
        view.say(f"{name}: all {steps} steps, {time.monotonic() - began_s:.0f} s since the start of the demo")
        return run, done

    try:
        with contextlib.ExitStack() as stack:
            bucket = stack.enter_context(local_bucket(view.say)) if args.gcs else None
            address = stack.enter_context(local_cluster())
            view.say(f"Ray is up after {time.monotonic() - began_s:.0f} s: a head and {NODES} nodes on this machine.")
            view.say(f"Twice: ray job submit -- python -m jobs.train_lm --config {args.config}")
            calm, _ = train("undisturbed", bucket, address, {})
            kills = {0.35: lambda run: kill_trainer(run, 1), **({0.7: kill_host_actor} if args.full else {})}
            rough, done = train("killed", bucket, address, kills)
            view.stop_bars()
            show(view, calm, rough, done, full=args.full)
            view.say(f"\nEverything held, in {time.monotonic() - began_s:.0f} s. The story of the run that was killed: {REPORT}")
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
    """The run's story on one page: `raystate report`."""
    REPORT.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "raystate", "report", run.storage, "-o", str(REPORT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if done.returncode:
        raise DemoFailed(f"raystate report failed:\n{done.stderr[-2000:]}")


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
    parser.add_argument("--svg", type=Path, default=None, metavar="PATH", help="a picture of what was printed")
    parser.add_argument("--verbose", action="store_true", help="show the end of the jobs' logs")
    args = parser.parse_args()
    args.config = args.config or ("configs/lm_gcs.yaml" if args.gcs else "configs/lm_cpu.yaml")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    view = View()
    try:
        with view:
            demo(args, view)
    except DemoFailed as error:
        view.say(f"[bold red]It did not hold:[/] {error}")
        return 1
    finally:
        if args.svg:
            view.save_svg(args.svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
