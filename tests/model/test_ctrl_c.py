"""Ctrl-C, or a signal handler that raises, at any moment of a call: it has done all or nothing, and the script goes on."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import raystate
from raystate import manager as package
from raystate.manager.opening import open_managers
from raystate.runtime.host import loop as host_loop
from tests.interrupting import interrupted
from tests.model.world import Rank, World

MANAGER = os.path.dirname(package.__file__)
INSIDE = (MANAGER, os.path.join(os.path.dirname(MANAGER), "core", "trainer"), os.path.join(os.path.dirname(MANAGER), "arena"))
HOST = (host_loop.__file__,)  # in the model a call to it runs in the thread that makes it
RESTORING = tuple(os.path.join(MANAGER, name) for name in ("facade.py", "restoring.py"))
SEVERAL = 8  # more than there are slots
EVERY = 1 if os.environ.get("RAYSTATE_ALL") else 19
LARGE = 200_000


def state(step: int, size: int = 100) -> dict[str, Any]:
    return {"w": np.full(size, step, np.float32)}


def play(at: int, cut: Callable[[raystate.StateManager], Any], after: Callable[[raystate.StateManager], None]) -> bool:
    """Three steps, a call that is interrupted, what the script does then, and many more steps. Whether there was an interruption."""
    world = World(at, ranks=1, nodes=1, check_saves="off")
    came: list[bool] = []

    def train(rank: Rank) -> None:
        manager = rank.begin(state(0))
        for step in range(1, 4):
            assert manager.save(step, state(step), force=True)
        came.append(interrupted(lambda: cut(manager), at, INSIDE, elsewhere=HOST))
        after(manager)
        manager.wait_until_finished()
        newest = manager.latest_step()
        assert newest is not None and newest >= 3
        for step in range(10, 10 + SEVERAL):
            assert manager.save(step, state(step), force=True)
            manager.wait_until_finished()
            assert manager.latest_step() == step
        for step in range(30, 30 + SEVERAL):
            manager.save(step, state(step))
        manager.close()

    def again(rank: Rank) -> None:
        manager = rank.open("second")
        restored = manager.restore(state(0))
        assert restored is not None and restored.step == 29 + SEVERAL
        assert float(restored.state["w"][0]) == restored.step
        manager.close()

    world.play_all(train, again)
    return came[0]


def once_more(step: int, size: int = 100) -> Callable[[raystate.StateManager], None]:
    """The same save again: it is durable, with these bytes."""

    def save(manager: raystate.StateManager) -> None:
        manager.save(step, state(step, size), force=True)
        manager.wait_until_finished()
        assert manager.latest_step() == step

    return save


def go_on(step: int) -> Callable[[raystate.StateManager], None]:
    """Another step than the one that was interrupted."""

    def save(manager: raystate.StateManager) -> None:
        assert manager.save(step, state(step), force=True)

    return save


def wait(manager: raystate.StateManager) -> None:
    manager.wait_until_finished()


def restore(manager: raystate.StateManager) -> None:
    restored = manager.restore(state(0), shapes="checkpoint")
    assert restored is not None and restored.step >= 3
    with contextlib.suppress(raystate.StorageError):  # what the restore has given up is named
        manager.wait_until_finished()


def save_without_it(manager: raystate.StateManager) -> None:
    """Nothing goes on after half a restore: what was saved then was thrown away in silence, or the run ended in mid-training."""
    if manager._session.unfinished_restore:  # else it had not asked anybody yet, or has ended
        refused.append(manager)
        for call in (lambda: manager.save(4, state(4), force=True), manager.wait_until_finished):
            with pytest.raises(raystate.RaystateError, match=r"was interrupted, and has to be called again"):
                call()
    else:
        assert manager.save(4, state(4), force=True)
        manager.wait_until_finished()
    restore(manager)


refused: list[object] = []


CUTS: dict[str, tuple[Callable[[raystate.StateManager], Any], tuple[Callable[[raystate.StateManager], None], ...]]] = {
    "save": (lambda manager: manager.save(4, state(4), force=True), (once_more(4), go_on(5), wait, restore)),
    "save that is skipped or not": (lambda manager: manager.save(4, state(4)), (once_more(4), go_on(5), wait, restore)),
    "save of a larger state": (
        lambda manager: manager.save(4, state(4, LARGE), force=True),
        (once_more(4, LARGE), go_on(5), wait, restore),
    ),
    "wait": (wait, (go_on(4), wait)),
    "restore": (restore, (restore, save_without_it)),
}


@pytest.mark.parametrize("kind", CUTS)
def test_an_interruption_at_any_moment(kind: str) -> None:
    cut, afters = CUTS[kind]
    at, turn = 0, 0
    refused.clear()
    while play(at, cut, afters[turn % len(afters)]):
        at, turn = at + EVERY, turn + 1
    assert turn > 3
    assert bool(refused) == (kind == "restore")


def test_a_rollback_that_is_interrupted_gives_up_what_came_after_it() -> None:
    """Closing then made a step of the past durable, in the new lineage."""
    at, outcomes, goes_on = 0, set[tuple[bool, int]](), True
    while goes_on:
        world = World(save_every_steps=100)

        def train(rank: Rank, at: int = at) -> None:
            nonlocal goes_on
            manager = rank.begin(state(0))
            assert manager.save(1, state(1), force=True)
            manager.wait_until_finished()
            for step in range(2, 6):
                manager.save(step, state(step))
            asked: list[object] = []
            real = manager._session.ask
            manager._session.ask = lambda *args, **rest: (asked.append(args), real(*args, **rest))[1]
            goes_on = interrupted(lambda: manager.restore(state(0), step=1, rollback=True), at, RESTORING)
            began = bool(asked)
            with contextlib.suppress(raystate.RaystateError):
                manager.close()
            newest = raystate.Reader(rank.world.config.storage).latest_step()
            assert newest is not None
            outcomes.add((began, newest))

        world.play_all(train)
        at += 1
    assert outcomes - {(False, 1)} == {(False, 5), (True, 1)}  # close() refuses from shortly before it asks


def opened(rank: Rank) -> raystate.StateManager:
    manager = rank.begin(state(0))
    for step in range(1, 4):
        assert manager.save(step, state(step), force=True)
    manager.wait_until_finished()
    return manager


ENDS: dict[str, Callable[[raystate.StateManager], Any]] = {
    "close": lambda manager: manager.close(),
    "failed": lambda manager: manager.__exit__(ValueError, ValueError("x"), None),
    "told to end": lambda manager: manager.__exit__(raystate.Interrupted, raystate.Interrupted("preempted"), None),
}


@pytest.mark.parametrize("kind", [*ENDS, "open"])
def test_a_manager_that_is_interrupted_as_it_ends_or_begins_lets_go(kind: str) -> None:
    """It stayed attached: the next one of this process waited for it, or the process was ended with it."""
    at, goes_on = 0, True
    while goes_on:
        world = World()

        def train(rank: Rank, at: int = at) -> None:
            nonlocal goes_on
            if kind == "open":
                goes_on = interrupted(lambda: rank.open("first"), at, INSIDE, elsewhere=HOST)
                open_managers.close_earlier(rank.world.config, takeover=False)  # as the next constructor does
                newest = None
            else:
                manager = opened(rank)
                goes_on = interrupted(lambda: ENDS[kind](manager), at, INSIDE, elsewhere=HOST)
                if goes_on:
                    manager._fail(KeyboardInterrupt())  # as the `with` does, or the interpreter's end
                newest = 3
            again = rank.open("second")
            restored = again.restore(state(0))
            assert (restored.step if restored is not None else None) == newest
            assert again.save(4, state(4), force=True)
            again.close()

        world.play_all(train)
        at += EVERY
    assert at > EVERY


def test_a_signal_handler_is_told_that_a_call_has_not_finished() -> None:
    """And what only reads is answered."""
    world = World()
    told: list[Any] = []

    def train(rank: Rank) -> None:
        manager = rank.begin(state(0))
        manager.save(1, state(1), force=True)

        def handler(frame: Any, event: str, _: Any) -> Any:
            if event == "line" and len(told) < 3:
                told.append(manager.latest_step())
                with pytest.raises(raystate.RaystateError, match=r"save\(\) was called inside save\(\)"):
                    manager.save(3, state(3))
                told.append(manager.should_save(3))
            return handler

        before = sys.gettrace()
        sys.settrace(lambda frame, *_: handler if frame.f_code.co_name == "write_word" else None)
        try:
            assert manager.save(2, state(2), force=True)
        finally:
            sys.settrace(before)
        assert told
        assert manager.save(3, state(3), force=True)
        manager.close()

    world.play_all(train)
