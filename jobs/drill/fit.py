"""The drill's trainings: `raystate.fit`, and what their ranks say."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import raystate
from jobs.drill import training
from jobs.drill.cluster import TRAINER
from jobs.drill.plan import FEWEST, RANKS
from jobs.drill.watch import TooLate, Watch, new_scribe

GROW_S = 2.0  # from a start to a growth, and so long there must have been room


class Fit:
    """`raystate.fit` in a thread.

    Args:
        loop: what the training function is given.
        elastic: it may have from FEWEST to RANKS workers, and is to have RANKS.
        simulated: the cluster is the drill's own, which keeps trainers off its head.
    """

    def __init__(self, config: raystate.StateConfig, loop: dict[str, Any], folder: Path, *, elastic: bool, simulated: bool):
        from ray.train import RunConfig, ScalingConfig
        from ray.train.v2.api.config import LoggingConfig

        each = {"CPU": 1.0, TRAINER: 1.0} if simulated else {"CPU": 1.0}
        workers = (FEWEST, RANKS) if elastic else RANKS
        self.error: BaseException | None = None
        self.result: Any = None
        self.took_s = 0.0  # from its call to its return

        def run() -> None:
            began_s = time.monotonic()
            try:
                self.result = raystate.fit(
                    training.train,
                    config,
                    train_loop_config=loop,
                    scaling_config=ScalingConfig(
                        num_workers=workers, resources_per_worker=each, elastic_resize_monitor_interval_s=GROW_S
                    ),
                    run_config=RunConfig(
                        storage_path=str(folder / "ray"),
                        worker_runtime_env={
                            "env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
                        },
                        logging_config=LoggingConfig(log_level="ERROR"),
                    ),
                    max_failures=10,
                    global_batch=training.ROWS if elastic else None,
                )
            except BaseException as error:
                self.error = error
            self.took_s = time.monotonic() - began_s

        self.thread = threading.Thread(target=run, name="fit", daemon=True)
        self.thread.start()

    def why_ended(self) -> str | None:
        """None while it runs."""
        if self.thread.is_alive():
            return None
        return f"the training ended: {type(self.error).__name__}: {self.error}" if self.error is not None else "the training ended"


class Trainings:
    """Starts them on these machines, one after the other.

    Args:
        folder: for Ray Train's own files.
        tag: of this drill's names.
        elastic: the one that is struck may have fewer workers.

    Attributes:
        scribe: of the newest one.
    """

    def __init__(self, machines: Any, folder: Path, tag: str, *, elastic: bool):
        self.elastic = elastic
        self._machines = machines
        self._folder = folder
        self._tag = tag
        self.scribe: Any = None

    def struck(self, config: raystate.StateConfig, *, step_s: float) -> tuple[Watch, Fit]:
        """Until the scribe says where to end."""
        loop = {"steps": None, "step_s": step_s, "tells": True}
        return self._begin(config, loop, elastic=self.elastic)

    def calm(self, name: str, steps: int, timeout_s: float) -> Watch:
        """One that nobody disturbs, to its end.

        Raises:
            TooLate: it failed, or took too long.
        """
        storage = f"{str(self._machines.storage).rstrip('/')}-{name}"
        config = raystate.StateConfig(
            storage=storage,
            run=f"{name}-{self._tag}",
            save_every_steps=200,
            snapshot_every_steps=0,
            host_memory="256MiB",
        )
        watch, fit = self._begin(config, {"steps": steps, "step_s": 0.0, "tells": self.elastic}, elastic=False)
        through(watch, fit, timeout_s)
        return watch

    def _begin(self, config: raystate.StateConfig, loop: dict[str, Any], *, elastic: bool) -> tuple[Watch, Fit]:
        name = f"scribe-{config.run}"
        self.scribe = new_scribe(name)
        folder = self._folder / config.run
        fit = Fit(config, {"scribe": name, **loop}, folder, elastic=elastic, simulated=self._machines.simulated)
        return Watch(self.scribe, tolerance=training.TOLERANCE if self.elastic else 0.0), fit


def through(watch: Watch, fit: Fit, timeout_s: float) -> tuple[str, ...]:
    """Wait for the end of a training. Gives the promised steps that it says are not durable, and why, although it has come to its end.

    Raises:
        TooLate: it failed, or took too long.
    """
    end_s = time.monotonic() + timeout_s
    while fit.thread.is_alive():
        if time.monotonic() > end_s:
            raise TooLate(f"the training did not end; its newest step is {watch.newest}")
        fit.thread.join(0.1)
    watch.look()
    if fit.error is not None:
        raise TooLate(f"the training failed: {type(fit.error).__name__}: {fit.error}")
    return fit.result.lost
