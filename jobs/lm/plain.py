"""The same training with neither Ray nor raystate: what a run that was killed is compared with.

    python -m jobs.lm.plain --config configs/lm_cpu.yaml --storage DIRECTORY --address HOST:PORT --rank RANK

One process of `ray.num_workers`, each started with `jobs.train_lm.worker_env`. Only the last step is kept, by Orbax alone.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jobs.lm.config import load
from jobs.lm.train import Job


@dataclasses.dataclass(frozen=True)
class Began:
    """What a `Job` reads of a run that begins."""

    state: Any
    step: int = 0
    tier: str = "init"
    metrics: None = None
    custom: None = None


class LastStep:
    """Takes the calls that a `Job` makes of a `raystate.StateManager`, and keeps the step that is forced."""

    def __init__(self, storage: str):
        self._storage = storage
        self._kept: int | None = None

    def restore_or_init(self, init: Any, shardings: Any, **_: Any) -> Began:
        return Began(jax.jit(init, out_shardings=shardings(jax.eval_shape(init)))())

    def save(self, step: int, state: Any, *, force: bool, **_: Any) -> None:
        if force:
            with ocp.training.Checkpointer(self._storage) as checkpointer:
                checkpointer.save_checkpointables(step, {"state": state})
            self._kept = step

    def latest_step(self) -> int | None:
        return self._kept

    def reached_preemption(self, _step: int) -> bool:
        return False

    def wait_until_finished(self) -> None:
        """It is: `save` has waited."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jobs.lm.plain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="as of jobs.train_lm; `state` is left alone")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of jobs.train_lm")
    parser.add_argument("--storage", required=True, metavar="DIRECTORY", help="the last step comes here")
    parser.add_argument("--address", required=True, metavar="HOST:PORT", help="where process 0 listens")
    parser.add_argument("--rank", required=True, type=int, help="this process's")
    args = parser.parse_args()
    config = load(args.config, args.set)
    workers = config.ray.num_workers
    if not isinstance(workers, int):
        parser.error("ray.num_workers should be one number here: nothing is elastic without raystate")
    jax.distributed.initialize(args.address, num_processes=workers, process_id=args.rank)
    Job(config, expected_corpus=None).run(LastStep(args.storage))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
