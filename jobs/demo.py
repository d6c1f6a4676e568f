"""The demo: train_lm on a local Ray cluster of several nodes, with a trainer and a HostActor killed by -9 in mid-run.

    python -m jobs.demo [--config configs/lm_cpu.yaml] [--steps N] [--verbose]

Runs the job twice with `ray job submit`: once undisturbed, once with the kills. Exit code 0 if every claim in its tables held.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tenacity
from etils import epath
from rich.console import Console
from rich.table import Table

WORKERS = 2
NODES = 2  # beside the head, which runs no trainer
START_TIMEOUT_S = 180.0  # two minutes of a machine that does much else
JOB_TIMEOUT_S = 900.0  # a machine that does much else takes three minutes for one
POLL_S = 0.05
CHECK_S = 5.0
ARRAYS = "state"
BUCKET = "demo"
LOG_WIDTH = 80  # characters, where the output is no terminal that has a width
LAST_EXPORT = "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"

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


class DemoFailed(Exception):  # noqa: N818 - the demo's own verdict, shown to a person
    """Something did not hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    what: str
    pid: int
    at_step: int
    at_s: float


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

    def digests(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{self.name}.digest.{rank}").read_text()) for rank in range(WORKERS)]


@contextlib.contextmanager
def local_bucket(console: Console) -> Iterator[str]:
    """A strict GCS server on this machine, which all that is started meanwhile uses; yields the name of a bucket."""
    command = [sys.executable, "-m", "raystate.testing.gcs", "--port", "0", "--bucket", BUCKET]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            exports = (re.match(r"\s*export (\w+)=(\S+)", line) for line in iter(server.stdout.readline, ""))
            for name, value in (found.groups() for found in exports if found):
                os.environ[name] = value
                if name == LAST_EXPORT:
                    break
            else:
                raise DemoFailed("the local GCS server did not start")
            console.print(f"A GCS server is up on this machine: {os.environ['STORAGE_EMULATOR_HOST']}, bucket {BUCKET}.")
            yield BUCKET
        finally:
            server.send_signal(signal.SIGINT)


@contextlib.contextmanager
def local_cluster() -> Iterator[str]:
    """Three Ray nodes on this machine, ended with all their processes at the end; yields the dashboard's address."""
    import ray
    from ray.cluster_utils import Cluster

    port = _free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2, "include_dashboard": True, "dashboard_port": port, "object_store_memory": 100 << 20,
            "dashboard_agent_listen_port": _free_port(),  # takes the jobs; by itself it has the same one in each Ray
        },
    )  # fmt: skip
    try:
        for _ in range(NODES):
            cluster.add_node(num_cpus=2, resources={"trainer": 1}, object_store_memory=100 << 20)
        ray.init(address=cluster.address, namespace="demo", log_to_driver=False, logging_level=logging.ERROR)
        cluster.wait_for_nodes()
        yield f"http://127.0.0.1:{port}"
    finally:
        ray.shutdown()
        cluster.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def submit(client: Any, entrypoint: str) -> str:
    """Submit a job. A cluster that has just started takes none until its dashboard's agent answers.

    Args:
        client: a JobSubmissionClient.

    Returns:
        The job's submission id.

    Raises:
        DemoFailed: it never takes one.
    """
    no_agent_yet = tenacity.retry_if_exception(lambda error: "No available agent" in str(error))
    retrying = tenacity.Retrying(
        retry=no_agent_yet, wait=tenacity.wait_fixed(0.5), stop=tenacity.stop_after_delay(START_TIMEOUT_S), reraise=True
    )
    try:
        return retrying(client.submit_job, entrypoint=entrypoint, runtime_env={"working_dir": None})
    except RuntimeError as error:
        raise DemoFailed(f"Ray takes no job: {error}") from error


class Submission:
    """`ray job submit -- python -m jobs.train_lm …`, and what comes of it."""

    def __init__(self, address: str, run: Run, config: str, steps: int | None, verbose: bool):
        from ray.job_submission import JobSubmissionClient

        overrides = {
            "state.storage": run.storage,
            "state.run": f"demo-{run.name}-{os.getpid()}",
            "train.events": run.folder / f"{run.name}.jsonl",
            "train.digest_out": run.folder / f"{run.name}.digest",
            "ray.scaling": json.dumps({"resources_per_worker": {"CPU": 1, "trainer": 1}}),
        }
        if steps is not None:
            overrides["train.steps"] = steps
        sets = " ".join(f"--set '{key}={value}'" for key, value in overrides.items())
        self._client = JobSubmissionClient(address)
        self._verbose = verbose
        self.id = submit(self._client, f"{sys.executable} -m jobs.train_lm --config {config} {sets}")

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
        _wait(lambda: self.status() in ("SUCCEEDED", "FAILED", "STOPPED"), "the end of the job", JOB_TIMEOUT_S)
        self.check()
        if self._verbose:
            print(self.tail(100))


def _wait(condition: Callable[[], Any], what: str, timeout_s: float, check: Callable[[], None] = lambda: None) -> None:
    begin_s = checked_s = time.monotonic()
    while not condition():
        now_s = time.monotonic()
        if now_s - checked_s > CHECK_S:  # asking the cluster takes much longer than looking at a file
            check()
            checked_s = now_s
        if now_s - begin_s > timeout_s:
            raise DemoFailed(f"no {what} within {timeout_s:.0f} s")
        time.sleep(POLL_S)


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
    return Kill(what="HostActor", pid=pid, at_step=step, at_s=now_s)


def what_followed(run: Run, kill: Kill) -> tuple[float, int, int]:
    """(seconds from the kill to the next new step, step it went on from, steps repeated)."""
    events = [event for event in run.events() if event["rank"] == 0]
    before = max((event["step"] for event in events if event["t"] <= kill.at_s), default=0)
    # Steps that were finished between the kill and the death's effect on rank 0 count as progress before it.
    old = {event["pid"] for event in events if event["t"] <= kill.at_s}
    reached = max([before, *(event["step"] for event in events if event["pid"] in old)])
    new = [event for event in events if event["t"] > kill.at_s and event["pid"] not in old]
    if not new:  # nobody was restarted
        following = [event for event in events if event["t"] > kill.at_s]
        return following[0]["t"] - kill.at_s, following[0]["step"] - 1, 0
    end = next(event for event in new if event["step"] > reached)
    return end["t"] - kill.at_s, new[0]["step"] - 1, reached - (new[0]["step"] - 1)


def demo(args: argparse.Namespace, console: Console) -> None:
    folder = Path(tempfile.mkdtemp(prefix="raystate-demo-"))
    try:
        began_s = time.monotonic()
        with contextlib.ExitStack() as stack:
            bucket = stack.enter_context(local_bucket(console)) if args.gcs else None
            address = stack.enter_context(local_cluster())
            console.print(f"Ray is up: a head and {NODES} nodes on this machine.")
            calm = Run(name="undisturbed", folder=folder, bucket=bucket)
            console.print(f"1. ray job submit -- python -m jobs.train_lm --config {args.config}   (undisturbed)")
            Submission(address, calm, args.config, args.steps, args.verbose).finish()
            steps = calm.newest_step()
            console.print(f"   finished at step {steps}")
            console.print("2. the same again, with kill -9:")
            rough = Run(name="disturbed", folder=folder, bucket=bucket)
            job = Submission(address, rough, args.config, args.steps, args.verbose)
            kills = []
            for share, kill in ((0.35, lambda: kill_trainer(rough, 1)), (0.7, lambda: kill_host_actor(rough))):
                _wait(lambda at=int(steps * share): rough.newest_step() >= at, "progress", JOB_TIMEOUT_S, job.check)
                kills.append(kill())
                console.print(f"   killed the {kills[-1].what} (pid {kills[-1].pid}) after step {kills[-1].at_step}")
            job.finish()
            show(console, calm, rough, kills, began_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def plain_table(title: str) -> Table:
    """Readable in a log, too."""
    return Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 1))


# (what was killed, after which step, the tier it came back from, at which step, seconds to the next new step, steps repeated)
Struck = tuple[str, int, str, int, float, int]


def kills_table(struck: list[Struck]) -> Table:
    """What was killed and what followed. At most 80 characters wide, as the other one."""
    table = plain_table("kill -9 in mid-run")
    for column in ("killed", "after step", "came back from", "at step", "next new step", "repeated"):
        table.add_column(column, justify="left" if column in ("killed", "came back from") else "right", no_wrap=True)
    for what, at_step, tier, start, seconds, repeated in struck:
        table.add_row(what, str(at_step), tier, str(start), f"{seconds:.1f} s", str(repeated))
    return table


def ends_table(rows: list[tuple[str, str, str]]) -> Table:
    """(what, undisturbed, killed twice) of what the two runs have come to."""
    table = plain_table("the end of the run")
    for column in ("", "undisturbed", "killed twice", "equal"):
        table.add_column(column, no_wrap=True)
    for name, a, b in rows:
        table.add_row(name, a, b, "yes" if a == b else "NO")
    return table


def show(console: Console, calm: Run, rough: Run, kills: list[Kill], began_s: float) -> None:
    """Print the tables and check every claim in them."""
    events = sorted((epath.Path(rough.storage) / ".raystate" / "events").iterdir())
    recoveries = [json.loads(path.read_text()) for path in events]
    tiers = iter(recovery["tier"] for recovery in recoveries if recovery.get("kind") == "recovery" and recovery["back"])
    problems: list[str] = []
    struck: list[Struck] = []
    for kill in kills:
        seconds, start, repeated = what_followed(rough, kill)
        restarted = kill.what.startswith("trainer")
        tier = next(tiers, "?") if restarted else "not needed"
        struck.append((kill.what, kill.at_step, tier, start, seconds, repeated))
        if restarted and tier != "memory":
            problems.append(f"the {kill.what} came back from {tier}, not from memory")
        if repeated > 1:
            problems.append(f"{repeated} steps were repeated after the {kill.what} was killed")
    console.print(kills_table(struck))

    calm_end, rough_end = calm.digests(), rough.digests()
    rows = [("final loss", calm_end[0]["loss_hex"], rough_end[0]["loss_hex"])]
    for a, b in zip(calm_end, rough_end, strict=True):
        rows.append((f"state and iterator, rank {a['rank']}", a["sha256"][:16], b["sha256"][:16]))
    calm_disk, rough_disk = read_with_orbax(calm), read_with_orbax(rough)
    rows.append(("steps on disk (stock Orbax)", str(calm_disk["steps"]), str(rough_disk["steps"])))
    rows.append(("newest step (stock Orbax)", calm_disk["sha256"][:16], rough_disk["sha256"][:16]))
    problems += [f"{name}: {a} and {b} differ" for name, a, b in rows if a != b]
    console.print(ends_table(rows))
    left = [path.name for path in Path("/dev/shm").glob("raystate-*/raystate-*") if _is_ours(path, rough, calm)]
    if left:
        problems.append(f"left in shared memory: {left}")
    console.print(f"{time.monotonic() - began_s:.0f} s in all.")
    if problems:
        raise DemoFailed("; ".join(problems))
    console.print("Everything held.")


def _is_ours(path: Path, *runs: Run) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return json.loads((path / "meta.json").read_text())["storage"].endswith(tuple(run.storage for run in runs))
    return False


def read_with_orbax(run: Run) -> dict[str, Any]:
    """The steps on disk and the newest one's content, read by stock Orbax in a process without raystate."""
    done = subprocess.run(
        [sys.executable, "-c", READ_WITH_ORBAX, run.storage],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"}, cwd=run.folder,
    )  # fmt: skip
    if done.returncode:
        raise DemoFailed(f"stock Orbax could not read {run.storage}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=None, help="configs/lm_cpu.yaml, with --gcs configs/lm_gcs.yaml")
    parser.add_argument("--gcs", action="store_true", help="keep the runs in a bucket of a GCS server on this machine")
    parser.add_argument("--steps", type=int, default=None, help="instead of the config's")
    parser.add_argument("--verbose", action="store_true", help="show the end of the jobs' logs")
    args = parser.parse_args()
    args.config = args.config or ("configs/lm_gcs.yaml" if args.gcs else "configs/lm_cpu.yaml")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    console = Console()
    if not console.is_terminal:
        console.width = LOG_WIDTH
    try:
        demo(args, console)
    except DemoFailed as error:
        console.print(f"[bold red]It did not hold:[/] {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
