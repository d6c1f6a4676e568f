"""Reading Ray Train's errors: which rank, what happened, and does it count."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.train.v2._internal.exceptions import (
    UserExceptionWithTraceback,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    WorkerHealthCheckTimeoutError,
)
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, TrainingFailedError

from raystate.core.errors import ConfigError, Interrupted, RaystateError, RunInUseError, StaleAttemptError
from raystate.train.policy import Ending, root_cause

# No restart can help: the run belongs to somebody else, or the settings are wrong.
FINAL = (StaleAttemptError, RunInUseError, ConfigError)

_JAX_ERRORS = ("JaxRuntimeError", "XlaRuntimeError")
_COLLATERAL = ("Gloo ", "oordination service", "Connection reset by peer", "Connection closed by peer", "Socket closed", "NCCL")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One rank's end. `died`: its process is gone (or doesn't answer); `preempted`: with its node, as announced."""

    error: BaseException
    traceback: str = ""
    died: bool = False
    preempted: bool = False


def failures(statuses: Mapping[int, Any]) -> dict[int, Failure]:
    """The failures in Ray Train's poll, by rank."""
    return {rank: _failure(status.error) for rank, status in statuses.items() if status.error is not None}


def _failure(error: BaseException) -> Failure:
    if isinstance(error, UserExceptionWithTraceback):
        return Failure(error=error._base_exc, traceback=error._traceback_str)
    if isinstance(error, WorkerHealthCheckFailedError):
        error = error.health_check_failure
    died = isinstance(error, (RayActorError, WorkerHealthCheckTimeoutError))
    return Failure(error=error, died=died, preempted=bool(getattr(error, "preempted", False)))


def late_failures(workers: list[Any], failed: set[int], *, grace_s: float) -> dict[int, Failure]:
    """Give the other ranks a moment to fail or finish by themselves: the first error that is seen needn't be the cause."""
    found: dict[int, Failure] = {}
    open_ranks = set(range(len(workers))) - failed
    end_s = time.monotonic() + grace_s
    while open_ranks and (left_s := end_s - time.monotonic()) > 0:
        polls = {workers[rank].actor.poll_status.remote(): rank for rank in open_ranks}
        done, _ = ray.wait(list(polls), num_returns=len(polls), timeout=left_s)
        for poll in done:
            rank = polls[poll]
            try:
                status = ray.get(poll)
            except Exception as error:
                found[rank] = _failure(error)
                open_ranks.discard(rank)
                continue
            if status.error is not None:
                found[rank] = _failure(status.error)
            if status.error is not None or not status.running:
                open_ranks.discard(rank)
        if open_ranks:
            time.sleep(0.02)
    return found


def classify(error: TrainingFailedError, found: dict[int, Failure]) -> Ending:
    """What Ray Train's error and the ranks' failures amount to."""
    errors: dict[int, BaseException] = {rank: failure.error for rank, failure in found.items()}
    for kinds, kind in ((FINAL, "final"), (Interrupted, "interrupted")):
        ranks = [rank for rank, each in sorted(errors.items()) if isinstance(each, kinds) and not _was_replaced(each)]
        if ranks:
            return _of_rank(kind, ranks[0], found[ranks[0]])
    if isinstance(error, PreemptionError):
        return Ending(kind="interrupted", cause=f"ranks {error.preemption_info.preempted_ranks} lost their node, as announced")
    if isinstance(error, ControllerError):
        return _of_controller(error.controller_failure)
    if not found:
        return Ending(kind="failed", cause=_line(error), error=error)
    if any(failure.preempted for failure in found.values()):
        ranks = [rank for rank, failure in sorted(found.items()) if failure.preempted]
        return Ending(kind="interrupted", cause=f"ranks {ranks} lost their node, as announced")
    rank = root_cause(errors, collateral=is_collateral)
    return _of_rank("failed", rank, found[rank])


def _was_replaced(error: BaseException) -> bool:
    """Whether only this worker group was replaced by a newer start of the same run: the run itself is still ours."""
    return isinstance(error, StaleAttemptError) and bool(error.replaced)


def _of_rank(kind: Any, rank: int, failure: Failure) -> Ending:
    if failure.died:
        return Ending(kind=kind, cause=f"the process of rank {rank} died", rank=rank)
    if is_collateral(failure.error):
        cause = f"a collective of rank {rank} failed, as it does when another process dies ({_line(failure.error)})"
        return Ending(kind=kind, cause=cause, rank=rank, error=failure.error, traceback=failure.traceback)
    return Ending(
        kind=kind,
        cause=f"rank {rank} raised {_line(failure.error)}",
        rank=rank,
        error=failure.error,
        traceback=failure.traceback,
    )


def _of_controller(failure: BaseException) -> Ending:
    if isinstance(failure, WorkerGroupStartupTimeoutError):
        return Ending(kind="waiting", cause=f"no room yet for {failure.num_workers} workers")
    return Ending(kind="failed", cause=f"the workers could not be started: {_line(failure)}", error=failure)


def is_collateral(error: BaseException) -> bool:
    """A collective that failed because another rank ended. By text: jax raises ValueError for gloo's errors."""
    text = str(error)
    return type(error).__name__ in ("ValueError", "RuntimeError", *_JAX_ERRORS) and any(mark in text for mark in _COLLATERAL)


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def leaving_nodes(error: TrainingFailedError) -> frozenset[str]:
    """Nodes that Ray Train was told would go away."""
    return frozenset(error.preemption_info.preempted_node_ids) if isinstance(error, PreemptionError) else frozenset()


def ours(error: BaseException) -> RaystateError | None:
    """The raystate error inside Ray Train's or Ray's wrapping, None if there isn't one."""
    if isinstance(error, RaystateError):
        return error
    if isinstance(error, ControllerError):
        return ours(error.controller_failure)
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return ours(error.cause)
    return None


def quiet_ray_train() -> None:
    """In the controller: no tracebacks for what we raise on purpose, none for the clean-up of workers that we ended."""
    names = ("ray.train.v2._internal.execution.callback_manager", "ray.train.v2._internal.execution.controller.controller")
    for name in names:
        logging.getLogger(name).addFilter(_not_ours)
    for name in ("ray.train.v2.jax.config", "ray.train.v2._internal.callbacks.backend_setup"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _not_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], RaystateError))
