"""Who starts this process's Ray, in which thread, and with whom it ends; tests/cluster/test_own_ray.py has it with a real one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from raystate.actors import local_ray as own_ray
from raystate.core.formats.errors import RaystateError
from tests.patience import PATIENCE_S


class Started:
    """Stands in for Ray."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.by: list[threading.Thread] = []
        self.runs = self.fails = False
        monkeypatch.setattr(own_ray, "start_ray", self._start)
        monkeypatch.setattr(ray, "is_initialized", lambda: self.runs)
        monkeypatch.setattr(ray, "shutdown", self._end)

    def _start(self) -> None:
        assert not self.runs, "ray.init twice"
        if self.fails:
            raise RaystateError("no room")
        self.by.append(threading.current_thread())
        self.runs = True

    def _end(self) -> None:
        self.runs = False


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    return Started(monkeypatch)


def in_threads(*calls: Callable[[], None]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for one in [pool.submit(call) for call in calls]:
            one.result(PATIENCE_S)


def test_a_thread_that_ends_leaves_ray_to_the_next(started: Started) -> None:
    this = own_ray._ThisRay()
    in_threads(this.enter, this.enter, this.enter)
    (starter,) = started.by
    assert starter.is_alive()
    assert starter.daemon, "the process can end"
    this.enter()
    assert started.by == [starter]
    in_threads(lambda: this.enter(stays=False), lambda: this.enter(stays=False))
    in_threads(this.leave, this.leave)
    assert started.runs, "a manager has entered it to stay"
    this._ended.set()
    starter.join(PATIENCE_S)


def test_what_a_launch_has_started_ends_with_the_last_one(started: Started) -> None:
    this = own_ray._ThisRay()
    for starts in (1, 2):
        in_threads(lambda: this.enter(stays=False), lambda: this.enter(stays=False))
        in_threads(this.leave)
        assert started.runs
        this.leave()
        assert not started.runs
        assert len(started.by) == starts
        started.by[-1].join(PATIENCE_S)
        assert not started.by[-1].is_alive(), "no thread is left of each launch"


def test_a_ray_that_the_script_has_started_is_left_to_it(started: Started) -> None:
    this, started.runs = own_ray._ThisRay(), True
    this.enter(stays=False)
    this.leave()
    assert started.runs
    assert started.by == []


def test_the_main_thread_starts_it_itself(started: Started) -> None:
    """It lasts, and only it can have handlers of signals."""
    own_ray._ThisRay().enter()
    assert started.by == [threading.main_thread()]


def test_who_asks_is_told_why_there_is_none(started: Started) -> None:
    this, started.fails = own_ray._ThisRay(), True
    for _ in range(2):
        with pytest.raises(RaystateError, match="no room"):
            in_threads(lambda: this.enter(stays=False))
    started.fails = False
    in_threads(lambda: this.enter(stays=False))
    in_threads(this.leave)
    assert not started.runs
