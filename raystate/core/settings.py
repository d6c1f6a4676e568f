"""What the Coordinator's decisions depend on, besides events and the clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the Coordinator's decisions depend on. Seconds are durations, never points in time."""

    run: str
    storage: str
    save_every_s: float | None = None  # time-based saves, decided once for all hosts; None: only the trainers' step rule
    save_when_idle: bool = False  # with save_every_s: only while no save is under way, and again as soon as none is
    snapshot_every_steps: int = 1
    snapshot_slots: int = 3  # per trainer
    start_timeout_s: float = 300.0  # all ranks of a group have joined
    barrier_timeout_s: float = 120.0  # all ranks have called save / restore / close for the same step
    save_timeout_s: float = 600.0  # one durable save, from staged to published
    restore_timeout_s: float = 600.0
    host_timeout_s: float = 10.0  # a HostActor that says nothing for so long counts as down
    assume_dead_after_s: float = 86400.0  # an older attempt that has not come back for so long never will
    idle_timeout_s: float = 900.0  # no trainer for so long: make the newest snapshot durable and end
    stop_margin_steps: int = 2
