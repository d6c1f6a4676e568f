"""What a run is doing, as values: for `raystate status`, and for the lines on what takes long."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from raystate.core.coordinator.machine import Coordinator
from raystate.core.coordinator.memory import HostView
from raystate.core.coordinator.slow_ranks import SlowRank
from raystate.core.coordinator.tenancy import Owner
from raystate.observe.pace import Pace
from raystate.observe.progress import Going


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStatus:
    """A step on its way to storage. phase: "queued", "writing", "packaging" or "committing"."""

    step: int
    phase: str
    since_s: float  # seconds since it was due
    tries: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStatus:
    """One host, by its last report."""

    host: str
    up: bool
    why_down: str
    silent_s: float  # seconds since it was last heard of
    ranks: tuple[int, ...]  # of the trainers on it
    steps: tuple[int, ...]  # of which it holds a piece in memory, ascending
    nbytes: int  # of those pieces
    leaves_in_s: float | None = None  # seconds until it is to be gone, below 0 where it should be; None: nothing has announced that
    why_leaves: str = ""
    counts: tuple[tuple[str, float], ...] = ()  # what its HostActor has counted since it began, see `observe.metrics`
    machine: str = ""  # its name; "": not known


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run, as its Coordinator knows it. Steps are -1 where there is none. A host that has left as announced is none of its hosts."""

    attempt: int
    lineage: str  # "": no trainers have joined this Coordinator yet
    training: bool  # the worker group of that lineage is alive
    world: int | None  # ranks of it; None: not known yet
    newest_step: int  # that a trainer has saved
    memory_step: int  # complete on all hosts
    durable_step: int
    snapshot_every: int  # steps; 0: only what becomes durable
    step_s: float | None  # seconds, as the ranks have measured of late, beside no copy; None: not yet, or the interval is a number
    snapshot_s: float | None  # that a snapshot costs the steps
    save_every_s: float | None  # seconds from one durable save to the next, where a time says so; None: something else does
    save_every_steps: int | None  # steps from one to the next, where a number says so
    save_s: float | None  # seconds that a durable save costs the steps; None: not known
    recovery: str  # phase of a restore; "idle": none is under way
    end: str  # phase of the run's end; "open": it goes on
    saves: tuple[SaveStatus, ...]
    hosts: tuple[HostStatus, ...]
    steps_per_s: float | None = None  # over the last minute
    newest_age_s: float | None = None  # seconds since a rank came to a new step
    snapshot_age_s: float | None = None  # seconds since the newest step in memory, or durable, changed, or since the attempt began
    durable_age_s: float | None = None
    trains_since: float | None = None  # when the newest group's ranks had joined, in seconds since 1970; None: none has
    counts: tuple[tuple[str, float], ...] = ()  # what the Coordinator's process has counted since it began
    goodput: tuple[tuple[str, float], ...] = ()  # (cause, share of the time since the attempt began); empty: not known
    restarts: int | None = None  # of the trainers, in all attempts; None: not known yet
    storage_problem: str = ""  # the newest failure of storage since a step became durable, or of a request now; "": there is none
    slow: tuple[SlowRank, ...] = ()  # ranks that take longer than the others, the slowest first


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """One run of a cluster.

    Attributes:
        run: its name; "" if its Coordinator does not answer.
        storage: its URL.
        owner: whose it is.
        status: None: it has not got its storage yet, or its Coordinator does not answer.
        going: saves and restores under way, with what their processes have said of their bytes.
        problem: why there is no status.
        name: of its Coordinator.
        release_s: seconds in which it has answered a release.
        said: the newest lines of its log, oldest first, as they were printed; those that come with each save are left out.
    """

    run: str = ""
    storage: str = ""
    owner: Owner | None = None
    status: RunStatus | None = None
    going: tuple[Going, ...] = ()
    problem: str = ""
    name: str = ""
    release_s: float = 0.0
    said: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A save or a restore that processes are at.

    Attributes:
        of: as in `Progress`.
        tier: of a restore; "": it is a save.
        since_s: when the save's first try began, by the machine's clock; None: when it is seen first.
    """

    of: str
    step: int
    tier: str = ""
    since_s: float | None = field(default=None, compare=False)


def under_way(machine: Coordinator) -> list[UnderWay]:
    """What goes on now: steps until they are visible, and the restore."""
    found = [UnderWay(of=str(one.save), step=one.step) for one in machine.journal.commits]
    if (job := machine.saves.running) is not None:
        found.append(UnderWay(of=job.save, step=job.key.step, since_s=job.first_s))
    if (choice := machine.recovery.trying) is not None and choice.step >= 0:
        found.append(UnderWay(of=choice.begins, step=choice.step, tier=choice.tier))
    return found


def status_of(machine: Coordinator, now_s: float, pace: Pace, counts: tuple[tuple[str, float], ...] = ()) -> RunStatus:
    """The status at a moment of the machine's own clock.

    Args:
        machine: decides.
        now_s: that moment.
        pace: of this machine's steps.
        counts: of this process.
    """
    group, snapshots = machine.joins.group, machine.snapshots
    settings, restore = machine.settings, machine.memory.restore
    found = snapshots.interval.measure(group.seen.values() if group is not None else ())
    # A restored snapshot stays in memory until a newer one is complete there.
    restored = restore.step if restore is not None and restore.lineage and group is not None and restore.by == group.lineage else -1
    return RunStatus(
        attempt=machine.attempt,
        lineage=group.lineage if group is not None else "",
        training=group is not None and group.alive,
        world=group.world if group is not None else None,
        newest_step=group.newest if group is not None else -1,
        memory_step=max(snapshots.stable, restored),
        durable_step=machine.journal.durable_step,
        snapshot_every=0 if settings.snapshot_every_steps == 0 else snapshots.interval.steps,
        step_s=found.step_s if found is not None else None,
        snapshot_s=found.snapshot_s if found is not None else None,
        save_every_s=every_s if (every_s := snapshots.interval.durable.every_s) < math.inf else None,
        save_every_steps=settings.save_every_steps,
        save_s=snapshots.interval.durable.cost_s,
        recovery=machine.recovery.phase,
        end=machine.leaving.phase,
        saves=tuple(
            SaveStatus(step=key.step, phase=job.phase, since_s=now_s - job.due_s, tries=job.tries)
            for key, job in machine.saves.jobs.items()
        ),
        hosts=tuple(
            _host(view, machine.notices.end_of(host), machine.memory.machines.get(host, ""), now_s)
            for host, view in sorted(machine.memory.hosts.items())
            if host not in machine.notices.left
        ),
        steps_per_s=pace.steps_per_s(machine, now_s),
        newest_age_s=now_s - max(group.moved_s.values()) if group is not None and group.moved_s else None,
        snapshot_age_s=pace.snapshot_age_s(now_s),
        durable_age_s=pace.durable_age_s(now_s),
        trains_since=pace.trains_since,
        counts=counts,
        storage_problem=machine.journal.problem,
        slow=machine.slow_ranks.slow,
    )


def _host(view: HostView, end: tuple[float, str] | None, machine: str, now_s: float) -> HostStatus:
    return HostStatus(
        host=view.host,
        up=view.up,
        why_down=view.why_down,
        silent_s=now_s - view.heard_s,
        ranks=tuple(sorted(trainer.rank for trainer in view.trainers)),
        steps=tuple(sorted({one.step for one in view.staged})),
        nbytes=sum(one.nbytes for one in view.staged),
        leaves_in_s=end[0] - now_s if end is not None else None,
        why_leaves=end[1] if end is not None else "",
        counts=view.counts,
        machine=machine,
    )
