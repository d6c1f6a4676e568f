"""What a manager does for its user, in one process and without Ray."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from raystate.core.coordinator import journal
from raystate.core.formats.errors import ConfigError, RaystateError, StepNotFoundError
from raystate.core.formats.messages import DeleteAsked, FlushReply
from raystate.reader import Reader
from raystate.runtime.link import Unreachable
from tests.model.iterators import Broken, Rows
from tests.model.world import ModelLink, Rank, World
from tests.orbax.listening import listening


def run(script: Any, *, ranks: int = 1, **config: Any) -> None:
    with World(1, ranks=ranks, nodes=1, **{"save_every_steps": 2, **config}) as world:
        world.play(script, ranks)


@pytest.mark.parametrize(
    "rule", [{"save_every_steps": 1}, {"save_every_steps": 9}, {"save_every_steps": 9, "snapshot_every_steps": 0}], ids=str
)
@pytest.mark.parametrize("donates_state", [False, True])
def test_a_metric_that_is_donated_after_the_last_save_is_kept(rule: dict[str, int], donates_state: bool):
    """It may be a part of the state, which an evaluation donates. `close` asks for it again, for fit's result or the last step."""
    lost = donates_state and rule == {"save_every_steps": 9, "snapshot_every_steps": 0}  # it was nowhere else
    donate = jax.jit(lambda x: x + 1, donate_argnums=0)

    def script(rank: Rank) -> None:
        manager = rank.open("first")
        state, loss = {"w": jax.numpy.ones(100)}, jax.numpy.ones(()) * 5
        manager.restore(state)
        manager.save(1, state, metrics={"loss": loss})
        donate(loss)
        if donates_state:
            donate(state["w"])
        manager.close()
        reader = Reader(rank.world.config.storage)
        assert reader.all_steps() == ([] if lost else [1])
        assert lost or reader.metadata(1).metrics == {"loss": 5.0}

    run(script, **rule)


@pytest.mark.parametrize("close", [True, False], ids=["closed", "open"])
def test_a_delete_whose_answer_is_lost_with_the_coordinator_is_done(close: bool, monkeypatch: pytest.MonkeyPatch):
    """The new one said that there is no such step; in the log, the removal may be open or closed by then."""
    real = ModelLink.ask
    lost: list[int] = []

    def ask(self: ModelLink, event: Any, timeout_s: float) -> Any:
        reply = real(self, event, timeout_s)
        if isinstance(event, DeleteAsked) and isinstance(reply, FlushReply) and not lost:
            lost.append(event.step)
            if close:
                self.rest(seconds=2.0)
            self.world.kill_coordinator()
            raise Unreachable("killed")
        return reply

    monkeypatch.setattr(ModelLink, "ask", ask)
    monkeypatch.setattr(journal, "LOG_CLOSED_S", 1.0)

    def script(rank: Rank) -> None:
        manager = rank.begin({"w": jax.numpy.ones(100)})
        for step in range(1, 7):
            manager.save(step, {"w": jax.numpy.ones(100)})
        manager.wait_until_finished()
        manager.delete(2)
        assert lost == [2] and manager.all_steps() == [4, 6]
        with pytest.raises(StepNotFoundError):
            manager.delete(1)
        manager.close()

    run(script)


def test_a_number_that_was_deleted_and_is_saved_again_is_no_deleted_step():
    """delete() said that step 3 was gone, which was promised at that moment and became durable later."""

    def script(rank: Rank) -> None:
        manager = rank.open("first")
        state = {"w": jax.numpy.ones(100)}
        manager.restore(state)
        for step in (1, 2, 3, 4):
            manager.save(step, state)
        manager.wait_until_finished()
        manager.delete(3)
        manager.delete(3)
        manager.restore(state, step=2, rollback=True)
        for step in (3, 4):
            manager.save(step, state)
            if step not in manager.all_steps():
                with pytest.raises(StepNotFoundError):
                    manager.delete(step)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3, 4]
        manager.close()

    run(script, save_every_steps=1, keep_last=None)


@pytest.mark.parametrize("value", [np.arange(6, dtype=np.int16), 3, jax.numpy.ones(2)], ids=["numpy", "int", "jax"])
def test_the_manager_takes_a_single_value(value: Any):
    def script(rank: Rank) -> None:
        manager = rank.open("first")
        assert manager.restore(value) is None
        assert manager.save(2, value)
        manager.wait_until_finished()
        for restored in (manager.restore(value), manager.restore(value, step=2)):
            assert restored is not None and type(restored.state) is type(value)
            np.testing.assert_array_equal(restored.state, value)

    run(script)


def test_a_run_is_heard_from_its_process_0():
    def count(name: str) -> int:
        return sum(one == name for one, _ in heard)

    def script(rank: Rank) -> None:
        manager = rank.open("first")
        state = {"w": np.zeros(1024, np.uint8)}
        manager.restore(state)
        for step in range(1, 6):
            manager.save(step, state)
            manager.wait_until_finished()
        if rank.number == 0:
            assert count("/jax/orbax/write/async/start") == count("/jax/orbax/write/success") == 2, "of the steps 2 and 4 only"
            assert count("/jax/orbax/write/async/blocking_duration_secs") == 2
            assert dict(heard)["/jax/orbax/write/gbytes"] == pytest.approx(1024 / 2**30)
            assert count("/jax/orbax/read/start") == 1 and count("/jax/orbax/read/success") == 0, "nothing was there"
        manager.restore(state)
        if rank.number == 0:
            assert count("/jax/orbax/read/start") == 2 and count("/jax/orbax/read/success") == 1

    with listening() as heard:
        run(script, ranks=2)


def test_a_step_without_the_metric_that_ranks_is_told_once(caplog: pytest.LogCaptureFixture):
    def script(rank: Rank) -> None:
        manager = rank.begin({"w": np.zeros(3)})
        manager.save(1, {"w": np.zeros(3)}, metrics={"loss": 1.0})
        assert not caplog.records
        manager.save(2, {"w": np.zeros(3)}, items={"loss": 0.5})
        manager.save(3, {"w": np.zeros(3)})
        manager.close()

    with caplog.at_level("WARNING", "raystate"):
        run(script, save_every_steps=1, keep_best=1, best_metric="loss")
    (said,) = [record.getMessage() for record in caplog.records if "has no metric" in record.getMessage()]
    assert said == (
        "step 2 has no metric 'loss', so keep_best will not keep it: save(…, metrics={'loss': …}); `items`, the "
        "third argument, has that name"
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_restore_that_fails_on_one_rank_moves_no_iterator_of_any(ranks: int):
    """The next save made the state of today durable with the position of a step that was not restored."""
    stand: dict[int, int] = {}

    def script(rank: Rank) -> None:
        manager = rank.begin()
        manager.save(1, {"w": np.ones(2)}, items={"a": Rows(1), "b": Rows(1)}, force=True)
        manager.wait_until_finished()
        rows, again = Rows(99), Rows(99)
        with pytest.raises((ValueError, RaystateError)):
            manager.restore(step=1, items={"a": rows, "b": Broken() if rank.number == ranks - 1 else Rows(99)})
        stand[rank.number] = rows.row
        assert manager.restore(step=1, items={"a": again}) is not None and again.row == 1
        manager.close()

    run(script, ranks=ranks)
    assert stand == dict.fromkeys(range(ranks), 99)


def test_a_state_whose_keys_cannot_be_sorted_is_refused_by_path_and_leaves_no_trace():
    def script(rank: Rank) -> None:
        manager = rank.begin()
        cases: tuple[tuple[str, dict[str, Any]], ...] = (
            ("a", {"state": {"a": {1: 1, "b": 2}}}),
            ("a", {"state": {}, "items": {"ema": {"a": {1: np.ones(1), "b": 2}}}}),
        )
        for where, given in cases:
            with pytest.raises(ConfigError, match="keys") as caught:
                manager.save(2, **given)
            assert caught.value.path == where
        assert manager.save(2, {"a": {"1": 1, "b": 2}})
        manager.close()

    run(script)
