"""What `fit` gives back: the result of a run, and its restarts as the launcher and the run's Coordinator know them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ray.train import Result

from raystate.actors.launch_context import Restart
from raystate.actors.release import newest_step
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import RaystateError, StepNotFoundError
from raystate.observe.ledger.lines import LoggedRecovery, Noted
from raystate.observe.ledger.reader import read_ledger
from raystate.observe.ledger.untold import untold_recoveries
from raystate.reader import Reader
from raystate.storage import open_storage
from raystate.train.callback import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One restart of the worker group.

    Attributes:
        attempt: the start of a worker group that it led to, counted from 1 in this `fit`; so the first recovery's is 2. The attempts of
            `raystate report` are others: incarnations of the run's Coordinator.
        cause: why the group before ended.
        step: the step that training went on from; None if it isn't known.
        tier: where that step came from: "memory", "peer", "storage", "source", "init"; "" if it isn't known.
        seconds: from noticing the end of the group before to the first new step, to the restore if no step was left to do, or, if
            neither is known, to the training function.
        steps_repeated: completed steps that this group computed again; None if it isn't known.
        interrupted: announced or asked for (a preemption, a growth), not a failure.
        workers: of the worker group that it led to; None if it isn't known.
    """

    attempt: int
    cause: str
    step: int | None = None
    tier: str = ""
    seconds: float | None = None
    steps_repeated: int | None = None
    interrupted: bool = False
    workers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The outcome of a finished run.

    Attributes:
        step: the newest durable step, -1 if there is none.
        path: the run's storage.
        metrics: those of the last `save`; else of the last `ray.train.report` with a checkpoint;
            else of the newest durable step, as of a run that had finished before.
        return_value: what the training function returned on rank 0.
        recoveries: every restart, oldest first.
        lost: steps for which `save` had returned True in this run, and which are not durable, each
            with its reason, by the run's log. Each step in storage is whole.
        ray: Ray Train's own result. Its `checkpoint` and `metrics` are None: the steps are the
            run's, and `raystate.Reader(result.path)` reads them. Ray Train keeps only metrics that
            were reported with a checkpoint. A training function that calls
            `ray.train.report(metrics, checkpoint=…)` itself gets both, and a second copy of the
            state that raystate doesn't look after.
    """

    step: int
    path: str
    metrics: dict[str, Any]
    return_value: Any
    recoveries: tuple[Recovery, ...]
    lost: tuple[str, ...] = ()
    ray: Result = field(repr=False)


def run_result(result: Any, config: StateConfig, lost: tuple[str, ...] = ()) -> RunResult:
    """Of a run that has ended well; `result` is Ray Train's `Result`. `lost`: see `RunResult`."""
    outcome: Outcome = result.return_value
    step, why = outcome.facts.get("step"), "its StateManager's save was never called, or only for step 0"
    if step is None:  # train_fn made no StateManager, or it left no word
        newest = newest_step(config)
        step, why = -1 if newest is None else newest, "it made no StateManager(), or never called save"
    if step < 0:
        logger.warning("train_fn has returned and nothing was saved: %s", why)
    return RunResult(
        step=step,
        path=os.fspath(config.storage),
        metrics=dict(outcome.facts.get("metrics") or result.metrics or _stored_metrics(config)),
        return_value=outcome.value,
        recoveries=recoveries(outcome.restarts, _ledger(config) if outcome.restarts else ()),
        lost=lost,
        ray=result,
    )


def _ledger(config: StateConfig) -> Sequence[Noted]:
    """The lines of the run's Coordinators on its groups and restarts."""
    try:
        return read_ledger(open_storage(config.storage), kinds=("joined", "restored", "sample", "recovery")).lines
    except RaystateError as error:  # as below
        logger.warning("the run's notes of its restarts can't be read: %s", error)
        return ()


def _stored_metrics(config: StateConfig) -> dict[str, Any]:
    try:
        return dict(Reader(config.storage).metadata().metrics)
    except StepNotFoundError:
        return {}
    except RaystateError as error:  # the training is fine: no reason to fail now
        logger.warning("the metrics of the newest step can't be read: %s", error)
        return {}


def recoveries(restarts: Sequence[Restart], lines: Sequence[Noted]) -> tuple[Recovery, ...]:
    """The launcher's restarts joined with what the run's Coordinators have noted of the groups that they led to."""
    noted = {one.what.group: one.what for one in lines if isinstance(one.what, LoggedRecovery) and one.what.group}
    if any(restart.group not in noted for restart in restarts):
        untold = untold_recoveries(lines)
        for restart in restarts:
            if restart.group not in noted and (one := untold.get(restart.group)) is not None:
                noted[restart.group] = replace(one, seconds=one.seconds + (restart.seconds or 0.0))
    return tuple(_joined(restart, noted.get(restart.group)) for restart in restarts)


def _joined(restart: Restart, noted: LoggedRecovery | None) -> Recovery:
    is_settled = noted is not None and bool(noted.tier)
    return Recovery(
        attempt=restart.start,
        cause=noted.cause if noted is not None and noted.cause and not restart.is_known else restart.cause,
        step=noted.step if noted is not None and is_settled else None,
        tier=noted.tier if noted is not None else "",
        seconds=noted.seconds if noted is not None and noted.back else restart.seconds,  # else to the training function
        steps_repeated=noted.steps_repeated if noted is not None and is_settled else None,
        interrupted=restart.interrupted,
        workers=restart.workers,
    )
