"""Ctrl-C in a save to a path, and what the script does then: it saves its last state there, and that stays."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.compat import flax_checkpoints, flax_writing
from raystate.reader import background, saving, turns
from tests.interrupting import interrupted, needs_instructions
from tests.patience import PATIENCE_S

READER = os.path.dirname(saving.__file__)
EVERY = 1 if os.environ.get("RAYSTATE_ALL") else 5


def under_way() -> list[Any]:
    return list(background._unsettled)


@needs_instructions
@pytest.mark.parametrize("save", [raystate.save, raystate.save_async])
def test_at_any_moment(save: Callable[..., Any], tmp_path: Path):
    at, goes_on = 0, True
    while goes_on:
        path = tmp_path / str(at)
        goes_on = interrupted(lambda path=path: save(path, {"x": 1}), at, (READER,))
        raystate.save(path, {"x": 2}, overwrite=True)
        assert raystate.load(path) == {"x": 2}
        concurrent.futures.wait(under_way(), PATIENCE_S)
        assert raystate.load(path) == {"x": 2}, f"what was interrupted at moment {at} came later"
        raystate.save_async(path, {"x": 3}, overwrite=True).result(PATIENCE_S)
        assert raystate.load(path) == {"x": 3}
        gc.collect()
        assert not turns._turns and not under_way(), f"moment {at}"
        at += EVERY
    assert at > 20


def interrupt(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, *, after: bool = True) -> None:
    """The next call of a method is interrupted, when it has done its work or before."""
    real = getattr(owner, name)

    def once(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        if after:
            real(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, once)


def hold_up(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, until: threading.Event) -> None:
    """The next call of a function that writes."""
    real = getattr(owner, name)

    def once(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(owner, name, real)
        assert until.wait(PATIENCE_S)
        return real(*args, **options)

    monkeypatch.setattr(owner, name, once)


def test_the_save_has_begun_and_the_call_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_for: threading.Event
):
    """The next save took itself for a signal handler's and waited for nobody: then the older bytes replaced its own."""
    hold_up(monkeypatch, saving, "write_checkpoint", waited_for)
    interrupt(monkeypatch, threading.Thread, "start")
    with pytest.raises(KeyboardInterrupt):
        raystate.save_async(tmp_path / "one", {"x": 1})
    raystate.save(tmp_path / "one", {"x": 2}, overwrite=True)
    assert not under_way() and raystate.load(tmp_path / "one") == {"x": 2}


def test_flax_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waited_for: threading.Event):
    hold_up(monkeypatch, flax_writing.Tree, "write", waited_for)
    interrupt(monkeypatch, concurrent.futures.ThreadPoolExecutor, "submit")
    manager = flax_checkpoints.AsyncManager()
    with pytest.raises(KeyboardInterrupt):
        flax_checkpoints.save_checkpoint(tmp_path, {"x": 1}, 1, async_manager=manager)
    flax_checkpoints.save_checkpoint(tmp_path, {"x": 2}, 1, overwrite=True)
    manager.executor.shutdown()
    assert flax_checkpoints.restore_checkpoint(tmp_path, None) == {"x": 2}


def test_the_background_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The interpreter's exit waited ten minutes for it."""
    interrupt(monkeypatch, threading.Thread, "start", after=False)
    with pytest.raises(KeyboardInterrupt):
        raystate.save_async(tmp_path / "one", {"x": 1})
    assert not under_way() and not turns._turns
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_a_handlers_save_in_the_background_is_interrupted(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is written in the thread that it has interrupted: whoever ended that was not heard."""
    futures: list[Any] = []

    class Data:
        def get_state(self) -> bytes:  # as well a handler
            monkeypatch.setattr(saving, "write_checkpoint", interrupted)
            futures.append(raystate.save_async(tmp_path / "one", {"x": 1}))
            return b""

        def set_state(self, state: bytes) -> None: ...

    def interrupted(*args: Any, **options: Any) -> None:
        raise error

    with pytest.raises(error):
        raystate.save(tmp_path / "one", {"x": 2}, items={"data": Data()})
    assert not futures and not turns._turns and not under_way()
