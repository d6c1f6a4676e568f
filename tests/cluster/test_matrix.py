"""kill -9 of each kind of process in each phase of a save: the run ends by itself, bit-equal to the undisturbed one.

A run takes one death of each kind, each in another phase; the runs together are the whole matrix. By default one of them is played, drawn
by a seed that is printed (RAYSTATE_SEED=n plays it again); RAYSTATE_ALL=1 plays all. The death of a whole cluster is test_outside.py's;
deaths that meet, and sleepers, are the drill's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import raystate
from jobs.striking import start_ray
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster import strikes
from tests.cluster.strikes import ROUNDS, VICTIMS, came_of, held, newest_in_memory, phase_of, strike
from tests.cluster.training import NODE, NODES, SAVES_EVERY, STEPS, Driver, wait_for
from tests.patience import PATIENCE_S


@pytest.mark.long
@pytest.mark.parametrize("turn", ROUNDS)
def test_one_death_of_each_kind(turn: int, ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str]) -> None:
    run = make_run()
    training = Driver(run, tmp_path, address=ray_cluster.address, steps=STEPS, pause_at=20)
    training.wait_step(6)
    # Rank 0 in calm training; it is rank 1 that dies as "trainer" below.
    starts, in_memory = training.events.starts(), newest_in_memory(run)
    before, _ = training.kill_trainer(0)
    wait_for(lambda: training.events.starts() > starts, "a start", failed=lambda: training.error)
    start = training.events.newest_start()
    assert start["tier"] == "memory"
    assert 0 < in_memory <= start["step"]
    training.wait_step(before + 8)
    came: dict[tuple[str, str], str] = {}
    victims = list(VICTIMS)
    random.Random(turn).shuffle(victims)
    try:
        for victim in victims:
            phase = phase_of(victim, turn)
            starts, copied = training.events.starts(), newest_in_memory(run, nodes=2)
            before, in_memory = strike(training, victim, phase, ray_cluster)
            came[victim, phase] = came_of(training, before)
            start = training.events.newest_start()
            if victim in ("HostActor", "Coordinator"):
                assert training.events.starts() == starts, "the trainers should not have noticed"
            elif victim == "node":
                # What had its copies is still there, unless storage has something newer.
                assert copied <= start["step"]
                assert start["tier"] in ("memory", "peer") or copied < start["step"]
            else:
                assert start["tier"] == "memory"
                assert 0 < in_memory <= start["step"]
        # The driver last: with it all trainers go, and the same command is given again.
        phase = phase_of("driver", turn)
        with held(phase, training, before=lambda: training.go_on(SAVES_EVERY + 1)):
            before = training.events.newest_step()
            training.kill()
            in_memory = newest_in_memory(run)
        training = Driver(run, tmp_path, address=ray_cluster.address, steps=STEPS, step_s=0.02)
        result = training.finish()
    finally:
        training.kill()
        while len(ray_cluster.list_all_nodes()) < NODES:
            start_ray(lambda: ray_cluster.add_node(**NODE))
        ray_cluster.wait_for_nodes(PATIENCE_S)
    start = training.events.newest_start()
    came["driver", phase] = came_of(training, before)
    assert start["tier"] in ("memory", "peer")  # a new driver's ranks may land on each other's nodes
    assert 0 < in_memory <= start["step"]
    assert training.digests() == undisturbed
    assert result["step"] == raystate.Reader(run.storage).latest_step() == STEPS
    assert run_actors(run_hash(run.storage, run.run)) == []
    strikes.played.update(came)


@pytest.mark.long
def test_the_run_is_released_when_the_driver_never_comes_back(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    driver = Driver(run, tmp_path, address=ray_cluster.address, steps=STEPS, pause_at=20, idle_timeout_s=2.0, save_every_steps=1000)
    driver.wait_step(6)
    driver.kill()
    before = newest_in_memory(run)
    name = run_hash(run.storage, run.run)
    wait_for(lambda: run_actors(name) == [], "the end of the run's actors")
    newest = raystate.Reader(run.storage).latest_step()
    assert newest == before, "the newest snapshot was to be made durable"
