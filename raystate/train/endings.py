"""Reading Ray Train's errors: which rank, what happened, and does it count."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import time
from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RaySystemError, RayTaskError
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, TrainingFailedError

from raystate.actors.blame import pickles_anywhere, raised, unpacked
from raystate.actors.naming import coordinator_name, find_actor
from raystate.core.formats.errors import RaystateError, RunInUseError, StaleAttemptError, StepOrderError
from raystate.core.formats.texts import counted
from raystate.machine.load import load
from raystate.machine.own_time import own_time
from raystate.observe.delayed_line import DelayedLine
from raystate.observe.ends import End, Told, cause_of, first_to_fail, is_collateral, one_line
from raystate.patching import patch
from raystate.train.policy import Ending, signature_of
from raystate.train.rays import exceptions
from raystate.waits import MOMENT_S, QUICK_ANSWER_S

logger = logging.getLogger(__name__)


def prepare_worker() -> None:
    """In a worker: let the controller and the driver read any error of its training function.

    They need not have the error's module. An error of raystate's, or one that another process's end
    has led to, is shown only in the worker's log file.
    """

    def wrapping(self: Any, error: BaseException, *args: Any, **kwargs: Any) -> None:
        made(self, pickles_anywhere(error), *args, **kwargs)

    made = patch(exceptions.UserExceptionWithTraceback, "__init__", wrapping)  # tests/cluster/test_train_internals.py
    for handler in logging.getLogger("ray.train").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.addFilter(_tells_of_an_own_end)


def _tells_of_an_own_end(record: logging.LogRecord) -> bool:
    if isinstance(sys.exc_info()[1], RaystateError):  # its text comes in the line of the recovery, or `fit` raises it
        return False
    text = record.getMessage()
    return not (text.startswith("Error in training function:") and is_collateral(Exception(), text))


def failures(statuses: Mapping[int, Any]) -> dict[int, End]:
    """The failures in Ray Train's poll, by rank."""
    return {rank: _failure(rank, status.error) for rank, status in statuses.items() if status.error is not None}


def _failure(rank: int, error: BaseException) -> End:
    if isinstance(error, exceptions.UserExceptionWithTraceback):
        return raised(rank, error._base_exc, error._traceback_str)
    if isinstance(error, exceptions.WorkerHealthCheckFailedError):
        error = error.health_check_failure
    if getattr(error, "preempted", False):
        return End(rank=rank, kind="interrupted", reason=f"rank {rank} lost its node, as announced")
    if isinstance(error, (RayActorError, exceptions.WorkerHealthCheckTimeoutError)):
        return End(rank=rank, kind="missing", reason=f"the process of rank {rank} died")
    end = raised(rank, error)
    if isinstance(error, (RaySystemError, RayTaskError)):  # it can't be unpickled here
        return dataclasses.replace(end, reason=f"the answer of rank {rank} cannot be read: {one_line(error)}")
    return end


def late_failures(workers: list[Any], failed: set[int], *, grace_s: float, once: bool = False) -> dict[int, End]:
    """Wait a moment for the other ranks' own errors. The first one that is seen may be a consequence.

    A rank that has died ends the wait: the others won't say anything of their own any more. `once`: ask what each says now.
    """
    found: dict[int, End] = {}
    open_ranks = set(range(len(workers))) - failed
    end_s = own_time() + grace_s
    while open_ranks and not any(end.error is None for end in found.values()) and (left_s := end_s - own_time()) > 0:
        polls = {workers[rank].actor.poll_status.remote(): rank for rank in open_ranks}
        done, _ = ray.wait(list(polls), num_returns=len(polls), timeout=left_s)
        for poll in done:
            rank = polls[poll]
            try:
                status = ray.get(poll)
            except Exception as error:
                found[rank] = _failure(rank, error)
                open_ranks.discard(rank)
                continue
            if status.error is not None:
                found[rank] = _failure(rank, status.error)
            if status.error is not None or not status.running:
                open_ranks.discard(rank)
        if once:
            break
        if open_ranks:
            time.sleep(0.02)
    return found


def told(run_hash: str, group: str, seen: Mapping[int, End], *, within_s: float = MOMENT_S) -> Told:
    """What the run's Coordinator and this launcher know of the group's end. The Coordinator waits a moment for the news of deaths.

    Ask before the other ranks are ended: later on everybody is dead.
    """
    ends = tuple(seen[rank] for rank in sorted(seen))
    coordinator = find_actor(coordinator_name(run_hash))
    if coordinator is None:
        return Told(ends=ends, has_joined=False)
    found: Any = Told(ends=ends)
    try:
        for wait_s in (within_s, QUICK_ANSWER_S):  # those that hang may take longer
            answer: Any = coordinator.ended.remote(group, ends, wait_s)
            found = ray.get(answer, timeout=wait_s + MOMENT_S)
            if not found.hanging:
                break
    except Exception as error:
        logger.debug("the Coordinator doesn't say who failed first: %s", error)
    return found


def classify(error: TrainingFailedError, told: Told) -> Ending:
    """What Ray Train's error and what is known of the ranks' ends amount to."""
    ends, is_all = told.ends, not told.has_joined
    first, cause = first_to_fail(ends, is_all=is_all), cause_of(ends, is_all=is_all)
    if first is None or first.kind not in ("final", "interrupted"):
        if isinstance(error, PreemptionError):
            return Ending(kind="interrupted", cause=f"ranks {error.preemption_info.preempted_ranks} lost their node, as announced")
        if isinstance(error, ControllerError):
            return _of_controller(error.controller_failure)
    if first is None:
        if not ends:
            return Ending(kind="failed", cause=one_line(error), error=error, signature=signature_of(error))
        return Ending(kind="failed", cause=cause, is_known=False)
    own = unpacked(first.error) if first.error is not None else None
    hung = sorted((end for end in ends if end.kind == "hung" and end.traceback), key=lambda end: end.rank)
    text = first.traceback
    if own is None and len(hung) > 1:  # each of them holds the others up
        text = "\n\n".join(f"rank {end.rank} was at\n{end.traceback}" for end in hung)
    return Ending(
        kind=first.kind if first.kind in ("final", "interrupted") else "failed",
        cause=cause,
        rank=first.rank,
        error=own,
        traceback=text,
        signature=signature_of(own) if own is not None and not first.collateral else "",
    )


def may_depend_on_size(ending: Ending) -> bool:
    """Whether a worker group of another size could do what this one can't: its batches and shapes are others."""
    return ending.kind in ("failed", "final") and not isinstance(ending.error, (StaleAttemptError, RunInUseError, StepOrderError))


def _cluster() -> str:
    """What Ray has at all, for a comparison with what the workers need."""
    with contextlib.suppress(Exception):  # Ray may be gone, and this is a help only
        all_there: Any = ray.cluster_resources()
        counts = [f"{all_there[name]:g} {name}" for name in ("CPU", "GPU", "TPU") if all_there.get(name)]
        return f" (each needs what scaling_config says, by default 1 CPU; the cluster has {' and '.join(counts)})"
    return ""


def no_room(workers: int) -> str:
    """What is said of a group that finds no place."""
    return f"no room yet for {counted(workers, 'worker')}{_cluster()}"


def tell_of_start(line: DelayedLine, group: Any, *, again: bool) -> None:
    """A group is about to ask for its places. Ray Train itself says nothing for a minute.

    Args:
        group: Ray Train's context of it.
        again: it is told already why the group starts.
    """
    if again:
        return
    workers, all_there = group.num_workers, cast(dict[str, float], ray.cluster_resources())
    if any(amount * workers > all_there.get(name, 0.0) for name, amount in group.resources_per_worker.items()):
        line.begin(no_room(workers), at_once=True)  # no error: the cluster may grow
    else:
        line.begin(f"waiting for {counted(workers, 'worker')} to start; {load()}")


def _of_controller(failure: BaseException) -> Ending:
    if isinstance(failure, exceptions.WorkerGroupStartupTimeoutError):
        return Ending(kind="waiting", cause=no_room(failure.num_workers))
    cause = f"the workers could not be started: {one_line(failure)}"
    return Ending(kind="failed", cause=cause, error=failure)


def leaving_nodes(error: TrainingFailedError) -> frozenset[str]:
    """Nodes that Ray Train was told would go away."""
    return frozenset(error.preemption_info.preempted_node_ids) if isinstance(error, PreemptionError) else frozenset()


def ours(error: BaseException | None) -> RaystateError | None:
    """The raystate error inside Ray Train's or Ray's wrapping, None if there isn't one."""
    if isinstance(error, RaystateError):
        return error
    if isinstance(error, ControllerError):
        return ours(error.controller_failure)
    if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        return ours(error.cause)
    return None


def release_text(error: Exception) -> str:
    """What is said, beside a run's own error, of one that its release has raised."""
    return f"the run could not be released: {type(error).__name__}: {error}"


def quiet_ray_train() -> None:
    """In the controller: no tracebacks for what we raise on purpose or tell in a line of our own, none
    for the clean-up of workers that we ended."""
    names = ("ray.train.v2._internal.execution.callback_manager", "ray.train.v2._internal.execution.controller.controller")
    for name in names:
        logging.getLogger(name).addFilter(_not_ours)
    for name in ("ray.train.v2.jax.config", "ray.train.v2._internal.callbacks.backend_setup"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _not_ours(record: logging.LogRecord) -> bool:
    told = (RaystateError, exceptions.WorkerGroupStartupTimeoutError)
    return not (record.exc_info and isinstance(record.exc_info[1], told))
