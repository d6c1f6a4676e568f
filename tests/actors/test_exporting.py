"""Ray is given the counts of a process: as it is now, and of counters what came since the last time. Ray itself is made up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raystate.actors import exporting
from raystate.actors.exporting import Exporter
from raystate.machine.counts import counts
from raystate.observe.metrics import Sample

Given = list[tuple[str, float, dict[str, str]]]
Make = Callable[..., Exporter]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """All that Ray was given, in order."""
    found: Given = []

    class OfRay:
        def __init__(self, name: str, *, tag_keys: tuple[str, ...], **_: Any):
            self._name, self._keys = name, set(tag_keys)

        def _take(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) <= self._keys, "Ray refuses any other tag"
            found.append((self._name, value, tags))

        set = inc = observe = _take

    monkeypatch.setattr(exporting, "EXPORT_EVERY_S", 1e6)  # only the test exports
    context = SimpleNamespace(get_job_id=lambda: "job", get_node_id=lambda: "h1")
    monkeypatch.setattr(exporting, "ray", SimpleNamespace(get_runtime_context=lambda: context, is_initialized=lambda: True))
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(exporting, kind, OfRay)
    return found


@pytest.fixture
def make(given: Given) -> Iterator[Make]:
    made: list[Exporter] = []

    def one(collect: Callable[[], Iterable[Sample]], **more: Any) -> Exporter:
        made.append(Exporter("lm", collect, **more))
        return made[-1]

    counts.take_durations()  # of the tests before
    yield one
    for exporter in made:
        exporter._ended.set()


def written(value: float, host: str = "h1") -> Sample:
    return Sample(name="raystate_written_bytes_total", value=value, host=host)


def test_of_a_counter_ray_is_given_what_came_since(make: Make, given: Given) -> None:
    values = iter([5.0, 5.0, 12.0, 3.0])  # the last: another process has begun at 0
    exporter = make(lambda: [written(next(values))])
    for _ in range(4):
        exporter.export()
    assert [(value, tags) for _, value, tags in given] == [(more, {"run": "lm", "host": "h1"}) for more in (5.0, 7.0, 3.0)]


def test_counters_of_other_hosts_and_labels_are_apart(make: Make, given: Given) -> None:
    values = iter([1.0, 4.0])

    def collect() -> list[Sample]:
        value = next(values)
        recovery = Sample(name="raystate_recoveries_total", value=value, labels={"cause": "died", "tier": "memory"})
        other = Sample(name="raystate_recoveries_total", value=2 * value, labels={"cause": "hung", "tier": "memory"})
        return [recovery, other, written(value), written(10 * value, "h2")]

    exporter = make(collect)
    exporter.export()
    exporter.export()
    assert [value for _, value, _ in given] == [1, 2, 1, 10, 3, 6, 3, 30]


def test_what_an_earlier_coordinator_has_given_is_not_given_again(make: Make, given: Given) -> None:
    """A host that it knew has counted on; a new host's count is all news."""
    values = iter([(100.0, 7.0), (104.0, 8.0)])
    exporter = make(lambda: map(written, next(values), ("old", "new")), known_before=frozenset({"old"}))
    exporter.export()
    assert [(value, tags["host"]) for _, value, tags in given] == [(7.0, "new")]
    exporter.export()
    assert [(value, tags["host"]) for _, value, tags in given[1:]] == [(4.0, "old"), (1.0, "new")]


def test_a_gauge_is_as_it_is_and_each_duration_comes_once(make: Make, given: Given) -> None:
    exporter = make(lambda: [Sample(name="raystate_newest_step", value=8)], host="h1")
    counts.took("blocked_seconds", 0.25)
    counts.took("of another version", 1.0)
    exporter.export()
    exporter.export()
    step = ("raystate_newest_step", 8, {"run": "lm", "host": ""})
    assert given == [step, ("raystate_blocked_seconds", 0.25, {"run": "lm", "host": "h1"}), step]


def test_a_failure_is_told_once_and_it_is_asked_again(make: Make, given: Given, caplog: pytest.LogCaptureFixture) -> None:
    fails = iter([True, True, False])

    def collect() -> list[Sample]:
        if next(fails):
            raise TimeoutError("no answer")
        return [written(1.0)]

    exporter = make(collect)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            exporter.export()
    assert (len(caplog.records), len(given)) == (1, 1)
