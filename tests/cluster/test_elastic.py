"""Elastic runs: a node is lost and the run goes on with fewer workers; it comes back and the run grows again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.storage import run_hash
from tests.cluster import toy
from tests.cluster.strikes import lose_node, newest_in_memory, raylet_of_a_trainer
from tests.cluster.training import NODE, NODES, Training, wait_for
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("by_value")

STEPS = 90
PACE_S = 0.4
EXAMPLES = 1000
GLOBAL_BATCH = 8
WIDTH = 16
EVERY_S = 2.0  # from a start to a growth
TOLERANCE = 1e-5  # of the losses: sums over other devices have another order


def order() -> Any:
    """The global batches, the same for every number of processes."""
    import grain

    return grain.MapDataset.range(EXAMPLES).seed(7).shuffle().repeat().batch(GLOBAL_BATCH)


def computation() -> tuple[Any, Any, Any, Any]:
    """(init, shardings, step function, batch from local rows) over all devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    shardings = {"w": split, "trail": whole}

    def init() -> Any:
        w = jnp.linspace(-1, 1, WIDTH * WIDTH, dtype=jnp.float32).reshape(WIDTH, WIDTH)
        return {"w": w, "trail": jnp.zeros((), jnp.uint32)}

    def loss_of(w: Any, rows: Any) -> Any:
        features = jnp.sin(rows[:, None] * jnp.arange(1, WIDTH + 1, dtype=jnp.float32))
        return jnp.mean((jnp.tanh(features @ w) - features[:, ::-1]) ** 2)

    def step(state: Any, rows: Any) -> Any:
        loss, slope = jax.value_and_grad(loss_of)(state["w"], rows)
        places = jnp.arange(1, GLOBAL_BATCH + 1, dtype=jnp.uint32)
        trail = state["trail"] * jnp.uint32(31) + jnp.sum(
            rows.astype(jnp.uint32) * places
        )  # exact, and another one in another order
        return {"w": state["w"] - 0.05 * slope, "trail": trail}, loss

    def place(rows: Any) -> Any:
        return jax.make_array_from_process_local_data(split, np.asarray(rows))

    return init, shardings, jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)), place


def train(config: dict[str, Any]) -> None:
    import jax

    import raystate

    init, shardings, step_fn, place = computation()
    rank, world = jax.process_index(), jax.process_count()
    share = GLOBAL_BATCH // world
    batches = iter(order().map(lambda rows: rows[rank * share : (rank + 1) * share]).to_iter_dataset())
    out = config["out"]
    events = open(os.path.join(out, f"events-{os.getpid()}.jsonl"), "a", buffering=1)  # noqa: SIM115 - ends with the process

    def say(**facts: Any) -> None:
        events.write(json.dumps({"t": time.time(), "pid": os.getpid(), "rank": rank, "world": world, **facts}) + "\n")

    with raystate.StateManager() as manager:
        restored = manager.restore_or_init(init, shardings, items={"data": batches})
        state = restored.state
        toy.dump(state, os.path.join(out, f"restored-{restored.step}-{rank}.pickle"))
        say(event="start", step=restored.step, tier=restored.tier, bytes_from=restored.bytes_from)
        for step in range(restored.step, config["steps"]):
            toy.pause(out, step)
            rows = next(batches)
            state, loss = step_fn(state, place(rows))
            done = float(loss)
            toy.dump(state, os.path.join(out, f"step-{step + 1}-{rank}.pickle"))
            say(event="step", step=step + 1, rows=[int(row) for row in rows], loss=done)
            time.sleep(config["step_s"])
            manager.save(step + 1, state, items={"data": batches}, metrics={"loss": loss})


def by_step(training: Training) -> dict[int, tuple[list[int], float]]:
    """(the examples in their order, the loss) of each step, as it was computed last."""
    found: dict[int, dict[int, Any]] = {}
    for event in training.events.read():
        if event["event"] == "step":
            ranks = found.setdefault(event["step"], {})
            if ranks and next(iter(ranks.values()))["world"] != event["world"]:
                ranks.clear()  # computed again by another group
            ranks[event["rank"]] = event
    return {step: (sum((ranks[rank]["rows"] for rank in sorted(ranks)), []), ranks[0]["loss"]) for step, ranks in found.items()}


def starts(training: Training) -> list[dict[str, Any]]:
    """Of rank 0, in order."""
    return [event for event in training.events.read() if event["event"] == "start" and event["rank"] == 0]


def wait_for_start(training: Training, number: int) -> None:
    """Until so many groups have restored. The training makes a step now and then meanwhile, and doesn't come to its end."""
    next_s = time.monotonic()

    def started() -> bool:
        nonlocal next_s
        if time.monotonic() >= next_s and training.events.newest_step() < STEPS - 10:
            training.go_on(1)
            next_s = time.monotonic() + PACE_S
        return len(starts(training)) >= number

    wait_for(started, f"start {number}", failed=lambda: training.error or (training.has_ended and "the training has ended") or None)


def undisturbed() -> tuple[list[tuple[list[int], float]], list[Any]]:
    """What one process computes: (rows and loss by step, the final arrays)."""
    import jax
    import numpy as np

    init, shardings, step_fn, place = computation()
    state, told = jax.jit(init, out_shardings=shardings)(), []
    for rows in (order()[step] for step in range(STEPS)):
        state, loss = step_fn(state, place(rows))
        told.append(([int(row) for row in rows], float(loss)))
    return told, [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def elastic(fewest: int, most: int) -> Any:
    from ray.train import ScalingConfig

    each = {"CPU": 1, "trainer": 1}
    return ScalingConfig(num_workers=(fewest, most), resources_per_worker=each, elastic_resize_monitor_interval_s=EVERY_S)


@pytest.mark.long
def test_two_workers_become_one_and_two_again(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    import numpy as np

    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000)
    while len(ray_cluster.list_all_nodes()) > 2:  # so that only a new node brings room
        ray_cluster.remove_node(ray_cluster.list_all_nodes()[-1], allow_graceful=False)
    out = tmp_path / "out"
    began = time.monotonic()
    training = Training(
        config, out, steps=STEPS, step_s=0.02, pause_at=20, train_fn=train, scaling_config=elastic(1, 2), global_batch=GLOBAL_BATCH
    )
    try:
        training.wait_step(6)
        print("first steps", time.monotonic() - began)
        _, node = raylet_of_a_trainer(training, ray_cluster)
        wait_for(lambda: newest_in_memory(config, nodes=2) >= 5, "copies")
        lose_node(ray_cluster, node, run_hash(config.storage, config.run))
        lost = time.monotonic()
        training.go_on(5)
        wait_for_start(training, 2)
        print("with one worker after", time.monotonic() - lost)
        alone = starts(training)[-1]
        assert alone["world"] == 1
        assert alone["bytes_from"]["storage"] == 0
        training.wait_step(alone["step"] + 3)
        print("first new step after", time.monotonic() - lost)

        ray_cluster.add_node(**NODE)
        added = time.monotonic()
        wait_for_start(training, 3)
        print("two again after", time.monotonic() - added)
        result = training.finish()
    finally:
        while len(ray_cluster.list_all_nodes()) < NODES:
            ray_cluster.add_node(**NODE)
        ray_cluster.wait_for_nodes(PATIENCE_S)

    print(result.recoveries, [(one["world"], one["step"], one["tier"], one["bytes_from"]) for one in starts(training)])
    expected, arrays = undisturbed()
    told = by_step(training)
    assert [told[step + 1][0] for step in range(STEPS)] == [rows for rows, _ in expected], "the same examples in the same order"
    np.testing.assert_allclose([told[step + 1][1] for step in range(STEPS)], [loss for _, loss in expected], rtol=TOLERANCE)
    for event in starts(training)[1:]:
        step = event["step"]
        whole = toy.assemble([str(path) for path in out.glob(f"restored-{step}-*.pickle")])
        before = toy.assemble([str(path) for path in out.glob(f"step-{step}-*.pickle")])
        assert [one.tobytes() for one in whole] == [one.tobytes() for one in before]
