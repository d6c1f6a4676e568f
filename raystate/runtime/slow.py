"""A line for people where something takes long, and how busy this machine is."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator

from raystate.waits import TOLD_AFTER_S

logger = logging.getLogger(__name__)


class SlowLine:
    """A line that is told only if what it says takes long."""

    def __init__(self) -> None:
        self._timer: threading.Timer | None = None

    def begin(self, text: str, *, at_once: bool = False) -> None:
        """Tell it, unless `end` is called soon."""
        self.end()
        self._timer = threading.Timer(0.0 if at_once else TOLD_AFTER_S, logger.warning, ("%s", text))
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """It is over."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


@contextlib.contextmanager
def told_if_slow(text: str) -> Iterator[None]:
    """Tell it if what is done meanwhile takes long."""
    line = SlowLine()
    line.begin(text)
    try:
        yield
    finally:
        line.end()


def load() -> str:
    """How busy this machine is, in words."""
    return f"this machine has a load of {os.getloadavg()[0]:.0f} on {len(os.sched_getaffinity(0))} cores"
