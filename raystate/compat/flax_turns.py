"""Saves of one process to one directory, one after the other in the order of their calls, whatever manager they were given.

Each decides by what it finds there, so what was called before has to be there, or to have failed.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from raystate.core.errors import StorageError

logger = logging.getLogger("raystate")

WAIT_S = 3600.0  # for what is under way: many gigabytes on a slow storage


class Manager(Protocol):
    """flax's AsyncManager, or what has its calls."""

    def save_async(self, task: Callable[[], Any]) -> None: ...


class _Directory:
    """Who saves to a directory."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.turn: Turn | None = None  # whose it is


_directories: dict[tuple[int, str], _Directory] = {}  # by process, too: what a fork copied is not under way in the child


class Turn:
    """A context in which no other save of this process to the directory is under way.

    Args:
        url: canonical, of the directory.

    Attributes:
        is_nested: a signal's handler saves while the save that it interrupted holds the turn. That one can't go on meanwhile, so this
            one does not wait for it.

    Raises:
        StorageError: (on entering) what is under way has not ended in time.
    """

    def __init__(self, url: str):
        self._url = url
        self._directory = _directories.setdefault((os.getpid(), url), _Directory())
        self._thread: int | None = threading.get_ident()  # the caller's, as long as it waits for the save
        self.is_nested = False

    def __enter__(self) -> Turn:
        directory = self._directory
        holder = directory.turn
        if holder is not None and holder._thread == self._thread:
            self.is_nested = True
            return self
        if not directory.lock.acquire(blocking=False):
            logger.debug("a save to %s waits for the one before", self._url)
            if not directory.lock.acquire(timeout=WAIT_S):
                text = f"an earlier save to {self._url} has been under way for more than {WAIT_S:g} s"
                text += ": see whether its storage answers, and save again, or to another directory"
                raise StorageError(text, operation="save", path=self._url)
        directory.turn = self
        return self

    def __exit__(self, *exc: object) -> None:
        if self._thread is not None:
            self._end()

    def go_on_in_background(self, manager: Manager, task: Callable[[], Any]) -> None:
        """Give a task to a manager; the turn ends with it."""

        def run() -> None:
            try:
                task()
            finally:
                self._end()

        manager.save_async(run)
        self._thread = None
        if isinstance(future := getattr(manager, "save_future", None), Future):
            future.add_done_callback(lambda _: self._end())  # one that is cancelled never runs

    def _end(self) -> None:
        if self._directory.turn is self:
            self._directory.turn = None
            self._directory.lock.release()
