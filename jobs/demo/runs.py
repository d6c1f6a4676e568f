"""The demo's two runs: their settings, how they are started, and what they have come to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from jobs.demo.cluster import DemoFailed, submit

WORKERS = 2
JOB_TIMEOUT_S = 900.0  # a machine that does much else takes three minutes for one
POLL_S = 0.1
CHECK_S = 5.0
# Of --config, for a demo that ends while somebody watches: less to compute, and nothing beside the training.
SHORT = {
    "data.max_bytes": 1 << 20,
    "model.d_model": 64,
    "model.n_layers": 1,
    "model.d_ff": 128,
    "model.ngram": 2,
    "state.save_every_steps": 20,
    "train.steps": 80,
    "train.batch_size": 8,
    "train.mesh.model": 1,
    "train.log_every_steps": 20,
    "train.eval_every_steps": 0,
    "train.eval_bytes": 4096,
    "train.sample_bytes": 0,
    "ray.devices_per_worker": 1,
    # So few and so small steps are done sooner by a slow program.
    "ray.env": json.dumps({"XLA_FLAGS": "--xla_backend_optimization_level=0"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One submission: where it keeps things, and its events so far."""

    name: str
    folder: Path
    bucket: str | None = None  # instead of a directory

    @property
    def storage(self) -> str:
        return f"gs://{self.bucket}/{self.name}" if self.bucket else str(self.folder / self.name)

    def events(self, newest: int = 0) -> list[dict[str, Any]]:
        """All of them, or the newest few, in the order of their times."""
        path = self.folder / f"{self.name}.jsonl"
        lines = path.read_text().splitlines()[-newest:] if path.exists() else []
        return sorted((json.loads(line) for line in lines), key=lambda event: event["t"])

    def newest_step(self) -> int:
        return max((event["step"] for event in self.events(2 * WORKERS)), default=0)

    def has_ended(self) -> bool:
        return all((self.folder / f"{self.name}.digest.{rank}").exists() for rank in range(WORKERS))

    def digests(self) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"{self.name}.digest.{rank}").read_text()) for rank in range(WORKERS)]


def settings(run: Run, args: argparse.Namespace) -> list[str]:
    """The arguments of the program that trains."""
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
    return ["--config", args.config, *(word for key, value in overrides.items() for word in ("--set", f"{key}={value}"))]


class Job(Protocol):
    """A training that was started."""

    def check(self) -> None:
        """Raise DemoFailed if it has failed."""
        ...

    def finish(self) -> None:
        """Wait for its end."""
        ...


class Processes:
    """A training that this process has started by itself."""

    def __init__(self, run: Run, commands: list[list[str]], env: Mapping[str, str], *, verbose: bool):
        self._log, self._verbose = run.folder / f"{run.name}.log", verbose
        with self._log.open("w") as log:
            self._processes = [
                subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log, env={**os.environ, **env})
                for command in commands
            ]

    def check(self) -> None:
        if failed := [process.returncode for process in self._processes if process.poll()]:
            raise DemoFailed(f"the training ended with exit code {failed[0]}:\n{self._tail()}")

    def _tail(self, lines: int = 30) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    def finish(self) -> None:
        wait_for(
            lambda: all(process.poll() is not None for process in self._processes), "end of the training", JOB_TIMEOUT_S, self.check
        )
        self.check()
        if self._verbose:
            print(self._tail(100))

    def close(self) -> None:
        """End what is left of it."""
        for process in self._processes:
            process.kill()
            process.wait()


class Submission:
    """`ray job submit -- python -m jobs.train_lm …`, and what comes of it."""

    def __init__(self, address: str, run: Run, args: argparse.Namespace):
        from ray.job_submission import JobSubmissionClient

        self._client = JobSubmissionClient(address)
        self._verbose = args.verbose
        self.id = submit(self._client, shlex.join([sys.executable, "-m", "jobs.train_lm", *settings(run, args)]))

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
        wait_for(lambda: self.status() in ("SUCCEEDED", "FAILED", "STOPPED"), "end of the job", JOB_TIMEOUT_S, poll_s=0.5)
        self.check()
        if self._verbose:
            print(self.tail(100))


def wait_for(
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
