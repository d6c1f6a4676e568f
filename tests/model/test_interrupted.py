"""An announced end stays one, although storage has failed before it."""

from __future__ import annotations

import pytest

import raystate
from raystate.core.formats.messages import StopAsked
from tests.model.world import Rank, World, state

MOST_STEPS = 2000


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_notice_after_a_step_that_was_lost(comes_back: bool, caplog: pytest.LogCaptureFixture) -> None:
    """`save` raises Interrupted. Its newest step judges it: only if that is not durable, it names what isn't. Else steps that gave way
    while storage was out are one warning."""
    world = World(ranks=2, save_every_steps=5, save_timeout_s=5.0)
    stopped: dict[int, tuple[int, raystate.Interrupted]] = {}

    def trains(rank: Rank) -> None:
        manager = rank.begin(state(0))
        try:
            for step in range(1, MOST_STEPS):
                if rank.number == 0 and step == 8:
                    world.storage.out = True
                if rank.number == 0 and step == 60:
                    world.storage.out = not comes_back
                    (host,) = world.hosts
                    world.tell(StopAsked(host=host, within_s=60.0, reason="preempted"))
                rank.rest(0.5)
                manager.save(step, state(step))
        except raystate.Interrupted as error:
            stopped[rank.number] = (error.step, error)

    with world:
        world.play(trains)
        assert sorted(stopped) == [0, 1]
        (step, error), (other, _) = stopped[0], stopped[1]
        assert step == other, "both at the same step"
        assert "preempted" in str(error)
        texts = ["not durable" in text and "step 10: " in text for text in (str(error), *caplog.messages)]
        assert texts[0] is (error.__cause__ is not None) is (not comes_back)
        assert sum(texts[1:]) == comes_back
        durable = raystate.Reader(world.config.storage).latest_step()
        assert (durable == step) is comes_back


def test_a_loop_that_is_left_where_it_should_stop_does_not_look_finished() -> None:
    """`reached_preemption` says True, the script leaves its loop without that step's save, and closes: nothing is released."""
    world = World(ranks=2, save_every_steps=100)
    closed: dict[int, raystate.Interrupted] = {}
    left_at: dict[int, int] = {}
    found: list[int] = []

    def trains(rank: Rank) -> None:
        manager = rank.begin(state(0))
        for step in range(1, MOST_STEPS):
            if rank.number == 0 and step == 8:
                (host,) = world.hosts
                world.tell(StopAsked(host=host, within_s=60.0, reason="preempted"))
            rank.rest(0.5)
            if manager.reached_preemption(step):
                left_at[rank.number] = step
                break
            manager.save(step, state(step))
        try:
            manager.close()
        except raystate.Interrupted as error:
            closed[rank.number] = error
            manager.__exit__(raystate.Interrupted, error, None)

    def goes_on(rank: Rank) -> None:
        manager = rank.open("second")
        restored = manager.restore(state(0))
        assert restored is not None
        found.append(restored.step)
        manager.close()

    with world:
        world.play(trains)
        assert sorted(closed) == [0, 1]
        assert left_at[0] == left_at[1]
        assert "preempted" in str(closed[0])
        assert {error.step for error in closed.values()} == {left_at[0] - 1}, "the newest that was saved"
        assert raystate.Reader(world.config.storage).latest_step() == left_at[0] - 1
        world.crashed = False
        world.play(goes_on)
        assert found == [left_at[0] - 1] * 2
