"""What `fit` gives back: the result of a run, and its restarts as the launcher and the run's Coordinator know them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any

from ray.train import Result

from raystate.actors.release import newest_step
from raystate.config import StateConfig
from raystate.core.errors import RaystateError, StepNotFoundError
from raystate.launch_context import Restart
from raystate.reader import Reader
from raystate.train.callback import Outcome

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One restart of the worker group.

    Attributes:
        attempt: the worker group that it led to, counted from 1 in this `fit`; so the first recovery's is 2.
        cause: why the group before ended.
        step: the step that training went on from; None if it isn't known.
        tier: where that step came from: "memory", "peer", "storage", "source", "init"; "" if it isn't known.
        seconds: from noticing the end of the group before to the first new step, or, if none is known, to the training function.
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
    """What came out of a finished run.

    Attributes:
        step: the newest durable step, -1 if there is none.
        path: the run's storage.
        metrics: the metrics of the last `save`, else those of the last `ray.train.report` with a checkpoint, else those of the newest
            durable step (of a run that had finished before).
        return_value: what the training function returned on rank 0.
        recoveries: every restart, oldest first.
        lost: steps for which `save` had returned True in a worker group that has died since or that did not call `close`, and which
            are not durable, each with its reason. What is in storage is whole.
        ray: Ray Train's own result. Its `checkpoint` and `metrics` are None: the steps are the run's, and `raystate.Reader(result.path)`
            reads them; Ray Train keeps only metrics that were reported with a checkpoint. A training function that calls
            `ray.train.report(metrics, checkpoint=…)` itself gets both, and a second copy of the state that raystate doesn't look after.
    """

    step: int
    path: str
    metrics: dict[str, Any]
    return_value: Any
    recoveries: tuple[Recovery, ...]
    lost: tuple[str, ...] = ()
    ray: Result = field(repr=False)


def run_result(result: Any, config: StateConfig, lost: tuple[str, ...] = ()) -> RunResult:
    """Of a run that has ended well; `result` is Ray Train's `Result`. `lost`: what was known when `train_fn` had returned."""
    outcome: Outcome = result.return_value
    step, why = outcome.facts.get("step"), "its StateManager's save was never called, or only for step 0"
    if step is None:  # train_fn made no StateManager, or it left no word
        newest = newest_step(config)
        step, why = -1 if newest is None else newest, "it made no StateManager(), or never called save"
    if step < 0:
        logger.warning("raystate: train_fn has returned and nothing was saved: %s", why)
    return RunResult(
        step=step,
        path=os.fspath(config.storage),
        metrics=dict(outcome.facts.get("metrics") or result.metrics or _stored_metrics(config)),
        return_value=outcome.value,
        recoveries=recoveries(outcome.restarts, outcome.facts.get("recoveries") or []),
        lost=(*(outcome.facts.get("lost") or ()), *lost),
        ray=result,
    )


def _stored_metrics(config: StateConfig) -> dict[str, Any]:
    try:
        return dict(Reader(config.storage).metadata().metrics)
    except StepNotFoundError:
        return {}
    except RaystateError as error:  # the training is fine: no reason to fail now
        logger.warning("raystate: the metrics of the newest step can't be read: %s", error)
        return {}


def recoveries(restarts: tuple[Restart, ...], known: list[dict[str, Any]]) -> tuple[Recovery, ...]:
    """The launcher's restarts joined with what the run's Coordinator knows: by group, or in order where it doesn't name groups.

    If they can't be matched, because the Coordinator was lost, the launcher's list stands.
    """
    if len(known) == len(restarts):
        known = [{"group": restart.group, **facts} for restart, facts in zip(restarts, known, strict=True)]
    by_group = {facts["group"]: facts for facts in known if "group" in facts}
    result: list[Recovery] = []
    for restart in restarts:
        facts = by_group.get(restart.group, {})
        if not facts.get("back", True):  # it ended before a new step
            facts = {name: facts[name] for name in ("step", "tier", "steps_repeated") if facts.get("tier") and name in facts}
        result.append(
            Recovery(
                attempt=restart.attempt,
                cause=restart.cause,
                step=facts.get("step"),
                tier=facts.get("tier", ""),
                seconds=facts.get("seconds", restart.seconds),
                steps_repeated=facts.get("steps_repeated"),
                interrupted=restart.interrupted,
                workers=restart.workers,
            )
        )
    return tuple(result)
