"""A step that save() promised, that storage never got, and whose trainer died before it could ask: whoever ends the run is told."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from raystate.core.errors import Interrupted, StorageError
from raystate.core.messages import HostLeaving
from tests.model.world import Rank, World

LOST = range(3, 41)  # some of them: saved while storage is out
LAST = 60


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(8, step, np.float32)}


def train(rank: Rank, first: int, last: int) -> None:
    """Save each step; storage is out for those of LOST."""
    assert rank.manager is not None
    for step in range(first, last + 1):
        rank.world.storage.out = step in LOST
        rank.manager.save(step, state(step))
        rank.rest(0.5)


class Run(World):
    """One rank that saves every step, and the steps that were ever in storage."""

    def __init__(self) -> None:
        super().__init__(1, ranks=1, nodes=1, save_every_steps=1, keep_last=None, save_timeout_s=5.0)
        self.seen: list[int] = []
        self.published = self.seen.append

    def loses_some(self, *, told: bool = False, launched: bool = True) -> None:
        """A trainer saves over an outage, and dies."""

        def trains(rank: Rank) -> None:
            manager = rank.open("first", launched=launched)
            manager.restore(state(0))
            train(rank, 1, LAST)
            if told:
                with pytest.raises(StorageError, match="not durable"):
                    manager.wait_until_finished()
            rank.rest(5.0)

        self.play(trains)

    def ends(self, *, back_to: int | None = None, launched: bool = True) -> StorageError | None:
        """The next trainer goes on, or goes back, and closes."""
        raised: list[StorageError | None] = []

        def goes_on(rank: Rank) -> None:
            manager = rank.open("second", launched=launched)
            restored = manager.restore(state(0), step=back_to, rollback=back_to is not None)
            assert restored is not None and restored.step == (back_to or LAST)
            for step in range(restored.step + 1, LAST + 2):
                manager.save(step, state(step))
                rank.rest(0.5)
            try:
                manager.close()
            except StorageError as error:
                raised.append(error)
            else:
                raised.append(None)

        self.play(goes_on)
        return raised[0]


def missing(world: Run) -> list[int]:
    """What never was in storage."""
    return [step for step in LOST if step not in world.seen]


@pytest.fixture
def run() -> Any:
    world = Run()
    yield world
    world.storage.out = False
    world.close()


def named(error: object) -> list[int]:
    """The steps that it says are lost."""
    steps = re.findall(r"steps? ([0-9, ]+), saved before a restart:", str(error))
    return [int(step) for text in steps for step in text.split(",")]


def test_the_next_trainer_of_the_run_is_told(run: Run) -> None:
    run.loses_some()
    lost = missing(run)
    assert len(lost) > 3, "some gave way on the devices, some in host memory"
    error = run.ends()
    assert error is not None and error.released, "the run is released: starting again would help nobody"
    assert named(error) == lost
    assert f"step {LAST}," not in str(error)


def test_who_was_told_already_is_not_told_again(run: Run) -> None:
    run.loses_some(told=True, launched=False)
    assert missing(run)
    assert run.ends() is None


def test_an_error_that_a_launcher_may_have_swallowed_is_told_again(run: Run) -> None:
    """wait_until_finished() has raised it; nobody knows whether the script has caught it, or has ended with it."""
    run.loses_some(told=True)
    error = run.ends()
    assert error is not None and error.released


def test_a_script_that_is_started_again_is_warned(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever did so knows that the one before was killed: that is no failure of this one."""
    run.loses_some(launched=False)
    lost = missing(run)
    assert run.ends(launched=False) is None
    warned = [
        record.getMessage() for record in caplog.records if record.name == "raystate" and "not durable" in record.getMessage()
    ]
    assert named(warned[-1]) == lost


def test_what_is_made_again_is_not_lost(run: Run) -> None:
    run.loses_some()
    assert min(missing(run)) > 2
    assert run.ends(back_to=2) is None
    assert not missing(run)


def test_an_interrupted_trainer_that_somebody_starts_again_has_told_nobody(run: Run) -> None:
    """Its exception ends in the launcher."""

    def trains(rank: Rank) -> None:
        manager = rank.open("first")
        manager.restore(state(0))
        try:
            train(rank, 1, LAST - 10)
            (host,) = rank.world.hosts
            rank.world.tell(HostLeaving(host=host, within_s=60.0, reason="preempted"))
            train(rank, LAST - 9, LAST)
        except Interrupted as error:
            manager.__exit__(Interrupted, error, None)

    run.play(trains)
    lost = missing(run)
    assert lost
    raised: list[StorageError] = []

    def ends(rank: Rank) -> None:
        manager = rank.open("second")
        assert manager.restore(state(0)) is not None
        with pytest.raises(StorageError) as caught:
            manager.close()
        raised.append(caught.value)

    run.play(ends)
    assert raised[0].released
    assert named(raised[0]) == lost
