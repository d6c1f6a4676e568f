"""A process's way into a run: past others who use it, and past actors that another version or another configuration has left."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from raystate.actors import launch_context
from raystate.actors.coordinator import Welcome, ensure_coordinator, make_coordinator
from raystate.actors.host import create_host
from raystate.actors.hosts import last_line
from raystate.actors.kv_store import check_travels
from raystate.actors.naming import coordinator_name, find_actor, find_hosts, host_name, protocol, run_actors, wait_until_gone
from raystate.actors.places import refused
from raystate.actors.release import release_by_hash
from raystate.actors.reporting import answers_within_s
from raystate.config.state_config import StateConfig
from raystate.core.coordinator.tenancy import Owner, told_differences
from raystate.core.formats.errors import BarrierTimeoutError, RunInUseError, StorageError, error_from_name
from raystate.core.formats.messages import Failure, HostId
from raystate.machine.load import load
from raystate.machine.own_time import own_time
from raystate.observe.delayed_line import told_if_long
from raystate.runtime.coordinator.one_storage import sees
from raystate.storage import run_hash as hash_of
from raystate.waits import AGAIN_S, QUICK_ANSWER_S

logger = logging.getLogger("raystate")


def this_owner(launch: str) -> Owner:
    """This process as a user of the run."""
    ray_context, launched = ray.get_runtime_context(), launch_context.current()
    return Owner(
        job_id=ray_context.get_job_id(),
        node=ray_context.get_node_id(),
        launch=launch,
        pid=os.getpid(),
        rank=0 if launched is None else launched.rank,
        launched=launched is not None,
        log_level=logger.level,
    )


def enter_first(config: StateConfig, launch: str, *, takeover: bool) -> None:
    """For a launcher, before it starts anything: the run is this launch's, and storage here is the Coordinator's.

    Raises:
        As `enter`; ConfigError also if the Coordinator has another disk at the storage's path than this process.
    """
    name = hash_of(config.storage, config.run)
    # No rank: this process doesn't train.
    enter(config, name, dataclasses.replace(this_owner(launch), rank=-1, launched=True), takeover=takeover)
    coordinator = find_actor(coordinator_name(name))
    if coordinator is None:
        return  # it could not begin, and the trainers' own start says why
    found: Any = ray.get(coordinator.claimed.remote(), timeout=config.start_timeout_s)
    if not isinstance(found, Failure):
        claim, node = found
        if sees(config.storage, claim):
            return
        found = refused(config, [HostId(ray.get_runtime_context().get_node_id())], node)
        coordinator.refuse.remote(found)
        coordinator.left.remote(0, 1)  # it need not wait for anybody
        wait_until_gone(name, answers_within_s(config))
    raise error_from_name(found.error, found.message, found.details)


def enter(config: StateConfig, run_hash: str, owner: Owner, *, takeover: bool) -> None:
    """Return when `owner` has the run, with a Coordinator of this version and this configuration.

    Args:
        takeover: end a launch that uses the run, or the storage under another name; give up what
            memory holds of a run whose folder is gone.

    Raises:
        RunInUseError: somebody else's trainers are alive, or were a moment ago and start again; names job, pid, node and age.
        ConfigError: processes of one launch have different configurations, or one can't be changed now, or can't be brought to others.
        BarrierTimeoutError: the Coordinator does not answer; says what ended it, if it can't begin.
        StorageError, CorruptCheckpointError: the storage or its log is unusable.
    """
    check_travels(config)
    ahead: list[Any] = []
    waits = f"the Coordinator of run {config.run!r} has not answered yet: it is still starting, or this node is busy; {load()}"
    with told_if_long(waits):
        try:
            _enter(config, run_hash, dataclasses.replace(owner, config=config), ahead, takeover=takeover)
        except BaseException:
            _dismiss(ahead)
            raise


def _enter(config: StateConfig, run_hash: str, owner: Owner, ahead: list[Any], *, takeover: bool) -> None:
    deadline_s = own_time() + config.start_timeout_s
    why = ""
    while True:
        coordinator = _coordinator(config, run_hash, owner, ahead)
        try:
            reply: Any = ray.get(coordinator.hello.remote(owner, takeover), timeout=max(0.1, deadline_s - own_time()))
        except (RayActorError, GetTimeoutError) as error:
            if isinstance(error, RayActorError):
                why = f"{type(error).__name__}: {last_line(error).strip()}"
            if own_time() > deadline_s:
                raise BarrierTimeoutError(
                    f"the Coordinator of run {config.run!r} did not answer within {config.start_timeout_s:.0f} s "
                    f"({why or type(error).__name__}); {load()}; see its log: `ray list actors`, then "
                    "`ray logs actor --id ID`. Raise start_timeout_s to wait longer",
                    phase="start", rank=owner.rank, waited_s=config.start_timeout_s,
                ) from None  # fmt: skip
            time.sleep(AGAIN_S)
            continue
        if isinstance(reply, Failure):
            _make_way(reply, coordinator, config, ahead, out_of_time=own_time() > deadline_s)
        elif reply.protocol != protocol():
            # Another version's actors: a new submission replaces them; storage and arenas carry everything they knew.
            _replace_older(run_hash)
        elif reply.outdated:
            _replace_outdated(reply, coordinator, config, run_hash)
        else:
            return


def _coordinator(config: StateConfig, run_hash: str, owner: Owner, ahead: list[Any]) -> Any:
    """The run's Coordinator. If it is made here, this node's HostActor starts at the same time, and waits until the Coordinator opens it.

    Only then: one that is there already knows which HostActors wait and which are hosts, and may refuse this process. The HostActor comes
    second, so that there is somebody who ends it if this process is killed.

    Args:
        ahead: takes the HostActors that were made here.
    """
    here = HostId(owner.node)
    if find_actor(coordinator_name(run_hash)) is None:
        trains = owner.rank >= 0
        missing = (here,) if trains and find_actor(host_name(run_hash, here)) is None else ()
        coordinator = make_coordinator(config, run_hash, owner, missing)
        if coordinator is not None:
            for host in missing:
                ahead.append(create_host(config, run_hash, host))
                ahead[-1].preload.remote(gives_way=False)
            return coordinator
    return ensure_coordinator(config, run_hash, owner)


def _dismiss(ahead: list[Any]) -> None:
    """End HostActors that were made for a start that is refused, unless one is a host by now: of somebody who was not refused."""
    while ahead:
        host = ahead.pop()
        try:
            ray.get(host.give_up.remote(), timeout=QUICK_ANSWER_S)
        except GetTimeoutError:  # it is still starting, and this process may end before it could hear
            ray.kill(host, no_restart=True)
        except RayError:
            pass  # it has ended


def _make_way(refusal: Failure, coordinator: Any, config: StateConfig, ahead: list[Any], *, out_of_time: bool) -> None:
    """Return if it is worth asking again; else raise what the refusal says."""
    error = error_from_name(refusal.error, refusal.message, refusal.details)
    if isinstance(error, RunInUseError) and error.release and not out_of_time:
        # That run isn't used any more, or it is taken over. What it holds in memory becomes
        # durable, then its storage is free.
        logger.info("run %r is released: run %r takes %s", error.run, config.run, config.storage)
        try:
            reply = release_by_hash(error.release, f"run {config.run!r} takes its storage", answers_within_s(config))
        except StorageError as failure:
            if failure.phase != "release":
                raise
            logger.warning("run %r: %s", error.run, failure)  # its actors are ended all the same
            return
        if reply is not None and reply.errors:
            logger.warning("run %r had promised steps that are not durable: %s", error.run, "; ".join(reply.errors))
        return
    if isinstance(error, RunInUseError) and error.starting and not out_of_time:
        time.sleep(AGAIN_S)  # soon it trains, or it is known to have given up
        return
    if isinstance(error, RunInUseError) and error.run != config.run:
        _dismiss(ahead)  # first: while it lives, it would see to them if this process were killed
        ray.kill(coordinator, no_restart=True)  # made for this launch, which gives up
    raise error


def _replace_older(run_hash: str) -> None:
    """End the run's actors that speak another protocol. What they held stays: in storage, and in the arenas for their successors."""
    for name in run_actors(run_hash):
        actor = find_actor(name)
        if actor is None:
            continue
        try:
            spoken = ray.get(actor.protocol.remote(), timeout=QUICK_ANSWER_S)
        except RayError:  # so ill that it can't say
            spoken = None
        if spoken != protocol():
            ray.kill(actor, no_restart=True)


def _replace_outdated(hello: Welcome, coordinator: Any, config: StateConfig, run_hash: str) -> None:
    """End a Coordinator of another configuration, and the HostActors that this concerns.

    By handle and by what they say they were made with: another process of this launch may have made new ones already.
    """
    logger.info("run %r goes on with a new configuration: %s", config.run, told_differences(hello.outdated))
    ray.kill(coordinator, no_restart=True)
    wanted = (config.host_memory, config.arena_dir, config.domain_labels, config.metadata_url)
    for host in find_hosts(run_hash):
        actor = find_actor(host_name(run_hash, host))
        if actor is None:
            continue
        try:
            made_with = ray.get(actor.parameters.remote(), timeout=QUICK_ANSWER_S)
            if made_with == wanted:
                continue
            if made_with[1] != wanted[1]:
                # No process will look for the arena in its old folder again.
                ray.get(actor.close.remote(True), timeout=QUICK_ANSWER_S)
        except RayError:
            pass
        ray.kill(actor, no_restart=True)
