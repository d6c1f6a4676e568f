"""Every metric of a run, once: its name, unit and help, and who knows its value. `raystate status --json` gives them.

Names and units follow Prometheus (https://prometheus.io/docs/practices/naming/): base units, the unit at the end of the name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from raystate.observe.status import HostStatus, RunStatus

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric(Generic[_T]):
    """One metric.

    Attributes:
        name: as Prometheus has it.
        help: one sentence, without its full stop.
        of: its value in a status; None: there is none now.
    """

    name: str
    help: str
    of: Callable[[_T], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value. `host`: whose it is; "": the run's."""

    name: str
    value: float
    host: str = ""


def _step(step: int) -> int | None:
    return step if step >= 0 else None


def _behind(run: RunStatus, step: int) -> int | None:
    return run.newest_step - max(0, step) if run.newest_step >= 0 else None


# What the Coordinator knows of the run.
OF_RUNS: tuple[Metric[RunStatus], ...] = (
    Metric(name="raystate_attempt", help="number of the Coordinator's attempt", of=lambda run: run.attempt),
    Metric(name="raystate_training", help="1 while a worker group trains, else 0", of=lambda run: int(run.training)),
    Metric(name="raystate_ranks", help="ranks of the worker group", of=lambda run: run.world),
    Metric(name="raystate_newest_step", help="newest step that a trainer has saved", of=lambda run: _step(run.newest_step)),
    Metric(name="raystate_memory_step", help="newest step that is complete in memory", of=lambda run: _step(run.memory_step)),
    Metric(name="raystate_durable_step", help="newest step that is durable", of=lambda run: _step(run.durable_step)),
    Metric(
        name="raystate_steps_at_risk",
        help="steps that the loss of all trainers would repeat",
        of=lambda run: _behind(run, max(run.memory_step, run.durable_step)),
    ),
    Metric(
        name="raystate_steps_not_durable",
        help="steps that the loss of all hosts would repeat",
        of=lambda run: _behind(run, run.durable_step),
    ),
    Metric(
        name="raystate_snapshot_interval_steps",
        help="steps from one snapshot to the next",
        of=lambda run: run.snapshot_every or None,
    ),
    Metric(
        name="raystate_step_seconds", help="time that an undisturbed step takes, where it is measured", of=lambda run: run.step_s
    ),
    Metric(name="raystate_snapshot_cost_seconds", help="time that a snapshot costs the steps", of=lambda run: run.snapshot_s),
    Metric(name="raystate_saves_under_way", help="steps on their way to storage", of=lambda run: len(run.saves)),
    Metric(
        name="raystate_oldest_save_age_seconds",
        help="time since the oldest of them was due",
        of=lambda run: max((one.since_s for one in run.saves), default=None),
    ),
)
# What each host's last report says.
OF_HOSTS: tuple[Metric[HostStatus], ...] = (
    Metric(name="raystate_host_up", help="1 while the host is there, else 0", of=lambda host: int(host.up)),
    Metric(name="raystate_host_silence_seconds", help="time since the host was last heard of", of=lambda host: host.silent_s),
    Metric(name="raystate_host_snapshots", help="steps of which the host holds a piece", of=lambda host: len(host.steps)),
    Metric(name="raystate_host_snapshot_bytes", help="size of those pieces", of=lambda host: host.nbytes),
)


def samples(run: RunStatus) -> Iterator[Sample]:
    """The values that there are now, in the order of the tables."""
    for metric in OF_RUNS:
        if (value := metric.of(run)) is not None:
            yield Sample(name=metric.name, value=value)
    for of_hosts in OF_HOSTS:
        for host in run.hosts:
            if (value := of_hosts.of(host)) is not None:
                yield Sample(name=of_hosts.name, value=value, host=host.host)
