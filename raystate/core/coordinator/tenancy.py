"""Who may use a run: decided from what its Coordinator has heard of trainers, and from who asks."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.journal import Journal
from raystate.core.coordinator.memory import Memory
from raystate.core.formats.declared import Failure
from raystate.core.formats.names import HostId
from raystate.waits import CONNECT_S, HEARD_S, STARTS_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who uses the run.

    Attributes:
        job_id: the Ray job.
        node: where its process runs.
        launch: stays the same over the restarts of one `fit`. It tells apart two uses of a run
            within one job, such as trials of a sweep that were given the same storage.
        pid: the process there; under `fit` the one of rank 0.
        rank: of that process.
        launched: a launcher starts its trainers again, in other processes. False: the process is the launch, and ends with it.
        config: its `StateConfig`; None: it doesn't say.
        log_level: from which on it wants to see the lines of the run's actors, as `logging` has it.
    """

    job_id: str
    node: str
    launch: str
    pid: int = 0
    rank: int = 0
    launched: bool = False
    config: Any = None
    log_level: int = 20

    @property
    def identity(self) -> tuple[str, str]:
        """The same for all processes of one launch."""
        return self.job_id, self.launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Presence:
    """Which trainers of the run are there, as far as its Coordinator has heard. Before it owns the run: none.

    Attributes:
        alive: one is, or has joined and is about to connect to its HostActor.
        hosts: those whose last reports list trainers; they may be older than the question.
        leaving: trainers are closing their managers.
        joined_s: when one last asked to join, on the machine's clock.
        heard_s: when something was last heard of one, the news of its end included.
        held_step: the newest step in a host's memory; -1: none.
        durable_step: -1: none.
        keeps: a step is durable or complete in memory, or may be.
    """

    alive: bool = False
    hosts: tuple[HostId, ...] = ()
    leaving: bool = False
    joined_s: float = float("-inf")
    heard_s: float = float("-inf")
    held_step: int = -1
    durable_step: int = -1
    keeps: bool = True


def presence_of(joins: Joins, memory: Memory, journal: Journal, now_s: float, *, leaving: bool) -> Presence:
    """What is known at a moment of the machine's own clock."""
    views = memory.views
    listing = [view for view in views if view.trainers]
    # One that waits for the other ranks connects to its HostActor only afterwards.
    waits = joins.is_joining and now_s - joins.joined_s < STARTS_S
    return Presence(
        alive=waits or any(now_s - view.heard_s < HEARD_S for view in listing) or _may_connect(joins, memory, now_s),
        hosts=tuple(view.host for view in listing),
        leaving=leaving,
        joined_s=joins.joined_s,
        heard_s=joins.heard_s,
        held_step=max((one.step for one in memory.snaps), default=-1),
        durable_step=journal.durable_step,
        keeps=memory.keeps or bool(journal.live),
    )


def _may_connect(joins: Joins, memory: Memory, now_s: float) -> bool:
    """Whether a rank has joined that no host has listed yet, by reports that may be from before it connects."""
    group, hosts = joins.group, memory.hosts
    if group is None or not group.alive or now_s - group.first_s >= STARTS_S:
        return False
    unseen = {host for rank, host in group.hosts.items() if rank not in group.seen and rank not in group.left}
    views = (hosts.get(host) for host in unseen)
    return any(view is None or (view.up and view.heard_s - group.first_s < CONNECT_S) for view in views)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a process that wants to use the run is told.

    Attributes:
        replaces: it may, and has another configuration: it ends this Coordinator and makes one of its own. The fields that differ,
            with both values: field -> (here, asked for).
        failure: it may not.
        rests_on: but only because of these hosts' reports, which may be older than the question: ask them.
    """

    replaces: dict[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict[str, tuple[Any, Any]])
    failure: Failure | None = None
    rests_on: tuple[HostId, ...] = ()


def admit(
    owner: Owner, asking: Owner, presence: Presence, *, config: Any, owner_s: float, now_s: float, takeover: bool
) -> Admission:
    """Whether `asking` may use the run that `owner` has used so far.

    Args:
        config: the Coordinator's `StateConfig`.
        owner_s: when the owner last said hello, on the clock of `now_s` (monotonic).
        takeover: end the owner's use, also if it trains.
    """
    run = config.run
    is_same = asking.identity == owner.identity
    state = occupancy(owner, presence, owner_s=owner_s, now_s=now_s)
    if not is_same and not takeover and state != "free":
        age_s = now_s - max(owner_s, presence.heard_s)
        sibling = _are_one_jax_job(owner, asking)
        failure = in_use(owner, state, age_s=age_s, storage=config.storage, run=run, sibling=sibling)
        return Admission(failure=failure, rests_on=presence.hosts if state == "in use" and not sibling else ())
    unlike = differences(owner.config, asking.config, doubt=False)  # one script has made both
    if is_same and unlike and presence.leaving:
        # It has closed its manager and opens another, while other processes still close theirs.
        return Admission(failure=in_use(owner, "starting", age_s=0.0, storage=config.storage, run=run))
    begins = state == "in use" or presence.joined_s < owner_s  # not all of its processes have come
    if is_same and unlike and begins:
        message = f"the processes of one launch of run {run!r} have different configurations: {told_differences(unlike)}"
        return Admission(failure=Failure(error="ConfigError", message=message, details=_details(unlike)))
    # Of another launch, or a notebook that opens the run again, the script may have been edited: the old policy would lose steps.
    changed = differences(config, asking.config, doubt=not (is_same and (begins or owner.launched)))
    if not changed:
        return Admission()
    held, durable = presence.held_step, presence.durable_step
    if "arena_dir" in changed and not takeover and held > durable:
        here, there = changed["arena_dir"]
        message = (
            f"arena_dir can't change now: step {held} of run {run!r} lies only in memory, in {_shown_dir(here)}, and the newest "
            f"durable step is {'none' if durable < 0 else durable}. Start with {_shown_dir(here)} instead of {_shown_dir(there)}, or "
            f"pass takeover=True to give up what is in memory"
        )
        return Admission(failure=Failure(error="ConfigError", message=message, details=_details(changed)))
    return Admission(replaces=changed)


Occupancy = Literal["in use", "starting", "free"]


def occupancy(owner: Owner, presence: Presence, *, owner_s: float, now_s: float) -> Occupancy:
    """Whether the owner's trainers are alive, are about to come (again), or are gone for good."""
    if presence.alive:
        return "in use"
    # A script that has joined and is gone won't come back; a launcher starts its trainers again.
    comes = owner.launched or presence.joined_s < owner_s
    recent = now_s - max(owner_s, presence.heard_s) < HEARD_S
    return "starting" if comes and recent else "free"


def _are_one_jax_job(owner: Owner, asking: Owner) -> bool:
    """Whether two Ray jobs are processes of one jax.distributed job, whose launch is a token that one of them has told the others."""
    is_other_process = (owner.node, owner.pid) != (asking.node, asking.pid)
    return owner.launch == asking.launch and owner.job_id != asking.job_id and is_other_process


def in_use(
    owner: Owner,
    state: Occupancy,
    *,
    age_s: float,
    storage: str,
    run: str,
    asked_run: str | None = None,
    sibling: bool = False,
) -> Failure:
    """The refusal of a run, or of a storage that a run of another name uses. `sibling`: see `_are_one_jax_job`."""
    what = f"run {run!r} on {storage} is in use by"
    if asked_run is not None:
        what = f"run {asked_run!r} can't use {storage}: run {run!r} uses it, in"
    process = f" (pid {owner.pid} on node {owner.node[:8]}, last heard from {age_s:.0f} s ago)"
    ways_out = "end it, use another storage, or pass takeover=True to end it from here"
    if sibling:
        ways_out = (
            "that is another process of this JAX job, and all of them have to belong to one Ray job: start them as Ray actors of one "
            "program, or with raystate.fit (docs/howto/launch.md, Plain Ray actors)"
        )
    return Failure(
        error="RunInUseError",
        message=f"{what} Ray job {owner.job_id}{process}; {ways_out}",
        details={
            "run": run,
            "storage": storage,
            "job_id": owner.job_id,
            "node": owner.node,
            "pid": owner.pid,
            "launch": owner.launch,
            "age_s": round(age_s, 3),
            "starting": state == "starting" and not sibling,  # that one doesn't end by itself
        },
    )


# ---------------------------------------------------------------- configurations


def differences(here: Any, asked: Any, *, doubt: bool) -> dict[str, tuple[Any, Any]]:
    """The fields of two StateConfigs that differ: name -> both values. Empty if one of them is None.

    Args:
        doubt: two policies that only look the same differ, such as two functions of one name: the script may have been edited.
    """
    if here is None or asked is None:
        return {}
    pairs = {name: (getattr(here, name), getattr(asked, name)) for name in asked.__class__.model_fields}
    return {name: (one, other) for name, (one, other) in pairs.items() if one != other and (doubt or _shown(one) != _shown(other))}


def told_differences(changed: dict[str, tuple[Any, Any]]) -> str:
    """Each field with both values, for messages."""
    return ", ".join(f"{name} {_told_difference(_cut(here), _cut(asked))}" for name, (here, asked) in changed.items())


def _told_difference(here: str, asked: str) -> str:
    return f"is {here} there and {asked} here" if here != asked else f"is {here} of another launch, whose code may differ"


def _details(changed: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    return {"field": next(iter(changed)), "different": {name: tuple(map(_cut, values)) for name, values in changed.items()}}


def _cut(value: Any) -> str:
    text = _shown(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _shown(value: Any, deep: int = 6) -> str:
    """A value as each process would write it: by what it holds, without addresses and the order of sets."""
    inside: Any = value
    if deep == 0:
        return type(value).__name__
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_shown(one, deep - 1) for one in inside))}}}"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(_shown(one, deep - 1) for one in inside)})"
    if type(value).__repr__ is object.__repr__ or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        held = getattr(value, "__dict__", {})
        return f"{type(value).__name__}({', '.join(f'{name}={_shown(one, deep - 1)}' for name, one in held.items())})"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _shown_dir(value: str | os.PathLike[str] | None) -> str:
    return "the system's shared memory" if value is None else repr(os.fspath(value))
