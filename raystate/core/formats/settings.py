"""What the Coordinator's decisions depend on, besides events and the clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the Coordinator's decisions depend on. Seconds are durations, never points in time."""

    run: str
    storage: str
    save_every_s: float | None = None  # time-based saves, decided once for all hosts; None: only the trainers' step rule
    save_every_steps: int | None = None  # the trainers' step rule: they decide by it, and the status tells it
    save_measured: bool = False  # no rule says so: save_every_s counts until what a save costs was measured
    save_when_idle: bool = False  # with save_every_s: only while no save is under way, and again as soon as none is
    save_first: bool = False  # the policy wants a first durable step: if the promised one is lost, it is due again
    snapshot_every_steps: int | None = None  # None: as often as save_overhead allows
    save_overhead: float = (
        0.03  # share of the training's time that snapshots and durable saves may cost, where no number fixes them
    )
    snapshot_slots: int = 3  # per trainer
    replicas: int = 1  # copies of each host's snapshots on other hosts
    copy_timeout_s: float = 30.0  # the copies of one snapshot; then it counts without those that are not there
    start_timeout_s: float = 300.0  # all ranks of a group have joined
    barrier_timeout_s: float = 120.0  # all ranks have called save / restore / close for the same step
    save_timeout_s: float = 600.0  # one durable save, from staged to published
    restore_timeout_s: float = 600.0
    host_timeout_s: float = 10.0  # a HostActor that says nothing for so long counts as down
    assume_dead_after_s: float = 86400.0  # an older attempt that has not come back for so long never will
    hang_timeout_s: float | None = None  # a trainer without a new step for so long is ended; None: it is only named
    idle_timeout_s: float = 900.0  # no trainer for so long: make the newest snapshot durable and end
    stop_margin_steps: int = 2
    launched: bool = False  # a launcher has begun the run, and starts its trainers again


def most_wait_s(barrier_timeout_s: float, hang_timeout_s: float | None) -> float:
    """For so long steps that are due may hold up a rank. Others wait for it meanwhile, and it must
    not look as if it hung."""
    return min(30.0, barrier_timeout_s / 4, (hang_timeout_s or 60.0) / 2)
