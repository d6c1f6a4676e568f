"""What a run leaves on disk: read by stock Orbax, restored on other topologies, and begun by stock Orbax."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import raystate
from tests.cluster import toy
from tests.patience import PATIENCE_S
from tests.processes import job_environment, run_job

WIDTH = 32
DUMPED = (30, 60, 90)

STOCK = """
import sys, json, pickle
import jax, numpy as np, orbax.checkpoint as ocp
from orbax.checkpoint import v1
storage, out = sys.argv[1:3]
with ocp.CheckpointManager(storage) as manager:
    steps = sorted(manager.all_steps())
    metrics = {step: manager.metrics(step) for step in steps}
with v1.training.Checkpointer(storage) as checkpointer:
    assert [c.step for c in checkpointer.checkpoints] == steps
here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
for step in steps:
    with np.load(f"{out}/whole-{step}.npz") as whole:
        expected = [whole[f"arr_{i}"] for i in range(len(whole.files))]
    target = jax.tree.map(lambda m: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=here), v1.metadata(f"{storage}/{step}").metadata)
    with ocp.CheckpointManager(storage) as manager:
        v0 = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))["state"]
    for name, tree in (("v0", v0), ("v1", v1.load(f"{storage}/{step}", target))):
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
        assert len(leaves) == len(expected), name
        assert all(a.tobytes() == b.tobytes() and a.dtype == b.dtype and a.shape == b.shape for a, b in zip(leaves, expected)), name
assert not any(module.split(".")[0] == "raystate" for module in sys.modules)
print(json.dumps({"steps": steps, "metrics": metrics}))
"""


@pytest.fixture(scope="module")
def saved(calm: Any) -> tuple[Path, Path]:
    """(storage, folder with the true arrays of each step) of a run on 2 processes x 2 devices."""
    for step in DUMPED:
        whole = toy.assemble([str(calm.out / f"dump-{step}-{rank}.pickle") for rank in (0, 1)])
        np.savez(calm.out / f"whole-{step}.npz", *whole)
    os.link(calm.out / f"whole-{DUMPED[-1]}.npz", calm.out / "whole.npz")
    return calm.storage, calm.out


def test_stock_orbax_reads_every_step(saved: tuple[Path, Path]) -> None:
    storage, out = saved
    done = subprocess.run(
        [sys.executable, "-c", STOCK, str(storage), str(out)],
        capture_output=True, text=True, timeout=PATIENCE_S, env=job_environment(1), cwd=out, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["steps"] == list(DUMPED)
    assert all("loss" in metrics for metrics in found["metrics"].values())


@pytest.mark.long
@pytest.mark.parametrize(("processes", "devices"), [(1, 4), (4, 1), (1, 1)])
def test_restored_on_another_topology(saved: tuple[Path, Path], processes: int, devices: int) -> None:
    storage, out = saved
    script = Path(__file__).with_name("read_elsewhere.py")
    answers = run_job(
        lambda index, port: [script, storage, out, WIDTH, processes, index, port],
        processes=processes, devices=devices, cwd=out,
    )  # fmt: skip
    for stdout in answers:
        found = json.loads(stdout.splitlines()[-1])
        assert found["step"] == DUMPED[-1]
        assert found["devices"] == processes * devices
        assert found["read"] <= 1.1 * found["needed"], "each process reads about its share"


def test_resumes_what_stock_orbax_wrote(ray_cluster: Any, make_run: Any) -> None:
    run = make_run()
    _, init, shardings, step_fn = toy.build(64)
    state = jax.jit(init, out_shardings=shardings(jax.eval_shape(init)))()
    with ocp.CheckpointManager(run.storage) as stock:
        stock.save(5, args=ocp.args.StandardSave(state))
        stock.wait_until_finished()
    written = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=4)
    with raystate.StateManager(config) as manager:
        restored = manager.restore_or_init(init, shardings)
        assert (restored.step, restored.tier) == (5, "storage")
        for leaf, expected in zip(jax.tree.leaves(restored.state), written, strict=True):
            assert np.asarray(leaf).tobytes() == expected.tobytes()
        state, numbers = restored.state, toy.Numbers()
        for step in range(5, 9):
            state, _ = step_fn(state, next(numbers))
            manager.save(step + 1, state)
    assert raystate.Reader(run.storage).all_steps() == [5, 8, 9]
    final = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
    with ocp.CheckpointManager(run.storage) as stock:
        assert sorted(stock.all_steps()) == [5, 8, 9]
        tree = stock.restore(9, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    assert [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)] == [leaf.tobytes() for leaf in final]
