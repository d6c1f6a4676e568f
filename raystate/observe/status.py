"""What a run is doing, as values: for `raystate status`, and for the lines on what takes long."""

from __future__ import annotations

from dataclasses import dataclass

from raystate.core.coordinator.machine import Coordinator
from raystate.core.coordinator.memory import HostView


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """One run, as its Coordinator knows it. Steps are -1 where there is none."""

    attempt: int
    lineage: str  # "": no trainers have joined this Coordinator yet
    training: bool  # the worker group of that lineage is alive
    world: int | None  # ranks of it; None: not known yet
    newest_step: int  # that a trainer has saved
    memory_step: int  # complete on all hosts
    durable_step: int
    snapshot_every: int  # steps; 0: only what becomes durable
    step_s: float | None  # seconds, as the ranks have measured; None: not yet, or the interval is a number
    snapshot_s: float | None  # that a snapshot costs the steps
    recovery: str  # phase of a restore; "idle": none is under way
    end: str  # phase of the run's end; "open": it goes on
    saves: tuple[SaveStatus, ...]
    hosts: tuple[HostStatus, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A save or a restore that processes are at. `of`: as in `Progress`. `tier`: of a restore; "": it is a save."""

    of: str
    step: int
    tier: str = ""


def under_way(machine: Coordinator) -> list[UnderWay]:
    """What goes on now: steps until they are visible, and the restore."""
    found = [UnderWay(of=str(one.save), step=one.step) for one in machine.journal.commits]
    if (job := machine.saves.running) is not None:
        found.append(UnderWay(of=job.save, step=job.key.step))
    if (choice := machine.recovery.trying) is not None and choice.step >= 0:
        found.append(UnderWay(of=choice.begins, step=choice.step, tier=choice.tier))
    return found


def status_of(machine: Coordinator, now_s: float) -> RunStatus:
    """The status at a moment of the machine's own clock."""
    group, snapshots = machine.joins.group, machine.snapshots
    settings, restore, found = machine.settings, machine.memory.restore, snapshots.interval.found
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
        recovery=machine.recovery.phase,
        end=machine.leaving.phase,
        saves=tuple(
            SaveStatus(step=key.step, phase=job.phase, since_s=now_s - job.due_s, tries=job.tries)
            for key, job in machine.saves.jobs.items()
        ),
        hosts=tuple(_host(view, now_s) for _, view in sorted(machine.memory.hosts.items())),
    )


def _host(view: HostView, now_s: float) -> HostStatus:
    return HostStatus(
        host=view.host,
        up=view.up,
        why_down=view.why_down,
        silent_s=now_s - view.heard_s,
        ranks=tuple(sorted(trainer.rank for trainer in view.trainers)),
        steps=tuple(sorted({one.step for one in view.staged})),
        nbytes=sum(one.nbytes for one in view.staged),
    )
