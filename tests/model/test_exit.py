"""`sys.exit` in a `with StateManager()` block: a script that is content leaves like one that comes to its end."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from ray._raylet import raise_sys_exit_with_custom_error_message  # pyright: ignore[reportAttributeAccessIssue]

import raystate
from raystate.actors import launch_context
from raystate.machine.sigterm import Stopped
from raystate.manager.ending import is_clean_exit
from raystate.manager.opening import OpenManagers
from raystate.train.launch import _entry
from tests.model.world import ModelLink, Rank, World


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

    with World(ranks=2, save_every_steps=100) as world:
        world.play(script, 2)
        assert raystate.Reader(world.config.storage).all_steps() == durable


@pytest.mark.parametrize("saves", [0, 3])
def test_a_script_that_is_stopped_leaves_its_newest_step(saves: int):
    def trains(rank: Rank) -> None:
        with rank.begin(STATE, launched=False) as manager:
            for step in range(1, saves + 1):
                manager.save(step, STATE)
            raise Stopped(143)

    def script(rank: Rank) -> None:
        with pytest.raises(Stopped):
            trains(rank)

    with World(save_every_steps=100) as world:
        world.play(script, 1)
        assert raystate.Reader(world.config.storage).all_steps() == [saves][: bool(saves)]


def test_a_stop_during_an_outage_is_a_stop(caplog: pytest.LogCaptureFixture):
    def trains(rank: Rank) -> None:
        with rank.begin(STATE, launched=False) as manager:
            rank.world.storage.out = True
            manager.save(1, STATE)
            raise Stopped(143)

    def script(rank: Rank) -> None:
        with pytest.raises(Stopped):
            trains(rank)

    with World(save_every_steps=100) as world:
        world.play(script, 1)
    assert any("step 1 " in record.getMessage() for record in caplog.records if record.levelname == "ERROR")


def test_it_does_so_without_a_with_block_too():
    """By the interpreter's end, at which nobody else would close it."""
    ends: list[BaseException | None] = []

    class Open:
        config = raystate.StateConfig(storage="memory-of-a-test", run="mine")

        def close(self) -> None: ...

        def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
            ends.append(error)
            managers.remove(self.config, self)

    managers = OpenManagers()
    managers.add(Open.config, Open(), launched=False)
    managers.sigterm.raised = stopped = Stopped(143)
    try:
        managers._at_exit()
    finally:
        atexit.unregister(managers._at_exit)
    assert ends == [stopped]


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
        def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None: ...

    managers, mine, launched, closed = OpenManagers(), Open("mine"), Open("launched"), Open("closed")
    managers.add(mine.config, mine, launched=False)
    managers.add(launched.config, launched, launched=True)
    managers.add(closed.config, closed, launched=False)
    managers.remove(closed.config, closed)
    try:
        managers._at_exit()
    finally:
        atexit.unregister(managers._at_exit)
    (told,) = caplog.records
    assert told.__dict__["run"] == "mine"
    assert "was not closed" in told.getMessage() and "Call close()" in told.getMessage()


def steps(manager: raystate.StateManager) -> Iterator[int]:
    """A training loop that somebody else iterates over."""
    with manager:
        for step in range(1, 100):
            manager.save(step, STATE)
            yield step


def stands_still(manager: raystate.StateManager) -> None:
    """For as long as its steps take into host memory."""
    manager._session.link.rest(seconds=1.0)


def up_to_three(loop: Iterator[int]) -> None:
    for step in loop:
        if step == 3:
            break


def asked(manager: raystate.StateManager, last: Callable[[], object] = lambda: None) -> None:
    with manager:
        for step in range(1, 4):
            manager.save(step, STATE)
        stands_still(manager)
        last()


def thrown(manager: raystate.StateManager, error: type[BaseException]) -> None:
    loop: Any = steps(manager)
    for _ in range(3):
        next(loop)
    stands_still(manager)
    with contextlib.suppress(error):
        loop.throw(error)


def closed_generator(manager: raystate.StateManager) -> None:
    loop: Any = steps(manager)
    for _ in range(3):
        next(loop)
    loop.close()


def left_async_generator(manager: raystate.StateManager) -> None:
    async def training() -> AsyncGenerator[int, None]:
        with manager:
            for step in range(1, 100):
                manager.save(step, STATE)
                yield step

    async def main() -> None:
        async with contextlib.aclosing(training()) as loop:
            async for step in loop:
                if step == 3:
                    break

    asyncio.run(main())


def raising(error: BaseException) -> None:
    raise error


def swallowed(manager: raystate.StateManager, error: BaseException) -> None:
    with contextlib.suppress(type(error)):
        asked(manager, lambda: raising(error))


def stacked(manager: raystate.StateManager) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(manager)
        for step in range(1, 4):
            manager.save(step, STATE)


STATE = {"w": np.arange(3)}
WAYS: dict[str, tuple[Callable[[raystate.StateManager], None], bool]] = {
    "its last line": (asked, True),
    "return in an ExitStack": (stacked, True),
    "sys.exit(0)": (lambda manager: swallowed(manager, SystemExit(0)), True),
    "a consumer's break": (lambda manager: up_to_three(steps(manager)), True),
    "a generator's close": (closed_generator, True),
    "an async generator's aclose": (left_async_generator, True),
    "sys.exit(1)": (lambda manager: swallowed(manager, SystemExit(1)), False),
    "an exception that is swallowed above": (lambda manager: swallowed(manager, ValueError()), False),
    "StopIteration": (lambda manager: swallowed(manager, StopIteration()), False),
    "a cancelled task": (lambda manager: swallowed(manager, asyncio.CancelledError()), False),
    "Ctrl-C in a generator": (lambda manager: thrown(manager, KeyboardInterrupt), False),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_leave_is_an_end_or_a_failure(way: str, monkeypatch: pytest.MonkeyPatch):
    """And the newest step becomes durable by either, where nobody starts the script again."""
    leave, is_clean = WAYS[way]
    failed: list[Any] = []
    monkeypatch.setattr(ModelLink, "failed", lambda _self, event, _error: failed.append(event))

    def script(rank: Rank) -> None:
        manager = rank.open("first", launched=False)
        manager.restore(STATE)
        leave(manager)

    with contextlib.closing(World(save_every_steps=100)) as world:
        world.play(script)
        assert world.finished and raystate.Reader(world.config.storage).all_steps() == [3]
        assert bool(failed) != is_clean


def test_what_an_end_loses_is_said_although_the_exception_is_swallowed(caplog: pytest.LogCaptureFixture):
    def script(rank: Rank) -> None:
        manager = rank.open("first", launched=False)
        manager.restore(STATE)
        manager.save(1, STATE, force=True)
        world.storage.out = True
        swallowed(manager, ValueError())

    with contextlib.closing(World(save_every_steps=100)) as world:
        world.play(script)
    assert any("step 1" in record.getMessage() for record in caplog.records if record.name == "raystate")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("end", ["is told to end", "loses a step"])
def test_fit_hears_of_an_end_that_python_swallows(end: str):
    """A generator that is dropped can't raise: `Interrupted`, or the error of a close, looked like a good end."""
    unseen: list[BaseException | None] = []

    def script(rank: Rank) -> None:
        manager = rank.begin(STATE)
        loop = steps(manager)
        next(loop)
        if end == "is told to end":
            manager._interrupted = raystate.Interrupted("preempted")
        else:
            world.storage.out = True
        del loop
        unseen.append(launch_context.unseen())

    try:
        with contextlib.closing(World(save_every_steps=100)) as world:
            world.play(script)
        assert isinstance(unseen[0], raystate.Interrupted if end == "is told to end" else raystate.StorageError)
        with pytest.raises(type(unseen[0])):
            _entry(lambda: None)()
    finally:
        launch_context.set_context(None)
