"""Running the toy under `fit` while a test kills things."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import raystate
from jobs.striking import kill_family
from tests.cluster import toy
from tests.patience import PATIENCE_S
from tests.processes import xla_flags

REPO = Path(__file__).parents[2]
NODES = 3
NODE = {"num_cpus": 2, "resources": {"trainer": 1}, "object_store_memory": 100 << 20}  # of the simulated nodes
STEPS = 90  # of the runs that are compared with the undisturbed one
SAVES_EVERY = 5  # steps between the durable saves of a `Driver`
POLL_S = 0.02

pausing: list[Training] = []  # of the test that runs: at its end nothing waits for it any more


@dataclasses.dataclass
class Events:
    """What the toy's trainers have written so far."""

    folder: Path

    def read(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for path in self.folder.glob("events-*.jsonl"):
            for line in path.read_text().splitlines():
                try:
                    found.append(json.loads(line))
                except json.JSONDecodeError:  # a killed trainer's last line may be half written
                    continue
        return sorted(found, key=lambda event: event["t"])

    def newest_step(self) -> int:
        return max((event["step"] for event in self.read() if event["event"] == "step"), default=-1)

    def pids(self) -> dict[int, int]:
        """rank -> pid of the newest start."""
        return {event["rank"]: event["pid"] for event in self.read() if event["event"] == "start"}

    def newest_start(self) -> dict[str, Any]:
        return [event for event in self.read() if event["event"] == "start"][-1]

    def starts(self) -> int:
        return sum(event["event"] == "start" and event["rank"] == 0 for event in self.read())


def wait_for(
    condition: Callable[[], Any], what: str, timeout_s: float = PATIENCE_S, failed: Callable[[], Any] = lambda: None
) -> Any:
    """Poll until `condition` is true; fail naming `what` at the deadline, or with what `failed` says."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        result = condition()
        if result:
            return result
        problem = failed()
        assert problem is None, f"while waiting for {what}: {problem!r}"
        assert time.monotonic() < deadline_s, f"no {what} within {timeout_s:.0f} s"
        time.sleep(POLL_S)


class Training:
    """`fit` in a thread, so that the test can kill things meanwhile.

    Args:
        pause_at: the toy pauses at this step, so that it doesn't end before a busy machine has let the test do its part; the test's
            `wait_step` and `go_on` let it go further, and `finish` to its end. None: it doesn't wait for the test.
    """

    def __init__(self, config: Any, out: Path, *, pause_at: int | None = None, **kwargs: Any):
        out.mkdir(parents=True, exist_ok=True)
        self.events = Events(out)
        if config.snapshot_every_steps is None:
            config = config.replace(snapshot_every_steps=1)  # what a loss costs is exact then
        self.config = config
        self.result: Any = None
        self.error: BaseException | None = None
        self._begin(kwargs.pop("steps", 40), pause_at)
        loop = {
            "out": str(out),
            "steps": self._steps,
            "step_s": kwargs.pop("step_s", 0.2),
            "width": kwargs.pop("width", 32),
        }
        loop["hang_at"] = kwargs.pop("hang_at", None)
        train_fn = kwargs.pop("train_fn", toy.train)
        launch = kwargs.pop("launch", raystate.fit)  # or what takes the same
        devices = kwargs.pop("devices", 2)
        scaling_config = kwargs.pop("scaling_config", None) or scaling(kwargs.pop("num_workers", 2))

        def run() -> None:
            try:
                self.result = launch(
                    train_fn,
                    config,
                    train_loop_config=loop,
                    scaling_config=scaling_config,
                    run_config=quiet_run_config(out, devices),
                    **kwargs,
                )
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="fit", daemon=True)
        self.thread.start()

    def _begin(self, steps: int, pause_at: int | None) -> None:
        self._steps = steps
        self._pause = None
        if pause_at is not None:
            self._pause_at(pause_at)
            pausing.append(self)

    def _pause_at(self, step: int) -> None:
        self._pause = step
        new = self.events.folder / f"{toy.PAUSE}.new"
        new.write_text(str(step))
        new.replace(self.events.folder / toy.PAUSE)

    def go_to_end(self) -> None:
        """Pause no more."""
        self._pause_at(self._steps)

    def go_on(self, steps: int) -> None:
        """Let a training that pauses make so many more steps."""
        if self._pause is not None:
            self._pause_at(max(self._pause, self.events.newest_step() + steps))

    def wait_step(self, step: int) -> None:
        assert step <= self._steps, f"the training ends at {self._steps}: it was too fast for this test, which has to make it pause"
        if self._pause is not None and step > self._pause:
            self._pause_at(step)
        wait_for(lambda: self.events.newest_step() >= step, f"step {step}", failed=lambda: self._why_never(step))

    def _why_never(self, step: int) -> object:
        ended = self.has_ended and self.events.newest_step() < step
        return self.error or ("the training has ended" if ended else None)

    @property
    def has_ended(self) -> bool:
        return not self.thread.is_alive()

    def kill_trainer(self, rank: int) -> tuple[int, float]:
        """SIGKILL that rank's newest process; (newest step before, wall time)."""
        before = self.events.newest_step()
        now = time.time()
        os.kill(self.events.pids()[rank], signal.SIGKILL)
        return before, now

    def finish(self, timeout_s: float = PATIENCE_S) -> Any:
        self.go_to_end()
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), f"fit did not end within {timeout_s:.0f} s; newest step {self.events.newest_step()}"
        if self.error is not None:
            raise self.error
        return self.result

    def digests(self) -> list[str]:
        """Of the final state, by rank."""
        ends = {event["rank"]: event["digest"] for event in self.events.read() if event["event"] == "end"}
        return [ends[rank] for rank in sorted(ends)]


def scaling(num_workers: int) -> Any:
    from ray.train import ScalingConfig

    return ScalingConfig(num_workers=num_workers, resources_per_worker={"CPU": 1, "trainer": 1})


def quiet_run_config(out: Path, devices: int) -> Any:
    from ray.train import RunConfig

    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices)}
    return RunConfig(storage_path=str(out / "ray"), worker_runtime_env={"env_vars": environment})


def with_callback(train_fn: Any, config: Any, *, run_config: Any, global_batch: int | None = None, **given: Any) -> Any:
    """As `raystate.fit`, with a JaxTrainer of one's own, as README shows it."""
    from ray.train import FailureConfig
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    run_config.callbacks = [raystate.RayTrainCallback(config, global_batch=global_batch)]
    run_config.failure_config = FailureConfig(max_failures=-1)
    return JaxTrainer(train_fn, jax_config=JaxConfig(use_gpu=True), run_config=run_config, **given).fit()


class Driver(Training):
    """`fit` in a driver process of its own, on a running cluster."""

    def __init__(
        self,
        run: Any,
        out: Path,
        *,
        address: str,
        steps: int,
        step_s: float = 0.2,
        pause_at: int | None = None,
        **settings: Any,
    ):
        out.mkdir(parents=True, exist_ok=True)
        self.events = Events(out)
        self._begin(steps, pause_at)
        self.config = run
        self.out = out
        given = {
            "address": address,
            "storage": run.storage,
            "run": run.run,
            "out": str(out),
            "steps": steps,
            "step_s": step_s,
            "settings": settings,
        }
        (out / "given.json").write_text(json.dumps(given))
        self._log = open(out / "driver.log", "a")  # noqa: SIM115 - ends with the process
        command = [sys.executable, "-m", "tests.cluster.drive", str(out / "given.json")]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))}
        self.process = subprocess.Popen(command, cwd=REPO, env=environment, stdout=self._log, stderr=subprocess.STDOUT)

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def error(self) -> BaseException | None:
        code = self.process.poll()
        return None if code in (None, 0) else RuntimeError(f"exit code {code}: {(self.out / 'driver.log').read_text()[-2000:]}")

    def kill(self) -> None:
        """SIGKILL the driver and what it has started. Nothing if it has ended."""
        if self.process.poll() is not None:
            return
        kill_family(self.process.pid)

    def finish(self, timeout_s: float = PATIENCE_S) -> Any:
        self.go_to_end()
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(
                f"the driver did not end within {timeout_s:.0f} s; newest step {self.events.newest_step()}"
            ) from None
        if self.error is not None:
            raise self.error
        return json.loads((self.out / "result.json").read_text())
