"""Saves of one process to one directory, one after the other in the order of their calls, also
through several managers.

Each decides by what it finds there, so earlier calls have to be there, or to have failed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Protocol

from raystate.core.formats.errors import StorageError
from raystate.reader.turns import Handed, Turn
from raystate.waits import SHARE_WRITTEN_S

logger = logging.getLogger("raystate")


class Manager(Protocol):
    """flax's AsyncManager, or what has its calls."""

    def save_async(self, task: Callable[[], Any]) -> None: ...


def go_on_in_background(turn: Turn, manager: Manager, task: Callable[[], Any]) -> None:
    """Give a task to a manager; the turn ends with it."""
    handed = Handed(task, [turn])
    handed.give(lambda: manager.save_async(handed))
    if isinstance(future := getattr(manager, "save_future", None), Future):
        future.add_done_callback(lambda _: handed.end())  # one that is cancelled never runs


@contextmanager
def directory_turn(url: str) -> Generator[Turn, None, None]:
    """A context that begins when no other save of this process to the directory is under way.

    Args:
        url: canonical, of the directory.

    Raises:
        StorageError: (on entering) what is under way has not ended in time.
    """
    turn = Turn(url)
    try:
        if turn.must_wait:
            logger.debug("a save to %s waits for the one before", url)
        if not turn.wait(SHARE_WRITTEN_S):
            text = f"an earlier save to {url} has been under way for more than {SHARE_WRITTEN_S:g} s"
            text += ": see whether its storage answers, and save again, or to another directory"
            raise StorageError(text, operation="save", path=url)
        yield turn
    finally:
        if not turn.is_in_background:
            turn.leave()
