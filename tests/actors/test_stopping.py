"""SIGTERM to a script that has no handler of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from raystate.machine.sigterm import Sigterm, Stopped


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


def test_it_ends_as_by_sys_exit_143_and_a_second_one_changes_nothing() -> None:
    with handled_by(signal.SIG_DFL) as sigterm:
        sigterm.take()
        with pytest.raises(SystemExit) as ended:
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143 and ended.value is sigterm.raised and isinstance(ended.value, Stopped)
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
