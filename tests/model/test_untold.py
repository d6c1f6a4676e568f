"""A step that save() promised, that storage never got, and whose trainer died before it could ask: whoever ends the run is told."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from raystate import launch_context
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

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        super().__init__(1, ranks=1, nodes=1, save_every_steps=1, keep_last=None, save_timeout_s=5.0)
        self.seen: list[int] = []
        self.published = self.seen.append
        self._caplog = caplog

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

    def ends(self, *, back_to: int | None = None, last: int = LAST) -> list[int]:
        """The next trainer goes on from the last step, or goes back, and closes: the steps that it is warned of."""

        def goes_on(rank: Rank) -> None:
            manager = rank.open("second")
            restored = manager.restore(state(0), step=back_to, rollback=back_to is not None)
            assert restored is not None and restored.step == (back_to or last)
            for step in range(restored.step + 1, last + 1):
                manager.save(step, state(step))
                rank.rest(0.5)
            manager.close()

        self.play(goes_on)
        said = [
            one.getMessage()
            for one in self._caplog.records
            if one.name == "raystate" and "saved before a restart" in one.getMessage()
        ]
        found = re.findall(r"steps? ([0-9, ]+), saved before a restart:", "".join(said))
        return [int(step) for steps in found for step in steps.split(",")]


def missing(run: Run) -> list[int]:
    """What never was in storage."""
    return [step for step in LOST if step not in run.seen]


@pytest.fixture
def run(caplog: pytest.LogCaptureFixture) -> Any:
    world = Run(caplog)
    yield world
    world.storage.out = False
    world.close()


def test_the_next_trainer_of_the_run_is_told(run: Run) -> None:
    run.loses_some()
    lost = missing(run)
    assert len(lost) > 3, "some gave way on the devices, some in host memory"
    assert run.ends() == lost
    assert launch_context.summary()["lost"], "for the launcher's result"


def test_who_was_told_already_is_not_told_again(run: Run) -> None:
    run.loses_some(told=True, launched=False)
    assert missing(run)
    assert run.ends() == []


def test_an_error_that_a_launcher_may_have_swallowed_is_told_again(run: Run) -> None:
    """wait_until_finished() has raised it; nobody knows whether the script has caught it, or has ended with it."""
    run.loses_some(told=True)
    assert run.ends() == missing(run)


def test_what_is_made_again_is_not_lost(run: Run) -> None:
    run.loses_some()
    assert min(missing(run)) > 2
    assert run.ends(back_to=2) == []
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
            train(rank, LAST - 9, LAST + 20)
        except Interrupted as error:
            manager.__exit__(Interrupted, error, None)
            stopped.append(error.step)

    stopped: list[int] = []
    run.play(trains)
    lost = missing(run)
    assert lost and stopped
    assert run.ends(last=stopped[0]) == lost
