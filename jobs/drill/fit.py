"""One training of the drill: `raystate.fit`, and what its ranks say at the end."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import raystate
from jobs.drill import training
from jobs.drill.cluster import TRAINER
from jobs.drill.plan import RANKS
from jobs.drill.watch import Watch


class Fit:
    """`raystate.fit` in a thread."""

    def __init__(
        self, config: raystate.StateConfig, scribe: str, folder: Path, *, steps: int | None, step_s: float, simulated: bool
    ):
        from ray.train import RunConfig, ScalingConfig
        from ray.train.v2.api.config import LoggingConfig

        each = {"CPU": 1.0, TRAINER: 1.0} if simulated else {"CPU": 1.0}
        self.error: BaseException | None = None
        self.result: Any = None

        def run() -> None:
            try:
                self.result = raystate.fit(
                    training.train,
                    config,
                    train_loop_config={"scribe": scribe, "steps": steps, "step_s": step_s},
                    scaling_config=ScalingConfig(num_workers=RANKS, resources_per_worker=each),
                    run_config=RunConfig(
                        storage_path=str(folder / "ray"),
                        worker_runtime_env={
                            "env_vars": {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
                        },
                        logging_config=LoggingConfig(log_level="ERROR"),
                    ),
                    max_failures=10,
                )
            except BaseException as error:
                self.error = error

        self.thread = threading.Thread(target=run, name="fit", daemon=True)
        self.thread.start()

    def why_ended(self) -> str | None:
        """None while it runs."""
        if self.thread.is_alive():
            return None
        return f"the training ended: {type(self.error).__name__}: {self.error}" if self.error is not None else "the training ended"


def end_of(watch: Watch) -> dict[int, tuple[int, str]]:
    """rank -> (the last step, the digest of its state), of the ranks that have come to the end."""
    return {event["rank"]: (event["step"], event["digest"]) for event in watch.events if event["event"] == "end"}
