"""`sys.exit` in a `with StateManager()` block: a script that is content leaves like one that comes to its end."""

from __future__ import annotations

import atexit
import sys
from typing import Any

import numpy as np
import pytest
from ray._raylet import raise_sys_exit_with_custom_error_message  # pyright: ignore[reportAttributeAccessIssue]

import raystate
from raystate.manager.ending import is_clean_exit
from raystate.manager.opening import OpenManagers
from tests.model.world import Rank, World


def train(rank: Rank, code: Any) -> None:
    state = {"w": np.arange(3)}
    with rank.open("first") as manager:
        manager.restore(state)
        for step in range(1, 4):
            manager.save(step, state)
        sys.exit(code)


@pytest.mark.parametrize(("code", "durable"), [(None, [3]), (0, [3]), (1, [])])
def test_the_last_step_is_durable_after_a_clean_exit_only(code: Any, durable: list[int]):
    def script(rank: Rank) -> None:
        with pytest.raises(SystemExit):
            train(rank, code)

    world = World(1, ranks=2, nodes=1, save_every_steps=100)
    try:
        members = [Rank(world, number, script) for number in range(2)]
        world.run(members)
        assert raystate.Reader(world.config.storage).all_steps() == durable
        for member in members:
            member.kill()
    finally:
        world.close()


def test_rays_own_way_to_end_a_process_is_no_clean_exit():
    with pytest.raises(SystemExit) as ended:
        raise_sys_exit_with_custom_error_message("The process receives a SIGTERM.")
    assert ended.value.code == 0 and not is_clean_exit(ended.value)


def test_who_forgets_to_close_is_told_at_the_end(caplog: pytest.LogCaptureFixture):
    """Of a script's own managers only: what `fit` has launched it also releases."""

    class Open:
        def __init__(self, run: str):
            self.config = raystate.StateConfig(storage="memory-of-a-test", run=run)

        def close(self) -> None: ...

    managers, mine, launched, closed = OpenManagers(), Open("mine"), Open("launched"), Open("closed")
    managers.add(mine.config, mine, launched=False)
    managers.add(launched.config, launched, launched=True)
    managers.add(closed.config, closed, launched=False)
    managers.remove(closed.config, closed)
    try:
        managers._at_exit()
    finally:
        atexit.unregister(managers._at_exit)
    (said,) = (record.getMessage() for record in caplog.records)
    assert "of run 'mine' was not closed" in said and "Call close()" in said
