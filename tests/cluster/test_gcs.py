"""Training on a bucket: the same as on a directory, whatever its requests answer, and with few of them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors.naming import run_actors
from raystate.inspection.verification import verify_log, verify_step
from raystate.storage import find_garbage, open_storage, run_hash, visible_steps
from raystate.testing.gcs import FaultRule, GcsServer
from tests.cluster.training import STEPS, Training, wait_for

HOSTS = 2
EVERY = 5  # steps between durable saves


@pytest.fixture
def server(gcs_server: GcsServer) -> Iterator[GcsServer]:
    gcs_server.reset_counts()
    yield gcs_server
    gcs_server.clear()


def a_config(run: Any, **settings: Any) -> raystate.StateConfig:
    return raystate.StateConfig(storage=f"gs://runs/{run.run}", run=run.run, **{"save_every_steps": EVERY, **settings})


def check_clean(config: raystate.StateConfig) -> None:
    """Nothing is damaged, nothing is left over, nobody is left."""
    storage = open_storage(config.storage)
    assert verify_log(storage) == ()
    steps = raystate.Reader(config.storage).all_steps()
    reports = [verify_step(storage, step) for step in steps]
    assert [bad for report in reports for bad in report.bad] == []
    assert {report.kind for report in reports} == {"raystate"}
    assert find_garbage(storage) == []
    assert run_actors(run_hash(config.storage, config.run)) == []


@pytest.mark.long
def test_few_requests(ray_cluster: Any, server: GcsServer, make_run: Any, tmp_path: Path) -> None:
    """A committed step takes at most 8 class A requests a host, 1 per 400 MiB and 30; as many when there are many steps."""
    config = a_config(make_run(), keep_last=None, save_every_steps=2)
    training = Training(config, tmp_path, steps=62, step_s=0.3)
    shares: list[dict[str, float]] = []
    for first, last in ((12, 30), (40, 58)):  # the start's requests are not of a save
        wait_for(lambda first=first: newest(server, config) >= first, f"step {first}", failed=lambda: training.error)
        server.reset_counts()
        before = committed(server, config)
        wait_for(lambda last=last: newest(server, config) >= last, f"step {last}", failed=lambda: training.error)
        counts, steps = server.counts(), len(committed(server, config) - before)  # on a busy machine due steps give way
        per_step = {"class A": counts.class_a, "class B": counts.class_b, "lists": counts.kinds.get("list", 0)}
        shares.append({name: number / steps for name, number in per_step.items()})
        shares[-1]["too soon"] = sum(counts.too_soon.values())
    training.finish()
    for share in shares:
        sys.stdout.write(f"a committed step took {', '.join(f'{name} {value:.1f}' for name, value in share.items())}\n")
    assert all(share["class A"] <= 8 * HOSTS + 30 + 1 for share in shares)
    assert all(share["too soon"] == 0 for share in shares)
    assert shares[1]["lists"] <= shares[0]["lists"] + 1, "listings grow with the number of steps"
    assert shares[1]["class B"] <= shares[0]["class B"] + 5, "reads grow with the number of steps"


def committed(server: GcsServer, config: raystate.StateConfig) -> set[int]:
    """The steps whose markers were created, by the server's own log: asking the bucket would count."""
    found = (re.fullmatch(rf"{config.run}/(\d+)/commit_success.txt", one.name) for one in server.log() if one.kind == "upload")
    return {int(one[1]) for one in found if one}


def newest(server: GcsServer, config: raystate.StateConfig) -> int:
    return max(committed(server, config), default=0)


ANSWERS = [
    *({"mode": "status", "status": status} for status in (408, 429, 500, 502, 503, 504)),
    {"mode": "reset"},
    {"mode": "reset_after_commit"},
    {"mode": "truncate"},
]


@pytest.mark.long
def test_nothing_is_lost_whatever_requests_answer(
    ray_cluster: Any, server: GcsServer, make_run: Any, tmp_path: Path, undisturbed: list[str]
) -> None:
    """A tenth of all requests fail, in every way, and a few are never answered; a trainer dies and restores meanwhile."""
    config = a_config(make_run(), keep_last=2)
    kinds = ("upload", "list", "get_media", "get_meta", "delete", "batch")
    # One each, not all in one save: a client waits for about 20 s before it asks again.
    stalls = [FaultRule(mode="stall", kinds=(kind,), skip=15 * number, times=1) for number, kind in enumerate(kinds)]
    server.faults([*stalls, *(FaultRule(probability=0.012, seed=seed, **answer) for seed, answer in enumerate(ANSWERS))])
    training = Training(config, tmp_path, steps=STEPS, step_s=0.2, pause_at=STEPS // 2)
    training.wait_step(40)
    before, _ = training.kill_trainer(0)
    training.finish()
    steps = raystate.Reader(config.storage).all_steps()
    sys.stdout.write(f"faults played, by rule: {server.hits()}; {len(steps)} of {STEPS // EVERY} steps durable\n")
    again = training.events.newest_start()
    assert again["tier"] == "memory" and again["step"] >= before - 3, "slow storage must not hold up snapshots"
    assert all(hits > 0 for hits in server.hits()[len(stalls) :])
    server.clear()
    assert training.digests() == undisturbed
    assert steps[-1] == STEPS and set(steps) <= set(range(EVERY, STEPS + 1, EVERY))
    check_clean(config)


@pytest.mark.long
@pytest.mark.parametrize("status", [503, 401, 403, 404])
def test_an_outage(ray_cluster: Any, server: GcsServer, make_run: Any, tmp_path: Path, undisturbed: list[str], status: int) -> None:
    """Training goes on; afterwards saving goes on by itself. (How long a save waits: tests/model/test_pace.py.)"""
    config = a_config(make_run(), keep_last=None)
    reader, storage = raystate.Reader(config.storage), open_storage(config.storage)
    training = Training(config, tmp_path, steps=STEPS, step_s=0.3)
    wait_for(lambda: max(visible_steps(storage), default=0) >= EVERY, "a durable step", failed=lambda: training.error)
    with server.outage(status):
        began = training.events.newest_step()
        training.wait_step(began + 6 * EVERY)
    stood = reader.latest_step() or 0
    wait_for(lambda: (reader.latest_step() or 0) > stood, "saving to go on", failed=lambda: training.error)
    training.finish()
    for lost in training.result.lost:  # what storage had no time for
        assert "gave way" in lost and not lost.startswith(f"step {STEPS}:")
    assert training.digests() == undisturbed
    assert reader.latest_step() == STEPS
    check_clean(config)
