"""The driver's side of a run's end, and of asking how far it is."""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raystate.actors.naming import coordinator_name, find_actor, run_actors, wait_until_gone
from raystate.actors.reporting import answers_within_s, run_reports
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import RaystateError, RunInUseError, StorageError, although_promised, error_from_name
from raystate.core.formats.messages import Ask, Failure, LeaveReply, ReleaseAsked
from raystate.machine.own_time import own_time
from raystate.storage import open_storage, run_hash, visible_steps
from raystate.waits import AGAIN_S, ENDS_S, QUICK_ANSWER_S, QUICK_STORAGE_S

logger = logging.getLogger(__name__)


def newest_step(config: StateConfig, saved: int | None = None) -> int | None:
    """The newest step that any rank has saved or storage holds; None if the Coordinator doesn't answer.

    `saved`: what the Coordinator has said already.
    """
    coordinator = find_actor(coordinator_name(run_hash(config.storage, config.run))) if saved is None else None
    in_memory: Any = -1 if saved is None else saved
    if coordinator is not None:
        try:
            in_memory = ray.get(coordinator.newest_step.remote(), timeout=QUICK_ANSWER_S)
        except (RayActorError, GetTimeoutError):
            return None
    try:
        stored = visible_steps(open_storage(config.storage, timeout_s=QUICK_STORAGE_S))
    except StorageError:
        if in_memory < 0:
            raise
        stored = ()  # an outage: the run goes on from memory
    return max([in_memory, *stored])


def release(
    config: StateConfig, reason: str, *, launch: str | None = None, after: BaseException | None = None
) -> LeaveReply | None:
    """Make the newest complete snapshot durable and end the run's actors, if any are left; by force if they don't answer in time.

    Args:
        reason: for the log.
        launch: only if the run belongs to this launch; None: also if it belongs to another.
        after: what the launch has failed with. If the run was refused before it began, its HostActors with what they hold stay for a
            start that is not refused.

    Returns:
        What the Coordinator says; None if there is none any more, or it has never owned the run.

    Raises:
        StorageError: the newest snapshot could not be made durable, or no answer says whether it
            is. Everything is ended nevertheless.
        RaystateError: this process has left Ray.
    """
    if _was_refused(after):
        return None  # its Coordinator ends by itself, with all that hold nothing
    reply = release_by_hash(run_hash(config.storage, config.run), reason, answers_within_s(config), launch=launch)
    if reply is not None and reply.errors:
        lost = although_promised(reply.errors)
        if after is not None:
            after.add_note(lost)
        else:
            logger.warning("%s", lost, extra={"run": config.run})
    return reply


def release_of(launch: str, reason: str) -> ReleaseAsked:
    """The same question from its driver and its controller: the second to ask hears the answer of the first."""
    return ReleaseAsked(ask=Ask(f"release {launch}"), reason=reason)


def release_by_hash(
    name: str, reason: str, deadline_s: float, *, launch: str | None = None, by_force: bool = True
) -> LeaveReply | None:
    """`release`, for a run that is known by the hash in its actors' names only.

    Args:
        name: the hash.
        reason: for the log.
        deadline_s: see `answers_within_s`.
        launch: only if the run belongs to this launch; None: whichever has it.
        by_force: end the actors also where the newest snapshot is not known to be durable.
    """
    if not ray.is_initialized():  # Ray's calls would join any cluster that there is, or start one
        text = (
            "this process has left Ray (ray.shutdown()): the run's actors end by themselves after idle_timeout_s without a trainer"
        )
        raise RaystateError(text, phase="end")
    end_s = own_time() + deadline_s
    released: LeaveReply | None = None
    failure: RaystateError | None = None
    is_gone = False  # the Coordinator, when it was asked last
    event = release_of(launch or secrets.token_hex(8), reason)
    while (coordinator := find_actor(coordinator_name(name))) is not None and own_time() < end_s:
        try:
            reply: Any = ray.get(coordinator.release.remote(launch, event), timeout=max(0.1, end_s - own_time()))
        except GetTimeoutError:
            failure = _unsaid(f"the Coordinator did not say within {deadline_s:.0f} s", waited_s=deadline_s)
            break
        except RayActorError:
            is_gone = True
            time.sleep(AGAIN_S)
            continue
        is_gone = False
        if isinstance(reply, Failure) and reply.error == RunInUseError.__name__:
            return None  # nothing of this launch's is left
        if isinstance(reply, LeaveReply):
            released = reply
        elif isinstance(reply, Failure):
            failure = error_from_name(reply.error, reply.message, reply.details)
        coordinator.left.remote(0, 1)  # it has been read: the Coordinator need not wait
        break
    if not by_force and is_gone:
        failure = _unsaid("its Coordinator is gone, and has not said")
    if not _was_refused(failure) and (by_force or failure is None):
        by_themselves = _wait_or_kill(name, max(QUICK_ANSWER_S, end_s - own_time()))
        if is_gone and failure is None and not by_themselves:  # else it had released the run, and ended
            failure = _unsaid("its Coordinator is gone, and has not said")
    if failure is not None:
        raise failure
    return released


def free_storage(url: str, run: str | None, *, keep: bool) -> None:
    """End the actors of the runs of this cluster on a storage, for a command that deletes there.

    Args:
        url: canonical.
        run: its name by its log; None: the log can't be read.
        keep: make what they hold in memory durable first; else it is given up.

    Raises:
        RunInUseError: one of them trains, or is about to, or does not answer; nothing has changed.
        StorageError: the newest snapshot could not be made durable in time: it stays in memory.
    """
    ours = coordinator_name(run_hash(url, run)) if run is not None else None
    for report in run_reports():
        if report.problem and ours in (None, report.name):
            raise RunInUseError(f"{report.problem}: try again, or end its run first", run=run or "", storage=url)
        coordinator = find_actor(report.name) if report.storage == url else None
        if coordinator is None:
            continue
        try:
            state, owner, age_s = ray.get(coordinator.use.remote(), timeout=QUICK_ANSWER_S)
        except RayError as error:
            text = (
                f"the Coordinator of run {report.run!r} does not answer ({type(error).__name__}): try again, or end the run first"
            )
            raise RunInUseError(text, run=report.run, storage=url) from None
        if state != "free":
            raise RunInUseError(
                f"run {report.run!r} on {url} is in use by Ray job {owner.job_id} (pid {owner.pid} on node {owner.node[:8]}, "
                f"last heard from {age_s:.0f} s ago): end it first",
                run=report.run, storage=url, job_id=owner.job_id, node=owner.node, pid=owner.pid,
            )  # fmt: skip
        name = run_hash(url, report.run)
        if keep:
            reply = release_by_hash(name, "a step is deleted", report.release_s, by_force=False)
            if reply is not None and reply.errors:
                logger.warning("%s", although_promised(reply.errors), extra={"run": report.run})
        else:
            coordinator.forget.remote("the run is deleted")
            _wait_or_kill(name, ENDS_S)


def _unsaid(why: str, **details: float) -> StorageError:
    text = f"{why} that the last step is durable: `raystate ls` shows the newest that is"
    return StorageError(text, phase="release", **details)


def _was_refused(error: BaseException | None) -> bool:
    """Whether a Coordinator could not claim the run: this launch must not end what it holds."""
    while error is not None:
        facts = error.details if isinstance(error, RaystateError) else {}
        if facts.get("begun") is False:
            return True
        error = facts.get("error") or error.__cause__
    return False


def _wait_or_kill(name: str, timeout_s: float) -> bool:
    """Whether they have ended by themselves, as those of a run that is released do."""
    if wait_until_gone(name, min(timeout_s, ENDS_S + QUICK_ANSWER_S)):
        return True
    for left in run_actors(name):
        actor = find_actor(left)
        if actor is None:
            continue
        if left != coordinator_name(name):
            # With its shared memory: while the node lives, no other process would remove it.
            with contextlib.suppress(RayError):
                ray.get(actor.close.remote(True), timeout=QUICK_ANSWER_S)
        ray.kill(actor, no_restart=True)
    return False
