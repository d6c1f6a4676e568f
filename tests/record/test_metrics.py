"""The table of metrics."""

from __future__ import annotations

import dataclasses
import re

from raystate.observe.metrics import OF_HOSTS, OF_RUNS, Sample, samples
from raystate.observe.status import HostStatus, RunStatus, SaveStatus

HOST = HostStatus(host="h1", up=True, why_down="", silent_s=0.5, ranks=(0,), steps=(7, 8), nbytes=64)
BEGINS = RunStatus(
    attempt=1, lineage="", training=False, world=None, newest_step=-1, memory_step=-1, durable_step=-1, snapshot_every=0,
    step_s=None, snapshot_s=None,    recovery="idle", end="open", saves=(), hosts=(),
)  # fmt: skip


def of(run: RunStatus) -> dict[str, float]:
    return {one.name: one.value for one in samples(run) if not one.host}


def test_what_is_not_known_is_left_out() -> None:
    assert of(BEGINS) == {"raystate_attempt": 1, "raystate_training": 0, "raystate_saves_under_way": 0}


def test_what_a_loss_would_repeat() -> None:
    run = dataclasses.replace(BEGINS, world=2, newest_step=9, memory_step=8, durable_step=5)
    assert (of(run)["raystate_steps_at_risk"], of(run)["raystate_steps_not_durable"]) == (1, 4)
    run = dataclasses.replace(run, memory_step=-1)
    assert of(run)["raystate_steps_at_risk"] == 4  # memory has nothing
    run = dataclasses.replace(run, durable_step=-1)
    assert of(run)["raystate_steps_not_durable"] == 9  # nothing anywhere


def test_saves_and_hosts() -> None:
    saves = tuple(SaveStatus(step=step, phase="queued", since_s=float(step), tries=1) for step in (3, 9))
    run = dataclasses.replace(BEGINS, saves=saves, hosts=(HOST, dataclasses.replace(HOST, host="h2", up=False)))
    assert (of(run)["raystate_saves_under_way"], of(run)["raystate_oldest_save_age_seconds"]) == (2, 9.0)
    found = [one for one in samples(run) if one.host]
    assert Sample(name="raystate_host_up", value=0, host="h2") in found
    assert Sample(name="raystate_host_snapshot_bytes", value=64, host="h1") in found
    assert len(found) == 2 * len(OF_HOSTS)


def test_names_are_prometheus() -> None:
    names = [one.name for one in (*OF_RUNS, *OF_HOSTS)]
    assert len({*names}) == len(names)
    assert all(re.fullmatch(r"raystate(_[a-z]+)+", name) for name in names)
    assert not [name for name in names if name.endswith(("_s", "_mb", "_ms", "_total"))]  # base units; nothing here is a counter
