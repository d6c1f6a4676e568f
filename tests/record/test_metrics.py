"""The table of metrics."""

from __future__ import annotations

import dataclasses
import re

from raystate.core.coordinator.slow_ranks import SlowRank
from raystate.core.formats.names import HostId
from raystate.machine.counts import KEPT, ProcessCounts
from raystate.observe.counted import MEMORY_CAP, MEMORY_USED
from raystate.observe.metrics import ALL, COUNTED, OF_HOSTS, Sample, of_counts, samples
from raystate.observe.status import HostStatus, RunStatus, SaveStatus

HOST = HostStatus(host="h1", up=True, why_down="", silent_s=0.5, ranks=(0,), steps=(7, 8), nbytes=64)
BEGINS = RunStatus(
    attempt=1, lineage="", training=False, world=None, newest_step=-1, memory_step=-1, durable_step=-1, snapshot_every=0,
    step_s=None, snapshot_s=None, save_every_s=None, save_every_steps=None, save_s=None, recovery="idle", end="open", saves=(), hosts=(),
)  # fmt: skip


def of(run: RunStatus) -> dict[str, float]:
    return {one.name: one.value for one in samples(run) if not one.host}


def test_what_is_not_known_is_left_out() -> None:
    known = {"raystate_attempt": 1, "raystate_training": 0, "raystate_steps_per_second": 0}  # Ray goes on to show an old value
    known |= {"raystate_saves_under_way": 0, "raystate_oldest_save_age_seconds": 0, "raystate_slow_ranks": 0}
    assert of(BEGINS) == {**known, "raystate_storage_works": 1}


def test_what_a_loss_would_repeat() -> None:
    run = dataclasses.replace(BEGINS, world=2, newest_step=9, memory_step=8, durable_step=5)
    assert (of(run)["raystate_steps_at_risk"], of(run)["raystate_steps_not_durable"]) == (1, 4)
    run = dataclasses.replace(run, memory_step=-1)
    assert of(run)["raystate_steps_at_risk"] == 4  # memory has nothing
    run = dataclasses.replace(run, durable_step=-1)
    assert of(run)["raystate_steps_not_durable"] == 9  # nothing anywhere


def test_a_time_between_durable_saves_and_what_one_costs() -> None:
    run = of(dataclasses.replace(BEGINS, save_every_s=300.0, save_s=1.5))
    assert (run["raystate_durable_interval_seconds"], run["raystate_durable_cost_seconds"]) == (300.0, 1.5)


def test_the_interval_of_durable_saves_is_told_in_both_units() -> None:
    trains = dataclasses.replace(BEGINS, training=True, steps_per_s=2.0)
    for rule in ({"save_every_s": 30.0}, {"save_every_steps": 60}):
        run = of(dataclasses.replace(trains, **rule))
        assert (run["raystate_durable_interval_seconds"], run["raystate_durable_interval_steps"]) == (30.0, 60)
    stands = of(dataclasses.replace(trains, save_every_steps=60, training=False))
    assert "raystate_durable_interval_seconds" not in stands, "no pace says how long they take"


def test_storage_that_fails() -> None:
    assert of(dataclasses.replace(BEGINS, storage_problem="it answers 503"))["raystate_storage_works"] == 0


def test_saves_and_hosts() -> None:
    saves = tuple(SaveStatus(step=step, phase="queued", since_s=float(step), tries=1) for step in (3, 9))
    counts = ((MEMORY_CAP, 100.0), (MEMORY_USED, 64.0))
    hosts = tuple(dataclasses.replace(HOST, host=name, up=name == "h1", counts=counts) for name in ("h1", "h2"))
    run = dataclasses.replace(BEGINS, saves=saves, hosts=hosts)
    assert (of(run)["raystate_saves_under_way"], of(run)["raystate_oldest_save_age_seconds"]) == (2, 9.0)
    found = [one for one in samples(run) if one.host]
    assert Sample(name="raystate_host_up", value=0, host="h2") in found
    assert Sample(name="raystate_host_snapshot_bytes", value=64, host="h1") in found
    assert len(found) == 2 * (len(OF_HOSTS) + 1), "one of the run is of each host"


def test_a_slow_rank_is_of_its_host() -> None:
    slow = tuple(
        SlowRank(rank=rank, host=HostId("h2"), section=where, by_s=by_s, since_step=8)
        for rank, where, by_s in ((2, "data", 0.03), (3, "data", 0.02), (3, "save()", 0.01))
    )
    run = dataclasses.replace(BEGINS, slow=slow, hosts=(HOST, dataclasses.replace(HOST, host="h2")))
    assert of(run)["raystate_slow_ranks"] == 2
    found = [one for one in samples(run) if one.name == "raystate_slow_rank_seconds"]
    assert [(one.host, one.value, one.labels) for one in found] == [("h1", 0.0, {}), ("h2", 0.03, {})]


def test_what_processes_have_counted_has_its_labels() -> None:
    counts = ProcessCounts()
    counts.add("recoveries/died/memory")
    counts.add("recoveries/died/memory")
    counts.add("written_bytes", 5)
    run = dataclasses.replace(BEGINS, counts=counts.sums(), hosts=(dataclasses.replace(HOST, counts=(("written_bytes", 7.0),)),))
    found = [one for one in samples(run) if one.name.endswith("_total")]
    assert found == [
        Sample(name="raystate_recoveries_total", value=2, labels={"cause": "died", "tier": "memory"}),
        Sample(name="raystate_written_bytes_total", value=5),
        Sample(name="raystate_written_bytes_total", value=7, host="h1"),
    ]
    assert list(of_counts([("written_bytes/x", 1.0), ("recoveries/died", 1.0), ("of a later version", 1.0)])) == []


def test_durations_are_taken_once_and_never_pile_up() -> None:
    counts = ProcessCounts()
    for number in range(KEPT + 5):
        counts.took("blocked_seconds", float(number))
    taken = counts.take_durations()
    assert (len(taken), taken[0], counts.take_durations()) == (KEPT, ("blocked_seconds", 5.0), [])


def test_names_are_prometheus() -> None:
    assert len({one.name for one in ALL}) == len(ALL)
    assert all(re.fullmatch(r"raystate(_[a-z]+)+", one.name) for one in ALL)
    assert [one.name for one in ALL if one.name.endswith("_total")] == [one.name for one in COUNTED if one.kind == "counter"]
    base = [one.name.removesuffix("_total") for one in ALL]
    assert not [name for name in base if name.endswith(("_s", "_mb", "_ms"))]
    assert all(name.endswith(("_seconds", "_bytes", "_ratio")) for name, one in zip(base, ALL, strict=True) if one.unit)


def test_a_histogram_has_buckets_and_nothing_else_has() -> None:
    assert all(bool(one.buckets) == (one.kind == "histogram") for one in ALL)
    assert all(list(one.buckets) == sorted(one.buckets) and min(one.buckets, default=1) > 0 for one in ALL)
