"""Elastic runs: a node is lost and the run goes on with fewer workers; it comes back and the run grows again."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import raystate
from jobs.striking import lose_node, start_ray
from raystate.train.standby import SWITCH
from tests.cluster import toy
from tests.cluster.strikes import newest_in_memory, raylet_of_a_trainer
from tests.cluster.training import NODE, NODES, Training, wait_for, with_callback
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.usefixtures("by_value")

STEPS = 110
PACE_S = 0.4
EXAMPLES = 1000
GLOBAL_BATCH = 8
WIDTH = 16
EVERY_S = 2.0  # from a start to a growth
NO_MORE_TWO = "no-more-two"
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
            try:
                manager.save(step + 1, state, items={"data": batches}, metrics={"loss": loss})
            except raystate.Interrupted:
                say(event="stopped", step=step + 1)
                raise


def train_but_never_with_two_again(config: dict[str, Any]) -> None:
    import jax

    if jax.process_count() == 2 and os.path.exists(os.path.join(config["out"], NO_MORE_TWO)):
        raise ValueError("never two")
    train(config)


def by_step(training: Training) -> dict[int, tuple[list[int], float]]:
    """(the examples in their order, the loss) of each step, as it was computed last."""
    found: dict[int, dict[int, Any]] = {}
    for event in training.events.read():
        if event["event"] == "step":
            ranks = found.setdefault(event["step"], {})
            if ranks and next(iter(ranks.values()))["world"] != event["world"]:
                ranks.clear()  # computed again by another group
            ranks[event["rank"]] = event
    return {
        step: ([row for rank in sorted(ranks) for row in ranks[rank]["rows"]], ranks[0]["loss"]) for step, ranks in found.items()
    }


def starts(training: Training) -> list[dict[str, Any]]:
    """Of rank 0, in order."""
    return [event for event in training.events.read() if event["event"] == "start" and event["rank"] == 0]


def pace(training: Training, condition: Callable[[], bool]) -> None:
    """Wait. The training makes a step now and then meanwhile, and doesn't come to its end."""
    next_s = time.monotonic()

    def looks() -> bool:
        nonlocal next_s
        if time.monotonic() >= next_s and training.events.newest_step() < STEPS - 10:
            training.go_on(1)
            next_s = time.monotonic() + PACE_S
        return condition()

    wait_for(looks, "its turn", failed=lambda: training.error or (training.has_ended and "the training has ended") or None)


def wait_for_start(training: Training, number: int) -> None:
    """Until so many groups have restored."""
    pace(training, lambda: len(starts(training)) >= number)


def wait_for_copies(training: Training, step: int) -> None:
    """Until that step, or a later one, lies in the memory of two nodes. A busy machine skips some."""
    pace(training, lambda: newest_in_memory(training.config, nodes=2) >= step)


def undisturbed() -> list[tuple[list[int], float]]:
    """What one process computes: the rows and the loss of each step."""
    import jax

    init, shardings, step_fn, place = computation()
    state, told = jax.jit(init, out_shardings=shardings)(), []
    for rows in (order()[step] for step in range(STEPS)):
        state, loss = step_fn(state, place(rows))
        told.append(([int(row) for row in rows], float(loss)))
    return told


def elastic() -> Any:
    from ray.train import ScalingConfig

    each = {"CPU": 1, "trainer": 1}
    return ScalingConfig(num_workers=(1, 2), resources_per_worker=each, elastic_resize_monitor_interval_s=EVERY_S)


@pytest.fixture
def two_nodes(ray_cluster: Any) -> Iterator[Any]:
    """The cluster with room for two workers: only a node that is added brings more."""
    while len(ray_cluster.list_all_nodes()) > 2:
        ray_cluster.remove_node(ray_cluster.list_all_nodes()[-1], allow_graceful=False)
    yield ray_cluster
    while len(ray_cluster.list_all_nodes()) < NODES:
        start_ray(lambda: ray_cluster.add_node(**NODE))
    ray_cluster.wait_for_nodes(PATIENCE_S)


def begin(run: Any, out: Path, train_fn: Any = train, **more: Any) -> Training:
    """An elastic run whose first steps lie in the memory of two nodes."""
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000)
    training = Training(
        config,
        out,
        steps=STEPS,
        step_s=0.02,
        pause_at=8,
        train_fn=train_fn,
        scaling_config=elastic(),
        global_batch=GLOBAL_BATCH,
        **more,
    )
    training.wait_step(6)
    wait_for_copies(training, 5)
    return training


def check(training: Training) -> None:
    """The examples of an undisturbed run in its order, its losses, and no bit lost or read from storage on the way."""
    import numpy as np

    expected, told = undisturbed(), by_step(training)
    assert [told[step + 1][0] for step in range(STEPS)] == [rows for rows, _ in expected]
    np.testing.assert_allclose([told[step + 1][1] for step in range(STEPS)], [loss for _, loss in expected], rtol=TOLERANCE)
    for event in [one for one in training.events.read() if one["event"] == "start" and one["step"]]:
        assert event["bytes_from"]["storage"] == 0
        whole, before = (
            toy.assemble([str(path) for path in training.events.folder.glob(f"{when}-{event['step']}-*.pickle")])
            for when in ("restored", "step")
        )
        assert [one.tobytes() for one in whole] == [one.tobytes() for one in before]


@pytest.mark.long
def test_two_workers_become_one_and_two_again(
    two_nodes: Any, make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With processes that wait, as users have them: the smaller group takes its own of those of the larger one."""
    monkeypatch.setenv(SWITCH, "1")
    training = begin(make_run(), tmp_path / "out")
    training.kill_trainer(1)
    wait_for_start(training, 2)
    assert starts(training)[1]["world"] == 2, "a dead process alone makes nothing smaller"
    wait_for_copies(training, starts(training)[1]["step"] + 1)
    _, node = raylet_of_a_trainer(training, two_nodes)
    lose_node(two_nodes, node)
    wait_for_start(training, 3)
    training.wait_step(starts(training)[2]["step"] + 3)
    start_ray(lambda: two_nodes.add_node(**NODE))
    wait_for_start(training, 4)
    result = training.finish()
    assert [event["world"] for event in starts(training)] == [2, 2, 1, 2]
    killed, lost, grown = result.recoveries
    assert (killed.workers, killed.interrupted) == (2, False)
    assert "the run goes on" not in killed.cause
    assert (lost.workers, lost.interrupted) == (1, False)
    assert re.search(
        rf"; the run goes on with 1 worker instead of 2, without the node of rank \d \(host {node.node_id[:8]}\)$", lost.cause
    )
    assert (grown.workers, grown.interrupted, grown.steps_repeated, grown.step) == (2, True, 0, starts(training)[3]["step"])
    assert "there has been room for 2 workers for 2 s: the run grows from 1" in grown.cause
    assert grown.cause.endswith("; the run goes on with 2 workers instead of 1")
    check(training)


@pytest.mark.long
def test_a_size_that_the_program_cannot_do_is_taken_back(two_nodes: Any, make_run: Any, tmp_path: Path) -> None:
    """It trained well before it grew: its growth must not end it."""
    out = tmp_path / "out"
    training = begin(make_run(), out, train_but_never_with_two_again, max_failures=2)
    _, node = raylet_of_a_trainer(training, two_nodes)
    (out / NO_MORE_TWO).touch()
    lose_node(two_nodes, node)
    wait_for_start(training, 2)
    training.wait_step(starts(training)[1]["step"] + 3)
    start_ray(lambda: two_nodes.add_node(**NODE))
    wait_for_start(training, 3)
    result = training.finish()
    assert [event["world"] for event in starts(training)] == [2, 1, 1]
    _, grown, again, back = result.recoveries
    assert (grown.workers, grown.interrupted) == (2, True)
    assert (again.workers, again.interrupted) == (2, False)
    assert (back.workers, back.interrupted) == (1, False)
    assert re.search(r"raised ValueError: never two; the run goes on with 1 worker instead of 2", back.cause)
    check(training)


@pytest.mark.long
def test_a_trainer_of_ones_own_is_elastic_too(two_nodes: Any, make_run: Any, tmp_path: Path) -> None:
    """`RayTrainCallback` answers for Ray Train's policy. The run comes to its end while it is asked to grow, or after."""
    run = make_run()
    out = tmp_path / "out"
    training = begin(run, out, launch=with_callback)
    _, node = raylet_of_a_trainer(training, two_nodes)
    lose_node(two_nodes, node)
    wait_for_start(training, 2)
    start_ray(lambda: two_nodes.add_node(**NODE))
    training.finish()
    assert [event["world"] for event in starts(training)][:2] == [2, 1]
    check(training)


def test_a_trainer_of_ones_own_is_refused_before_it_starts(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig, TrainingFailedError

    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run)
    with pytest.raises(TrainingFailedError, match="3 workers can't share a global batch of 8 examples evenly"):
        with_callback(
            print,
            config,
            run_config=RunConfig(storage_path=str(tmp_path / "ray")),
            scaling_config=ScalingConfig(num_workers=(1, 3)),
            global_batch=GLOBAL_BATCH,
        )
    assert not Path(run.storage).exists()
