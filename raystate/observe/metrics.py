"""Every metric of a run, once: its name, kind, labels, unit and help, and who knows its value.

`raystate.actors.exporting` gives them to Ray, which shows them to Prometheus with `ray_` before the name. `raystate status --json` lists
those that have a value. Names and units follow Prometheus (https://prometheus.io/docs/practices/naming/): base units, the unit at the
end of the name, and then `_total` of a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeAlias, TypeVar

from raystate.machine.counts import FAILURES, REQUESTS, RETRIES
from raystate.observe.counted import MEMORY_CAP, MEMORY_USED
from raystate.observe.status import HostStatus, RunStatus

_T = TypeVar("_T")
_UNITS = ("seconds", "bytes", "ratio")

Value: TypeAlias = float | Mapping[tuple[str, ...], float] | None
"""Of a metric with labels: by their values. None: there is none now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: without Ray's prefix.
        help: one sentence, without its full stop.
        kind: as Prometheus has it.
        labels: beside `run` and `host`.
        buckets: of a histogram: their upper bounds.
    """

    name: str
    help: str
    kind: Literal["gauge", "counter", "histogram"] = "gauge"
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def unit(self) -> str:
        """ "": a plain number."""
        return next((unit for unit in _UNITS if unit in self.name.split("_")), "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known(Metric, Generic[_T]):
    """A metric whose value a status holds.

    Attributes:
        of: the value.
    """

    of: Callable[[_T], Value]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed(Metric):
    """A metric that processes count.

    Attributes:
        counted: the name in `machine.counts`.
    """

    counted: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One value. `host`: whose it is; "": the run's."""

    name: str
    value: float
    host: str = ""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


def _step(step: int) -> int | None:
    return step if step >= 0 else None


def _behind(run: RunStatus, step: int) -> int | None:
    return run.newest_step - max(0, step) if run.newest_step >= 0 else None


def interval_s(run: RunStatus) -> float | None:
    """Seconds from one durable save to the next: by the pace, where a number of steps decides."""
    if run.save_every_s is None and run.save_every_steps and run.training and run.steps_per_s:
        return run.save_every_steps / run.steps_per_s
    return run.save_every_s


def _interval_steps(run: RunStatus) -> float | None:
    """By the pace, where a time decides."""
    if run.save_every_s is not None and run.training and run.steps_per_s:
        return run.save_every_s * run.steps_per_s
    return run.save_every_steps


def _slowest(run: RunStatus, host: HostStatus) -> float:
    """Also where no rank is slow: Ray goes on to show what it was given last."""
    return max((one.by_s for one in run.slow if one.host == host.host), default=0.0)


# What the Coordinator knows of the run.
OF_RUNS: tuple[Known[RunStatus], ...] = (
    Known(
        name="raystate_attempt",
        help="number of the Coordinator's attempt: it grows where one was lost and replaced, and where an ended run is used again",
        of=lambda run: run.attempt,
    ),
    Known(name="raystate_training", help="1 while a worker group trains, else 0", of=lambda run: int(run.training)),
    Known(
        name="raystate_training_began_timestamp_seconds",
        help="when the newest worker group's ranks had joined, in seconds since 1970",
        of=lambda run: run.trains_since,
    ),
    Known(name="raystate_ranks", help="ranks of the worker group", of=lambda run: run.world),
    Known(name="raystate_newest_step", help="newest step that a trainer has saved", of=lambda run: _step(run.newest_step)),
    Known(name="raystate_memory_step", help="newest step that is complete in memory", of=lambda run: _step(run.memory_step)),
    Known(name="raystate_durable_step", help="newest step that is durable", of=lambda run: _step(run.durable_step)),
    Known(
        name="raystate_steps_per_second",
        help="steps of the training in a second, over the last minute",
        of=lambda run: run.steps_per_s if run.training else 0.0,
    ),
    Known(
        name="raystate_snapshot_age_seconds",
        help="time since another step was complete in memory, or since the attempt began",
        of=lambda run: run.snapshot_age_s,
    ),
    Known(
        name="raystate_durable_age_seconds",
        help="time since another step was durable, or since the attempt began",
        of=lambda run: run.durable_age_s,
    ),
    Known(
        name="raystate_steps_at_risk",
        help="steps that the loss of all trainers would repeat",
        of=lambda run: _behind(run, max(run.memory_step, run.durable_step)),
    ),
    Known(
        name="raystate_steps_not_durable",
        help="steps that the loss of all hosts would repeat",
        of=lambda run: _behind(run, run.durable_step),
    ),
    Known(
        name="raystate_snapshot_interval_steps",
        help="steps from one snapshot to the next",
        of=lambda run: run.snapshot_every or None,
    ),
    Known(
        name="raystate_step_seconds",
        help="time that a step takes while no snapshot is copied, of the newest that were measured",
        of=lambda run: run.step_s,
    ),
    Known(name="raystate_snapshot_cost_seconds", help="time that a snapshot costs the steps", of=lambda run: run.snapshot_s),
    Known(
        name="raystate_durable_interval_seconds",
        help="time from one durable save to the next: what decides, or what the steps that decide take at the pace of the last minute",
        of=interval_s,
    ),
    Known(
        name="raystate_durable_interval_steps",
        help="steps from one durable save to the next: what decides, or as many as the time that decides has at that pace",
        of=_interval_steps,
    ),
    Known(name="raystate_durable_cost_seconds", help="time that a durable save costs the steps", of=lambda run: run.save_s or None),
    Known(
        name="raystate_storage_works",
        help="0 while storage fails or stands still: it has since the newest durable step; else 1",
        of=lambda run: int(not run.storage_problem),
    ),
    Known(name="raystate_saves_under_way", help="steps on their way to storage", of=lambda run: len(run.saves)),
    Known(
        name="raystate_oldest_save_age_seconds",
        help="time since the oldest of them was due; 0: there are none",
        of=lambda run: max((one.since_s for one in run.saves), default=0.0),
    ),
    Known(
        name="raystate_goodput_ratio",
        help="share of the time since this attempt of the Coordinator began that went there, by cause; `steps` is productive",
        labels=("cause",),
        of=lambda run: {(cause,): share for cause, share in run.goodput},
    ),
    Known(
        name="raystate_slow_ranks",
        help="ranks that take longer a step than the others",
        of=lambda run: len({one.rank for one in run.slow}),
    ),
    Known(
        name="raystate_slow_rank_seconds",
        help="by how much the slowest of the host's ranks takes longer a step than the others; 0: none does",
        labels=("host",),
        of=lambda run: {(host.host,): _slowest(run, host) for host in run.hosts},
    ),
)
# What each host's last report says.
OF_HOSTS: tuple[Known[HostStatus], ...] = (
    Known(name="raystate_host_up", help="1 while the host is there, else 0", of=lambda host: int(host.up)),
    Known(name="raystate_host_silence_seconds", help="time since the host was last heard of", of=lambda host: host.silent_s),
    Known(name="raystate_host_snapshots", help="steps of which the host holds a piece", of=lambda host: len(host.steps)),
    Known(name="raystate_host_snapshot_bytes", help="size of those pieces", of=lambda host: host.nbytes),
    Known(
        name="raystate_host_memory_used_bytes",
        help="shared memory of the host that its runs have reserved, and the buffers of their writes",
        of=lambda host: dict(host.counts).get(MEMORY_USED),
    ),
    Known(
        name="raystate_host_memory_cap_bytes",
        help="how much that may be: `host_memory`",
        of=lambda host: dict(host.counts).get(MEMORY_CAP),
    ),
)
# Counts of the Coordinator, the HostActors, the trainers and Readers since each began.
_SECONDS = (*(float(f"{number}e{power}") for power in range(-3, 3) for number in (1, 2, 5)), 1000.0)
COUNTED: tuple[Summed, ...] = (
    Summed(
        name="raystate_blocked_seconds",
        help="time that one call of `save` held its trainer up",
        kind="histogram",
        buckets=_SECONDS,
        counted="blocked_seconds",
    ),
    Summed(
        name="raystate_durable_seconds",
        help="time from the first order to write a step until it was durable",
        kind="histogram",
        buckets=_SECONDS,
        counted="durable_seconds",
    ),
    Summed(name="raystate_saves_lost_total", help="saves that were given up", kind="counter", counted="saves_lost"),
    Summed(
        name="raystate_recoveries_total",
        help=(
            "restarts: by `cause`, which is what ended the trainers (`died`, `hung`, `raised`, `interrupted`, `ended`, `unknown`, or "
            "`host`: it went away), or `coordinator`: it was replaced, and they trained on; and by the `tier` that they went on from, "
            "`none` where they ended before that, `kept` where the Coordinator was replaced"
        ),
        kind="counter",
        labels=("cause", "tier"),
        counted="recoveries",
    ),
    Summed(
        name="raystate_copied_bytes_total",
        help="array bytes that were copied into host memory: by trainers (`memory`), and from other hosts (`peer`)",
        kind="counter",
        labels=("tier",),
        counted="copied_bytes",
    ),
    Summed(
        name="raystate_written_bytes_total",
        help="bytes of arrays that were written to storage, as they lie there",
        kind="counter",
        counted="written_bytes",
    ),
    Summed(
        name="raystate_read_bytes_total",
        help="bytes that restores have read, by tier: `memory`, `peer`, `storage`; those of `storage` as they lie there",
        kind="counter",
        labels=("tier",),
        counted="read_bytes",
    ),
    Summed(
        name="raystate_storage_requests_total",
        help="operations that storage was asked for, by kind: `read`, `write`, `list`, `delete`",
        kind="counter",
        labels=("kind",),
        counted=REQUESTS,
    ),
    Summed(name="raystate_storage_retries_total", help="those that were tried again", kind="counter", counted=RETRIES),
    Summed(name="raystate_storage_failures_total", help="those that failed for good", kind="counter", counted=FAILURES),
)
ALL: tuple[Metric, ...] = (*OF_RUNS, *OF_HOSTS, *COUNTED)
_BY_COUNT = {one.counted: one for one in COUNTED}


def samples(run: RunStatus) -> Iterator[Sample]:
    """The values that there are now, in the order of the tables."""
    for metric in OF_RUNS:
        yield from _samples(metric, metric.of(run))
    for of_hosts in OF_HOSTS:
        for host in run.hosts:
            yield from _samples(of_hosts, of_hosts.of(host), host.host)
    yield from of_counts(run.counts)
    for host in run.hosts:
        yield from of_counts(host.counts, host.host)


def of_counts(counted: Iterable[tuple[str, float]], host: str = "") -> Iterator[Sample]:
    """The samples of a process's counts."""
    for name, value in counted:
        first, *labels = name.split("/")
        if (metric := _BY_COUNT.get(first)) is not None and len(labels) == len(metric.labels):
            yield Sample(name=metric.name, value=value, host=host, labels=dict(zip(metric.labels, labels, strict=True)))


def _samples(metric: Metric, value: Value, host: str = "") -> Iterator[Sample]:
    if isinstance(value, Mapping):
        for labels, one in value.items():
            named = dict(zip(metric.labels, labels, strict=True))
            yield Sample(name=metric.name, value=one, host=named.pop("host", host), labels=named)
    elif value is not None:
        yield Sample(name=metric.name, value=value, host=host)
