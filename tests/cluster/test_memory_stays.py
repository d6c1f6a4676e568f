"""Memory of a run that goes on and on: what its nodes have in shared memory, and what its HostActors have in all."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import raystate
from raystate.actors.naming import NAMESPACE, coordinator_name, find_hosts, host_name
from raystate.storage import run_hash
from tests.cluster import toy
from tests.cluster.strikes import pid_of
from tests.cluster.training import Training, wait_for
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("by_value")

MIB = 1 << 20
PIECE_BYTES = 2 * MIB  # of each rank
CAP = "64MiB"
WARM = 25  # snapshots: by then each slot has been used, and storage too
GROWTH_BYTES = 64 * MIB  # less than a piece of each snapshot after the warm ones
POLL_S = 0.005


def train(config: dict[str, Any]) -> None:
    """So many steps, so many snapshots: each is complete in memory, with its copies, before the next step begins.

    And each is to be durable: one that is not may be passed over, when no slot is free or the machine is busy.
    """
    import json

    import jax
    import jax.numpy as jnp
    import numpy as np
    import ray
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    placed = {"w": NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))}
    size = PIECE_BYTES // 4 * jax.process_count()
    step_fn = jax.jit(lambda state: {"w": state["w"] + 1}, donate_argnums=0, out_shardings=placed)
    events = open(os.path.join(config["out"], f"events-{os.getpid()}.jsonl"), "a", buffering=1)  # noqa: SIM115 - ends with the process
    who = {"pid": os.getpid(), "rank": jax.process_index()}
    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(lambda: {"w": jnp.zeros(size)}, placed)
        state = restored.state
        name = coordinator_name(run_hash(manager.config.storage, manager.config.run))
        coordinator: Any = ray.get_actor(name, namespace=NAMESPACE)
        for step in range(restored.step + 1, config["steps"] + 1):
            toy.pause(config["out"], step - 1)
            state = step_fn(state)
            manager.save(step, state)
            end_s, complete, durable = time.monotonic() + PATIENCE_S, -1, -1
            while complete < step or durable < step - 1:  # else a step that storage is too slow for gives way, and close() says so
                assert time.monotonic() < end_s, f"snapshot {step} is not complete, or step {step - 1} not durable"
                time.sleep(POLL_S)
                report: Any = ray.get(coordinator.status.remote(), timeout=PATIENCE_S)
                complete, durable = report.status.memory_step, report.status.durable_step
            events.write(json.dumps({"t": time.time(), **who, "event": "step", "step": step}) + "\n")


def shared(run: Any) -> dict[str, tuple[int, int]]:
    """arena -> (bytes of its files' pages, its files)."""
    found: dict[str, tuple[int, int]] = {}
    for arena in run.arenas():
        files = [path for path in Path(arena).rglob("*") if path.is_file()]
        found[arena.name] = sum(path.stat().st_blocks * 512 for path in files), len(files)
    return found


def resident(run: Any) -> dict[str, int]:
    """Actor of the run -> bytes of its process that are in memory, shared ones too."""
    name = run_hash(run.storage, run.run)
    actors = [coordinator_name(name), *(host_name(name, host) for host in find_hosts(name))]
    return {actor: psutil.Process(wait_for(lambda actor=actor: pid_of(actor), actor)).memory_info().rss for actor in actors}


@pytest.mark.parametrize("snapshots", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_a_run_that_goes_on_takes_no_more_memory(ray_cluster: Any, make_run: Any, tmp_path: Path, snapshots: int) -> None:
    """Two ranks, each with a copy of the other's piece. Storage is written to all the while."""
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1, host_memory=CAP, replicas=1)
    training = Training(config, tmp_path / "out", steps=snapshots + 1, step_s=0.0, pause_at=WARM, train_fn=train)
    training.wait_step(WARM)
    first, before = shared(run), resident(run)
    assert len(first) == 2
    for step in range(WARM + snapshots // 5, snapshots + 1, snapshots // 5):
        training.wait_step(step)
        assert shared(run) == first
    training.wait_step(snapshots)
    now = resident(run)
    result = training.finish()
    assert not result.recoveries, "a HostActor that begins again has forgotten what it had"
    assert now.keys() == before.keys()
    grown = {name: f"{(now[name] - was) / MIB:.1f} MiB" for name, was in before.items()}
    assert all(now[name] - was <= GROWTH_BYTES for name, was in before.items()), grown
    assert all(size <= 64 * MIB for size, _ in first.values())
