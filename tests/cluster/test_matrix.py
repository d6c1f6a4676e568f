"""kill -9 of each kind of process in each phase of a save: the run ends by itself, bit-equal to the undisturbed one.

A run takes one death of each kind, each in another phase; the runs together are the whole matrix. By default one of them is played, drawn
by a seed that is printed (RAYSTATE_SEED=n plays it again); RAYSTATE_ALL=1 plays all.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster import strikes
from tests.cluster.strikes import PHASES, VICTIMS, came_of, held, strike
from tests.cluster.training import NODE, NODES, STEPS, Driver, Training, wait_for

ROUNDS = range(len(PHASES)) if os.environ.get("RAYSTATE_ALL") else [strikes.SEED % len(PHASES)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("turn", ROUNDS)
def test_one_death_of_each_kind(turn: int, ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str]) -> None:
    run = make_run()
    config = raystate.StateConfig(
        storage=run.storage, run=run.run, save_every_steps=5, barrier_timeout_s=60.0, start_timeout_s=60.0
    )
    training = Training(config, tmp_path / "out", steps=STEPS)
    training.wait_step(6)
    # A trainer twice, in calm training: at steps of 0.2 s at most one is repeated.
    for rank in (1, 0):
        starts = training.events.starts()
        before, _ = training.kill_trainer(rank)
        wait_for(lambda starts=starts: training.events.starts() > starts, "a start", failed=lambda: training.error)
        start = training.events.newest_start()
        assert (start["tier"], start["step"]) in (("memory", before - 1), ("memory", before), ("memory", before + 1))
        training.wait_step(before + 8)
    came: dict[tuple[str, str], str] = {}
    victims = list(VICTIMS)
    random.Random(turn).shuffle(victims)
    try:
        for victim in victims:
            phase = PHASES[(VICTIMS.index(victim) + turn) % len(PHASES)]
            starts = training.events.starts()
            before = strike(training, victim, phase, ray_cluster)
            came[victim, phase] = came_of(training, before)
            start = training.events.newest_start()
            if victim in ("HostActor", "Coordinator"):
                assert training.events.starts() == starts, "the trainers should not have noticed"
            elif victim == "node":
                assert start["tier"] == "storage"
            else:
                assert start["tier"] == "memory"
                # Steps are skipped while an actor is being restarted, so the effective interval may be some steps.
                assert before - start["step"] <= 4
        result = training.finish()
    finally:
        while len(ray_cluster.list_all_nodes()) < NODES:
            ray_cluster.add_node(**NODE)
        ray_cluster.wait_for_nodes()
    assert training.digests() == undisturbed
    assert result.step == raystate.Reader(config.storage).latest_step() == STEPS
    assert len(result.recoveries) == training.events.starts() - 1
    assert run_actors(run_hash(config.storage, config.run)) == []
    strikes.played.update(came)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("phase", [PHASES[turn] for turn in ROUNDS])
@pytest.mark.parametrize("victim", ["driver", "cluster"])
def test_a_new_submission_goes_on(
    victim: str, phase: str, ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str]
) -> None:
    """The driver, or the whole cluster with it, is killed; the same command is given again."""
    run = make_run()
    address = ray_cluster.address if victim == "driver" else None
    first = Driver(run, tmp_path, address=address, steps=STEPS)
    reader = raystate.Reader(run.storage)
    wait_for(lambda: reader.latest_step() is not None, "the first durable step", failed=lambda: first.error)
    with held(phase, first):
        before = first.events.newest_step()
        first.kill()
    second = Driver(run, tmp_path, address=address, steps=STEPS, step_s=0.02)
    second.finish()
    start = second.events.newest_start()
    assert second.digests() == undisturbed
    if victim == "driver":
        assert start["tier"] in ("memory", "peer")  # a new driver's ranks may land on each other's nodes
        assert before - start["step"] <= 2
        assert run_actors(run_hash(run.storage, run.run)) == []
    else:
        assert start["tier"] == "storage"
    assert raystate.Reader(run.storage).latest_step() == STEPS
    strikes.played[victim, phase] = came_of(second, before)
