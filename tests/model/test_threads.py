"""Another thread of a process saves, restores or closes while the manager is left: the process lives, and nothing is lost unnamed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import raystate
from raystate.inspection.listing import given_up
from raystate.storage import open_storage
from tests.model.world import Rank, World


def state(step: int, size: int = 8) -> dict[str, Any]:
    return {"w": np.full(size, step, np.float32)}


def leave(manager: raystate.StateManager, how: str) -> str:
    """What is said of steps that are lost."""
    error: BaseException = ValueError("the training is wrong")
    if how == "interruption":
        error = raystate.Interrupted("preempted")
    try:
        if how == "close":
            manager.close()
        else:
            manager.__exit__(type(error), error, None)
    except raystate.RaystateError as lost:
        error = lost
    return "; ".join((str(error), *getattr(error, "__notes__", ())))


BESIDE: dict[str, Callable[[raystate.StateManager, int], Any]] = {
    "save": lambda manager, step: manager.save(step, state(step), force=True),
    "save that needs other slots": lambda manager, step: manager.save(step, state(step, 5_000 * step), force=True),
    "restore": lambda manager, _: manager.restore(state(0), shapes="checkpoint") is None,
    "close": lambda manager, _: manager.close(),
    "wait": lambda manager, _: manager.wait_until_finished(),
}


@pytest.mark.parametrize("how", ["close", "exception", "exception under a launcher", "interruption"])
@pytest.mark.parametrize("call", BESIDE)
def test_a_thread_goes_on_while_the_manager_is_left(call: str, how: str) -> None:
    for seed in range(4):
        _play(seed, BESIDE[call], how)


def _play(seed: int, call: Callable[[raystate.StateManager, int], Any], how: str) -> None:
    world = World(seed, ranks=1, nodes=1, save_every_steps=1)
    world.slow = bool(seed % 2)
    promised: list[int] = []

    def script(rank: Rank) -> None:
        manager = rank.open("first", launched="launcher" in how)
        manager.restore(state(0))
        manager.save(1, state(1), force=True)

        def other(rank: Rank) -> None:
            step = 2
            while not manager._ending.detached:
                with contextlib.suppress(raystate.RaystateError):
                    if call(manager, step):
                        promised.append(step)
                step += 1
                rank.rest(0.002)
            with pytest.raises(raystate.RaystateError, match="is closed"):
                manager.save(step, state(step))

        beside = rank.beside(other)
        rank.rest(0.05 * seed)
        said = leave(manager, how)
        rank.rest_until(lambda: beside.finished)
        assert not rank.dead
        if how in ("close", "exception"):
            published = set(raystate.Reader(world.config.storage).all_steps())
            lost = [step for step in promised if step not in published and step >= min(published)]
            if lost and max(published) > max(lost):  # then an end only warns, and the log has them
                said += "; ".join((given_up(open_storage(world.config.storage)) or {}).values())
            assert all(re.search(rf"\bstep {step}\b", said) for step in lost), (promised, published, said)

    with world:
        world.play(script)
        assert not world.crashed


def test_who_closes_behind_another_thread_hears_of_it_and_waits_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(save_every_steps=1)
    told = r"another thread \(rank-0\) has been closing this StateManager for \d+ s"

    def script(rank: Rank) -> None:
        manager = rank.begin(state(0))
        config = manager.config
        limit_s = 2 * (config.save_timeout_s + config.barrier_timeout_s)
        error = ValueError("the training is wrong")
        monkeypatch.setattr(manager._ending, "leave", lambda _: rank.rest(3 * limit_s))
        beside = rank.beside(lambda _: manager.close())
        rank.rest(1.0)
        began_s = world.now_s
        with pytest.raises(raystate.BarrierTimeoutError, match=told):
            manager.close()
        assert world.now_s - began_s < 1.5 * limit_s
        manager.__exit__(ValueError, error, None)  # which goes on
        assert re.search(told, error.__notes__[0])
        assert len(re.findall(f"WARNING.*{told}", caplog.text)) == 2, "each once"
        rank.rest_until(lambda: beside.finished, 2 * limit_s)

    world.play_all(script)
