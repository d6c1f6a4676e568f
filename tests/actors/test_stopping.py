"""SIGTERM to a script that has no handler of its own, and the end of a driver."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from raystate.actors import release
from raystate.core.formats.messages import LeaveReply
from raystate.machine.sigterm import Sigterm, Stopped
from raystate.train import telling


@contextlib.contextmanager
def handled_by(handler: Any) -> Iterator[Sigterm]:
    """In place of pytest's handler, which comes back."""
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield Sigterm()
    finally:
        signal.signal(signal.SIGTERM, before)


def own(number: int, frame: object) -> None:
    """A script's."""


def test_it_ends_as_by_sys_exit_143_and_a_second_one_does_not_end_that() -> None:
    with handled_by(signal.SIG_DFL) as sigterm:
        sigterm.take()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143 and ended.value is sigterm.raised and isinstance(ended.value, Stopped)
        with sigterm.instead_of(ended.value) as end:
            signal.raise_signal(signal.SIGTERM)
        assert end is ended.value
        with pytest.raises(Stopped):  # a script that goes on all the same hears the next one
            signal.raise_signal(signal.SIGTERM)
        sigterm.give_back()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("before", [own, signal.SIG_IGN])
def test_a_handler_of_the_scripts_own_stays(before: Any) -> None:
    with handled_by(before) as sigterm:
        sigterm.take()
        assert signal.getsignal(signal.SIGTERM) is before
        sigterm.give_back()
        assert signal.getsignal(signal.SIGTERM) is before


def test_so_does_one_that_is_set_later() -> None:
    with handled_by(signal.SIG_DFL) as sigterm:
        sigterm.take()
        signal.signal(signal.SIGTERM, own)
        sigterm.give_back()
        assert signal.getsignal(signal.SIGTERM) is own


def test_rays_is_replaced_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "__module__", "ray._private.node")
    with handled_by(own) as sigterm:
        sigterm.take()
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)
        sigterm.give_back()
        assert signal.getsignal(signal.SIGTERM) is own


def test_another_thread_leaves_it_as_it_is() -> None:
    with handled_by(signal.SIG_DFL) as sigterm:
        thread = threading.Thread(target=sigterm.take)
        thread.start()
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:.*fork:RuntimeWarning")
def test_a_fork_dies_of_it_as_any_process() -> None:
    with handled_by(signal.SIG_DFL) as sigterm:
        sigterm.take()
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGTERM)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_driver_hears_what_its_controller_has_asked_already(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question of its own was not answered any more, and cost the five seconds in which a Coordinator waits for its last listeners."""
    asked: list[Any] = []
    reply = LeaveReply(step=3)
    answers = SimpleNamespace(
        release=SimpleNamespace(remote=lambda launch, event: asked.append((launch, event.ask)) or reply),
        newest_step=SimpleNamespace(remote=lambda: 3),
        left=SimpleNamespace(remote=lambda *_: None),
    )
    monkeypatch.setattr(telling, "find_actor", lambda _: answers)
    monkeypatch.setattr(release, "find_actor", lambda _: answers)
    for module in (telling, release):
        monkeypatch.setattr(module.ray, "get", lambda got, **_: got)
    monkeypatch.setattr(release.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(release, "_wait_or_kill", lambda *_: True)
    telling.stopped("hash", "launch")
    assert release.release_by_hash("hash", "Ctrl-C", 10.0, launch="launch") == reply
    assert len(asked) == 2 and asked[0] == asked[1]
