"""Training a program: its folder, its run, and what came of it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import raystate
from tests.cluster.training import with_callback
from tests.patience import PATIENCE_S
from tests.processes import REPO, job_environment, xla_flags
from tests.programs.attempt import attempt

STEPS, DIES_AFTER, STOPPED_AFTER, SAVE_EVERY = 16, (6, 10), 13, 4


@dataclasses.dataclass(frozen=True)
class End:
    """What came of a training.

    Attributes:
        digests: by rank, of all leaves of the state.
        begun: by rank, the step that each attempt which got as far as a save began at.
    """

    digests: list[dict[str, str]]
    begun: list[list[int]]


@dataclasses.dataclass(frozen=True)
class Place:
    """One training's folder and run."""

    out: Path
    storage: str
    run: str

    def given(self, program: str, *dies: int, **config: Any) -> dict[str, Any]:
        """For `attempt`. dies: the rank that is killed at each of `DIES_AFTER`; config: for the program."""
        deaths = [{"rank": rank, "step": step} for rank, step in zip(dies, DIES_AFTER, strict=False)]
        return {"program": program, "config": {"steps": STEPS, **config}, "out": str(self.out), "deaths": deaths}

    def end(self, ranks: int) -> End:
        digests = [json.loads((self.out / f"end-{rank}.json").read_text()) for rank in range(ranks)]
        begun = [[int(line) for line in (self.out / f"begun-{rank}").read_text().split()] for rank in range(ranks)]
        return End(digests, begun)


def check(calm: list[dict[str, str]], killed: End, *, deaths: int = len(DIES_AFTER), stopped: bool = False) -> None:
    """Bit-equal to what came undisturbed, and not because an attempt did everything again.

    Args:
        deaths: how often it was killed.
        stopped: SIGTERM came last. It loses no step, but of several ranks perhaps the one whose copies were not all made.
    """
    ((first, *later),) = {tuple(begun) for begun in killed.begun}
    assert first == 0
    if stopped:
        assert STOPPED_AFTER - (len(calm) > 1) <= later.pop() <= STOPPED_AFTER
    assert [0 < begun <= died for begun, died in zip(later, DIES_AFTER[:deaths], strict=True)] == [True] * deaths
    assert later == sorted(set(later))
    assert killed.digests == calm


def run_script(place: Place, address: str, given: dict[str, Any], *, ranks: int, devices: int) -> int:
    """A script, until it ends.

    Args:
        address: of the Ray that it joins.
        ranks: 1 trains in the script's own process; more are workers of `fit`.
        devices: CPU devices of each process that trains.

    Returns:
        Its exit code; negative if a signal ended it.
    """
    state = {"storage": place.storage, "run": place.run, "save_every_steps": SAVE_EVERY}
    environment = {**job_environment(devices), "RAY_ADDRESS": address}
    command = [sys.executable, "-m", "tests.programs.attempt", json.dumps({**given, "state": state, "ranks": ranks})]
    with open(place.out / "log", "ab") as log:
        done = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=REPO, env=environment, timeout=PATIENCE_S, check=False
        )
    return done.returncode


def fit(place: Place, given: dict[str, Any], *, ranks: int, devices: int) -> Any:
    """`raystate.fit`. devices: CPU devices of each process."""
    return raystate.fit(attempt, _config(place), num_workers=ranks, train_loop_config=given, run_config=_run_config(place, devices))


def fit_with_callback(place: Place, given: dict[str, Any], *, ranks: int, devices: int, **more: Any) -> Any:
    """A JaxTrainer with the callback. more: for the trainer."""
    from ray.train import ScalingConfig

    return with_callback(
        attempt,
        _config(place),
        train_loop_config=given,
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=_run_config(place, devices),
        **more,
    )


def _config(place: Place) -> raystate.StateConfig:
    return raystate.StateConfig(storage=place.storage, run=place.run, save_every_steps=SAVE_EVERY)


def _run_config(place: Place, devices: int) -> Any:
    from ray.train import RunConfig

    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla_flags(devices), "PYTHONPATH": str(REPO)}
    return RunConfig(storage_path=str(place.out / "ray"), worker_runtime_env={"env_vars": environment})
