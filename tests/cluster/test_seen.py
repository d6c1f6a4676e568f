"""What was seen to go wrong when raystate was used as strangers would, on real Ray: each row of that list is a test.

The others of its rows are where they belong: 7 and 23 in tests/core (test_words, test_scaling), 10, 19 and 20 in test_sharing and
test_train_blame, 12 to 14 in tests/arrays, tests/arena and tests/storage, 15 in tests/programs, 18 in test_train_blame, 21 and 24 in
test_misuse and test_outside, 22 in tests/storage. All that is about calls is in the model, too
(tests/model), whose sequences find each of these bugs when it is put back; those that only repeat it on Ray are for make test-all.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ray
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import raystate
from raystate.actors.naming import NAMESPACE, coordinator_name
from raystate.storage import run_hash


def state(value: float, size: int = 1000) -> dict[str, Any]:
    return {"w": jnp.full((size,), float(value)), "s": int(value)}


def value_of(restored: Any) -> float:
    return float(np.asarray(restored.state["w"])[0])


def config_of(run: Any, **settings: Any) -> raystate.StateConfig:
    return raystate.StateConfig(storage=run.storage, run=run.run, **settings)


def stored(run: Any, step: int | None = None) -> float:
    restored = raystate.Reader(run.storage).restore(step=step)
    assert restored is not None
    return value_of(restored)


def test_1_state_that_grows_after_some_snapshots(ray_cluster: Any, fresh_run: Any) -> None:
    with raystate.StateManager(config_of(fresh_run, save_every_steps=100)) as manager:
        manager.restore()
        for step in range(1, 4):
            manager.save(step, state(step))
        for step in range(4, 8):
            manager.save(step, state(step, 100_000 * step))
        assert manager.save(8, state(8, 900_000), items={"x": {"a": jnp.ones(500)}}, force=True)
        manager.wait_until_finished()
        restored = manager.restore(state(0, 900_000))
        assert restored is not None
        assert (restored.step, value_of(restored)) == (8, 8.0)
    assert stored(fresh_run) == 8.0


def test_2_a_restore_while_a_save_is_on_its_way(ray_cluster: Any, fresh_run: Any) -> None:
    with raystate.StateManager(config_of(fresh_run, save_every_steps=100)) as manager:
        manager.restore()
        assert manager.save(5, state(5), force=True)
        manager.wait_until_finished()
        assert manager.save(6, state(60), force=True)
        manager.restore(state(0), step=5)
        try:
            assert manager.save(6, state(66), force=True)
        except raystate.StepOrderError:  # the first 6 was durable before the restore, and is kept
            assert stored(fresh_run, 6) == 60.0
            return
        try:
            manager.wait_until_finished()
        except raystate.StorageError as error:  # the first 6, unless it was durable before the restore
            assert "step 6" in str(error)  # noqa: PT017 - either may happen
        manager.wait_until_finished()
    assert stored(fresh_run) == 66.0


@pytest.mark.long
def test_3_training_goes_on_behind_a_rollback(ray_cluster: Any, fresh_run: Any) -> None:
    with raystate.StateManager(config_of(fresh_run, save_every_steps=1, keep_last=None)) as manager:
        manager.restore()
        for step in range(1, 6):
            assert manager.save(step, state(step))
            manager.wait_until_finished()
        restored = manager.restore(state(0), step=2, rollback=True)
        assert restored is not None
        assert value_of(restored) == 2.0
        assert manager.latest_step() == 2
        assert manager.save(3, state(33))
        manager.wait_until_finished()
        assert manager.latest_step() == 3
        assert manager.save(4, state(44))
    assert raystate.Reader(fresh_run.storage).all_steps() == [1, 2, 3, 4]
    assert (stored(fresh_run, 3), stored(fresh_run)) == (33.0, 44.0)


@pytest.mark.long
@pytest.mark.parametrize("snapshots", [5, 0])
def test_4_the_last_step_was_not_due(snapshots: int, ray_cluster: Any, make_run: Any) -> None:
    run = make_run()
    with raystate.StateManager(config_of(run, save_every_steps=5, snapshot_every_steps=snapshots)) as manager:
        manager.restore()
        for step in range(1, 8):
            manager.save(step, state(step))
    assert stored(run, 7) == 7.0
    run = make_run()
    with raystate.StateManager(config_of(run, save_every_steps=50, snapshot_every_steps=snapshots)) as manager:
        manager.restore()
        manager.save(7, state(7))
    assert stored(run, 7) == 7.0, "nothing was durable before"


@pytest.mark.long
def test_5_a_forced_repeat_is_another_save(ray_cluster: Any, fresh_run: Any) -> None:
    with raystate.StateManager(config_of(fresh_run, save_every_steps=100)) as manager:
        manager.restore()
        for step in range(7, 12):
            assert not manager.save(step, state(step))
            assert manager.save(step, state(100 + step), force=True)
            manager.wait_until_finished()
            assert stored(fresh_run, step) == 100.0 + step
            assert manager.save(step, state(5), force=True), "another try: the durable one keeps its promise"
            manager.wait_until_finished()
            assert stored(fresh_run, step) == 100.0 + step


@pytest.mark.long
def test_6_more_beside_the_arrays_than_ever(ray_cluster: Any, fresh_run: Any) -> None:
    with raystate.StateManager(config_of(fresh_run, save_every_steps=1, keep_last=None)) as manager:
        manager.restore()
        assert manager.save(1, state(1))
        manager.wait_until_finished()
        assert manager.save(2, state(2), custom="x" * 600_000, items={"j": {"a": "y" * 300_000}})
        manager.wait_until_finished()
        assert manager.save(3, state(3), metrics={f"m{number}": 1.0 for number in range(5000)})
    reader = raystate.Reader(fresh_run.storage)
    assert reader.all_steps() == [1, 2, 3]
    assert len(reader.restore(step=2).custom) == 600_000


@pytest.mark.long
def test_8_behind_a_step_of_another_past(ray_cluster: Any, fresh_run: Any) -> None:
    config = config_of(fresh_run, save_every_steps=1, keep_last=1)
    for step in (20, 30):
        with raystate.StateManager(config.replace(keep_last=5)) as manager:
            manager.restore()
            manager.save(step, state(step))
    with raystate.StateManager(config) as manager:
        manager.restore(state(0), step=20)
        for step in (21, 22, 23):
            assert manager.save(step, state(step))
            manager.wait_until_finished()
            assert step in manager.all_steps()
        with pytest.raises(raystate.StepOrderError, match="rollback=True"):
            manager.save(30, state(30))
    with raystate.StateManager(config) as manager, pytest.raises(raystate.StepOrderError, match="restored none of them"):
        manager.save(1, state(1))
    assert {23, 30} <= set(raystate.Reader(fresh_run.storage).all_steps())


@pytest.mark.long
def test_9_a_rollback_and_then_the_end(ray_cluster: Any, fresh_run: Any) -> None:
    with raystate.StateManager(config_of(fresh_run, save_every_steps=3)) as manager:
        manager.restore()
        for step in range(1, 7):
            manager.save(step, state(step))
        manager.wait_until_finished()
        manager.save(7, state(7))
        manager.save(8, state(8))
        manager.restore(state(0), step=3, rollback=True)
    assert raystate.Reader(fresh_run.storage).all_steps() == [3]


def test_11_and_12_a_mistake_leaves_no_trace(ray_cluster: Any, fresh_run: Any) -> None:
    mistakes: list[dict[str, Any]] = [{"custom": {1, 2}}, {"metrics": {"a": np.ones(3)}}, {"metrics": {"a": "x"}}, {"items": [1]}]
    with raystate.StateManager(config_of(fresh_run, save_every_steps=100)) as manager:
        manager.restore()
        for mistake in mistakes:
            with pytest.raises(raystate.ConfigError):
                manager.save(2, state(2), force=True, **mistake)
        assert manager.save(2, state(2), force=True)
        manager.wait_until_finished()
        for number in (2.5, "3", -1):
            with pytest.raises(raystate.ConfigError):
                manager.save(number, state(2))  # pyright: ignore[reportArgumentType]
        donated = state(3)
        donated["w"].delete()
        for _ in range(4):
            with pytest.raises(raystate.ConfigError, match="donated"):
                manager.save(3, donated, force=True)
        for step in range(3, 9):
            assert manager.save(step, state(step), force=True)
            manager.wait_until_finished()


def test_a_reference_that_does_not_fit_gives_nothing_up(ray_cluster: Any, fresh_run: Any) -> None:
    mistakes: list[dict[str, Any]] = [
        {"reference": {"wrong": jnp.ones(9)}},
        {"reference": state(0), "items": {"data": {"a": jnp.ones(1)}}},
        {"reference": {"wrong": jnp.ones(9)}, "rollback": True},
    ]
    with raystate.StateManager(config_of(fresh_run, save_every_steps=2, keep_last=None)) as manager:
        manager.restore()
        for step in (1, 2, 3):
            manager.save(step, state(step))
        manager.wait_until_finished()
        assert manager.save(5, state(5), force=True)
        for mistake in mistakes:
            with pytest.raises(raystate.ReferenceMismatchError, match=r"wrong|no item 'data'"):
                manager.restore(step=2, **mistake)
        manager.save(7, state(7))
    assert raystate.Reader(fresh_run.storage).all_steps() == [2, 5, 7]


@pytest.mark.long
def test_a_mistake_before_there_are_slots(ray_cluster: Any, fresh_run: Any) -> None:
    """The user sees the error: a trainer that says that it has failed is not ended as a survivor of its own failure."""
    with (
        pytest.raises(raystate.RaystateError, match="f"),
        raystate.StateManager(config_of(fresh_run, save_every_steps=2)) as manager,
    ):
        manager.save(1, {"w": jnp.ones(3), "f": jnp.ravel})
    with raystate.StateManager(config_of(fresh_run, save_every_steps=2)) as manager:
        manager.save(2, state(2))
    assert stored(fresh_run) == 2.0


@pytest.mark.long
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_16_a_mesh_of_several_devices_is_set(kind: AxisType, ray_cluster: Any, fresh_run: Any) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    # Only the last one is due: on a busy machine four that are saved at once may give way to each other.
    with jax.set_mesh(mesh), raystate.StateManager(config_of(fresh_run, save_every_steps=4)) as manager:
        manager.restore()
        rows = NamedSharding(mesh, PartitionSpec("x"))
        for step in range(1, 5):
            rising = {"w": jax.device_put(np.full((8, 4), float(step), np.float32), rows), "s": jnp.float32(step)}
            assert manager.save(step, rising) == (step == 4)
        manager.wait_until_finished()
        restored = manager.restore({"w": jax.device_put(np.zeros((8, 4), np.float32), rows), "s": jnp.float32(0)})
        assert restored is not None
        assert restored.state["w"].sharding == rows
        assert np.asarray(restored.state["w"])[0, 0] == 4.0


def test_a_cell_that_is_run_again(ray_cluster: Any, make_run: Any) -> None:
    """A second StateManager of the run in one process closes the first; another run's is nobody's business."""
    run = make_run()
    config = config_of(run, save_every_steps=1)
    first = raystate.StateManager(config)
    first.restore()
    first.save(1, state(1))
    with raystate.StateManager(config) as second:
        restored = second.restore(state(0))
        assert restored is not None
        assert restored.step == 1
        second.save(2, state(2))
        with pytest.raises(raystate.RaystateError, match="closed"):
            first.save(3, state(3))
        other = make_run()
        with raystate.StateManager(config_of(other, save_every_steps=1)) as third:
            third.restore()
            third.save(1, state(1))
    assert (stored(run), stored(other)) == (2.0, 1.0)


@pytest.mark.long
def test_more_due_steps_than_storage_is_fast(ray_cluster: Any, fresh_run: Any) -> None:
    """The loop goes at storage's pace while that makes progress; where it makes none for seconds, what gave way is named."""
    lost = ""
    with raystate.StateManager(config_of(fresh_run, save_every_steps=1, keep_last=None)) as manager:
        manager.restore()
        assert all(manager.save(step, state(step)) for step in range(1, 30))
        try:
            manager.wait_until_finished()
        except raystate.StorageError as error:
            lost = str(error)
    missing = set(range(1, 30)) - set(raystate.Reader(fresh_run.storage).all_steps())
    assert all(f"step {step}:" in lost for step in missing)


def test_what_the_caller_does_with_its_containers_after_a_save(ray_cluster: Any, fresh_run: Any) -> None:
    """close() keeps what was given to save(), not what has become of it."""
    mine = {"w": np.zeros(4), "step": 0}
    with raystate.StateManager(config_of(fresh_run, save_every_steps=100, snapshot_every_steps=0)) as manager:
        manager.restore()
        for step in range(1, 6):
            mine["w"] += 1
            mine["step"] = step
            manager.save(step, mine)
        mine["w"] += 1
        mine.clear()
    assert stored(fresh_run, 5) == 5.0


@pytest.mark.long
def test_a_rollback_onto_a_damaged_step_costs_no_other(ray_cluster: Any, fresh_run: Any) -> None:
    with raystate.StateManager(config_of(fresh_run, save_every_steps=1, keep_last=None)) as manager:
        manager.restore()
        for step in (1, 2, 3):
            manager.save(step, {"w": jnp.asarray(np.random.default_rng(step).normal(size=100_000))})
            manager.wait_until_finished()
    data = max(
        (path for path in (Path(fresh_run.storage) / "1").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.chmod(0o644)
    data.write_bytes(content)
    reference = {"w": jnp.zeros(100_000)}
    with raystate.StateManager(config_of(fresh_run, keep_last=None)) as manager:
        with pytest.raises(raystate.CorruptCheckpointError):
            manager.restore(reference, step=1, rollback=True)
        with pytest.raises(raystate.ReferenceMismatchError):
            manager.restore({"w": jnp.zeros(7)}, step=2, rollback=True)
        restored = manager.restore(reference)
        assert restored is not None
        assert restored.step == 3


@pytest.mark.long
def test_a_takeover_within_one_process(ray_cluster: Any, fresh_run: Any) -> None:
    """A notebook whose run has got another name: the manager before is closed, and the kernel lives."""
    first = raystate.StateManager(config_of(fresh_run, save_every_steps=1))
    first.restore()
    first.save(1, state(1))
    renamed = raystate.StateConfig(storage=fresh_run.storage, run=f"{fresh_run.run}-renamed", save_every_steps=1)
    with raystate.StateManager(renamed, takeover=True) as second:
        restored = second.restore(state(0))
        assert restored is not None
        assert restored.step == 1


@pytest.mark.long
def test_a_coordinator_that_stops_with_an_exception_comes_back(ray_cluster: Any, fresh_run: Any) -> None:
    """Whatever it stumbled over: a new attempt begins with what storage and the hosts say. One that stumbles at once again ends."""
    with raystate.StateManager(config_of(fresh_run, save_every_steps=1)) as manager:
        manager.restore()
        assert manager.save(1, state(1))
        manager.wait_until_finished()
        coordinator = ray.get_actor(coordinator_name(run_hash(fresh_run.storage, fresh_run.run)), namespace=NAMESPACE)
        before = ray.get(coordinator.pid.remote())
        coordinator.tell.remote("no event")
        assert manager.save(2, state(2))
        manager.wait_until_finished()
        assert ray.get(coordinator.pid.remote()) != before
    assert stored(fresh_run) == 2.0
