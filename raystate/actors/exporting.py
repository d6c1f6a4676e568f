"""Metrics for Prometheus, through Ray: a thread gives Ray the values that `observe.metrics` has; Ray shows them on each node's port.

A process exports what it counts itself, and the Coordinator what it knows of the run and of its HostActors, too.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge, Histogram

from raystate.machine.counts import counts
from raystate.observe.counted import process_counts
from raystate.observe.metrics import ALL, COUNTED, Metric, Sample, of_counts
from raystate.waits import EXPORT_EVERY_S

logger = logging.getLogger("raystate")

_METRICS = {one.name: one for one in ALL}
_DURATIONS = {one.counted: one for one in COUNTED if one.kind == "histogram"}


class Exporter:
    """Gives Ray the samples of one process, every few seconds, until it is ended or the process leaves Ray.

    Args:
        run: the label of all that is given.
        host: that of the durations that this process has measured.
        collect: what there is now; an error of it is told once, and it is asked again.
        known_before: hosts whose counters begin at what is seen of them first: an earlier Coordinator has given that to Ray.
    """

    def __init__(
        self, run: str, collect: Callable[[], Iterable[Sample]], *, host: str = "", known_before: frozenset[str] = frozenset()
    ):
        self.run = run
        self._host = host
        self._collect = collect
        self._known_before = known_before
        self._made: dict[str, Any] = {}
        self._seen: dict[tuple[str, ...], float] = {}  # counters, as they were last
        self._job = ray.get_runtime_context().get_job_id()
        self._ended = threading.Event()
        self._told = False
        self._turn = threading.Lock()
        threading.Thread(target=self._go, name="raystate-metrics", daemon=True).start()

    @property
    def lives(self) -> bool:
        """Whether it still gives something to Ray."""
        return not self._ended.is_set()

    def _go(self) -> None:
        while not self._ended.wait(EXPORT_EVERY_S):
            if not ray.is_initialized() or ray.get_runtime_context().get_job_id() != self._job:
                self._ended.set()
                return
            self.export()

    def export(self) -> None:
        """Give Ray what there is now. It goes nowhere at once: Ray's own threads send it."""
        with self._turn:
            try:
                for sample in self._collect():
                    self._give(sample)
                for name, seconds in counts.take_durations():
                    if (metric := _DURATIONS.get(name)) is not None:
                        self._of(metric).observe(seconds, {"run": self.run, "host": self._host})
            except Exception as error:
                if not self._told:
                    self._told = True
                    logger.warning("metrics can't be given to Ray now: %s: %s", type(error).__name__, error)

    def _give(self, sample: Sample) -> None:
        metric = _METRICS[sample.name]
        tags = {"run": self.run, "host": sample.host, **sample.labels}
        if metric.kind == "gauge":
            self._of(metric).set(sample.value, tags)
            return
        key = (sample.name, sample.host, *sample.labels.values())
        before = self._seen.get(key, sample.value if sample.host in self._known_before else 0.0)
        self._seen[key] = sample.value
        more = sample.value - before if sample.value >= before else sample.value  # a new process counts from 0
        if more > 0:
            self._of(metric).inc(more, tags)

    def _of(self, metric: Metric) -> Any:
        if metric.name not in self._made:
            keys = ("run", "host", *(label for label in metric.labels if label != "host"))
            kind: Callable[..., Any] = {"gauge": Gauge, "counter": Counter, "histogram": Histogram}[metric.kind]
            more = {"boundaries": list(metric.buckets)} if metric.buckets else {}
            self._made[metric.name] = kind(metric.name, description=metric.help, tag_keys=keys, **more)
        return self._made[metric.name]


class _OfThisProcess:
    """The one exporter of a process that trains or reads."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._exporter: Exporter | None = None

    def begin(self, run: str) -> None:
        """Export what this process counts from now on, unless that is done already. `run`: that it trains; "": it only reads."""
        with self._guard:
            if self._exporter is not None and self._exporter.lives:
                self._exporter.run = run or self._exporter.run
                return
            host = ray.get_runtime_context().get_node_id()
            self._exporter = Exporter(run, lambda: of_counts(process_counts(), host), host=host)


this_process = _OfThisProcess()
