"""Reading Ray Train's errors: which rank, what happened, and does it count."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import ray
from ray.exceptions import RayActorError, RaySystemError, RayTaskError
from ray.train.v2.api.exceptions import ControllerError, PreemptionError, TrainingFailedError

from raystate.actors.blame import exception_of, pickles_anywhere
from raystate.actors.naming import coordinator_name, find_actor
from raystate.core.formats.errors import (
    ConfigError,
    Interrupted,
    ItemTopologyError,
    RaystateError,
    ReferenceMismatchError,
    RunInUseError,
    StaleAttemptError,
    StepOrderError,
    StorageError,
)
from raystate.core.formats.texts import counted
from raystate.runtime.ends import End, Told, is_collateral, one_line
from raystate.runtime.slow import SlowLine, load
from raystate.train.policy import Ending, RankFailure, culprit, signature_of
from raystate.train.rays import exceptions
from raystate.waits import MOMENT_S, QUICK_ANSWER_S

logger = logging.getLogger(__name__)

# No restart can help: the run belongs to somebody else, or the caller has made a mistake.
FINAL = (
    StaleAttemptError, RunInUseError, ConfigError, ReferenceMismatchError, ItemTopologyError, StepOrderError,
)  # fmt: skip


def prepare_worker() -> None:
    """In a worker: let the controller and the driver read any error of its training function.

    They need not have the error's module. An error that another process's end has led to is
    shown only in the worker's log file.
    """
    wrapper: Any = exceptions.UserExceptionWithTraceback
    made = wrapper.__init__

    def wrapping(self: Any, error: BaseException, *args: Any, **kwargs: Any) -> None:
        made(self, pickles_anywhere(error), *args, **kwargs)

    wrapper.__init__ = wrapping
    for handler in logging.getLogger("ray.train").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.addFilter(_tells_of_an_own_end)


def _tells_of_an_own_end(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not (text.startswith("Error in training function:") and is_collateral(Exception(), text))


def failures(statuses: Mapping[int, Any]) -> dict[int, RankFailure]:
    """The failures in Ray Train's poll, by rank."""
    return {rank: _failure(status.error) for rank, status in statuses.items() if status.error is not None}


def _failure(error: BaseException) -> RankFailure:
    if isinstance(error, exceptions.UserExceptionWithTraceback):
        return RankFailure(error=error._base_exc, traceback=error._traceback_str)
    if isinstance(error, exceptions.WorkerHealthCheckFailedError):
        error = error.health_check_failure
    died = isinstance(error, (RayActorError, exceptions.WorkerHealthCheckTimeoutError))
    unread = isinstance(error, (RaySystemError, RayTaskError))
    return RankFailure(error=error, died=died, unread=unread, preempted=bool(getattr(error, "preempted", False)))


def late_failures(workers: list[Any], failed: set[int], *, grace_s: float, once: bool = False) -> dict[int, RankFailure]:
    """Wait a moment for the other ranks' own errors. The first one that is seen may be a consequence.

    A rank that has died ends the wait: the others won't say anything of their own any more. `once`: ask what each says now.
    """
    found: dict[int, RankFailure] = {}
    open_ranks = set(range(len(workers))) - failed
    end_s = time.monotonic() + grace_s
    while open_ranks and not any(one.died for one in found.values()) and (left_s := end_s - time.monotonic()) > 0:
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
        if once:
            break
        if open_ranks:
            time.sleep(0.02)
    return found


def told(
    run_hash: str, group: str, dead: Collection[int], *, swept: Collection[int] = (), within_s: float = MOMENT_S
) -> Told | None:
    """What the run's Coordinator knows of the group's end. It waits a moment for the news of these deaths.

    Ask before the ranks `swept` are ended: later on everybody is dead. None: there is no Coordinator, and none ever will know.
    """
    coordinator = find_actor(coordinator_name(run_hash))
    if coordinator is None:
        return None
    try:
        for wait_s in (within_s, QUICK_ANSWER_S):  # those that hang may take longer
            answer: Any = coordinator.ended.remote(group, frozenset(dead), tuple(swept), wait_s)
            found: Told = ray.get(answer, timeout=wait_s + MOMENT_S)
            if not found.awaited:
                break
    except Exception as error:
        logger.debug("the Coordinator doesn't say who failed first: %s", error)
        return Told()
    return found


def classify(error: TrainingFailedError, found: Mapping[int, RankFailure], told: Sequence[End] | None = None) -> Ending:
    """What Ray Train's error, the ranks' failures and what the Coordinator was told of them amount to. `told`: see `Told.ends`."""
    found = _with_unread(found, told or ())
    errors: dict[int, BaseException] = {rank: failure.error for rank, failure in found.items()}
    for is_kind, kind in ((is_final, "final"), (_is_interruption, "interrupted")):
        ranks = [rank for rank, each in sorted(errors.items()) if is_kind(each)]
        if ranks:
            return _beside(_of_rank(kind, ranks[0], found[ranks[0]]), found)
    if isinstance(error, PreemptionError):
        return Ending(kind="interrupted", cause=f"ranks {error.preemption_info.preempted_ranks} lost their node, as announced")
    if isinstance(error, ControllerError):
        return _of_controller(error.controller_failure)
    if not found:
        return Ending(kind="failed", cause=one_line(error), error=error, signature=signature_of(error))
    if any(failure.preempted for failure in found.values()):
        ranks = [rank for rank, failure in sorted(found.items()) if failure.preempted]
        return Ending(kind="interrupted", cause=f"ranks {ranks} lost their node, as announced")
    rank = culprit(found, told)
    if rank is None:
        ranks = " and ".join(str(rank) for rank, failure in sorted(found.items()) if failure.died)
        cause = f"the processes of ranks {ranks} died; which of them was first is not known yet"
        return Ending(kind="failed", cause=cause, is_known=False)
    hung = [end for end in told or () if end.kind == "hung" and end.traceback]
    if found[rank].died and len(hung) > 1:  # each of them holds the others up
        text = "\n\n".join(f"rank {end.rank} was at\n{end.traceback}" for end in sorted(hung, key=lambda end: end.rank))
        found[rank] = dataclasses.replace(found[rank], traceback=text)
    return _of_rank("failed", rank, found[rank])


def _beside(ending: Ending, found: Mapping[int, RankFailure]) -> Ending:
    """Add the errors of ranks that failed while this rank stopped on request. No other text names them."""
    if ending.kind != "interrupted":
        return ending
    raised = [
        f"; rank {rank} raised {one_line(failure.error)}"
        for rank, failure in sorted(found.items())
        if not failure.died and not failure.collateral and not _is_interruption(failure.error)
    ]
    return dataclasses.replace(ending, cause=ending.cause + "".join(raised))


def _with_unread(found: Mapping[int, RankFailure], told: Sequence[End]) -> dict[int, RankFailure]:
    """With the exceptions of ranks that were gone before Ray Train had read them."""
    result = dict(found)
    for end in told:
        if end.rank in result and not (result[end.rank].died or result[end.rank].unread):
            continue
        if end.kind == "raised":
            result[end.rank] = RankFailure(error=exception_of(end), traceback=end.traceback)
        elif end.kind == "interrupted":
            result[end.rank] = RankFailure(error=Interrupted(end.reason))
        elif end.kind == "hung":
            result[end.rank] = RankFailure(error=RuntimeError(end.reason), traceback=end.traceback, died=True, why=end.reason)
        elif end.rank not in result:
            result[end.rank] = RankFailure(error=RuntimeError(end.reason), died=True)
    return result


def may_depend_on_size(ending: Ending) -> bool:
    """Whether a worker group of another size could do what this one can't: its batches and shapes are others."""
    return ending.kind in ("failed", "final") and not isinstance(ending.error, (StaleAttemptError, RunInUseError, StepOrderError))


def is_final(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    if isinstance(error, FINAL):
        return not _was_replaced(error)
    if is_of_rehearsal(error):
        return True
    if isinstance(error, StorageError) and (error.released or error.gone):
        # close() has ended the run: another start would have nothing to do, and say nothing of what is lost. Or its folder is gone,
        # and only the user can say whether what memory holds is given up.
        return True
    return type(error) is RaystateError and error.item is not None  # an item or a leaf that can't be saved


def is_of_rehearsal(error: BaseException) -> bool:
    """Whether a rehearsal has come to its end: its run is closed, and nothing is to be started again."""
    return isinstance(error, Interrupted) and error.phase == "rehearsal"


def _is_interruption(error: BaseException) -> bool:
    return isinstance(error, Interrupted)


def _was_replaced(error: BaseException) -> bool:
    """Whether only this worker group was replaced by a newer start of the same run: the run itself is still ours."""
    return isinstance(error, StaleAttemptError) and bool(error.replaced)


def _of_rank(kind: Any, rank: int, failure: RankFailure) -> Ending:
    if failure.died:
        cause = failure.why or f"the process of rank {rank} died"
        return Ending(kind=kind, cause=cause, rank=rank, traceback=failure.traceback)
    if kind == "interrupted":
        return Ending(kind=kind, cause=str(failure.error), rank=rank, error=failure.error, traceback=failure.traceback)
    if failure.collateral:
        cause = f"a collective of rank {rank} failed, as it does when another process dies ({one_line(failure.error)})"
        return Ending(kind=kind, cause=cause, rank=rank, error=failure.error, traceback=failure.traceback)
    return Ending(
        kind=kind,
        cause=f"{f'the answer of rank {rank} cannot be read:' if failure.unread else f'rank {rank} raised'} {one_line(failure.error)}",
        rank=rank,
        error=failure.error,
        traceback=failure.traceback,
        signature=signature_of(failure.error),
    )


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


def tell_of_start(line: SlowLine, group: Any, *, again: bool) -> None:
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
