"""A line for people where something takes long."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from raystate.waits import SAID_AGAIN_S, TOLD_AFTER_S

logger = logging.getLogger(__name__)


class DelayedLine:
    """A line that is told only if what it says takes long; then once a minute, with the seconds."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None  # of the line that waits; None: it can be pickled

    def begin(self, text: str, *, at_once: bool = False) -> None:
        """Tell it, unless `end` is called soon."""
        self.end()
        self._ended = threading.Event()
        arguments = (text, 0.0 if at_once else TOLD_AFTER_S, self._ended)
        threading.Thread(target=_tell, args=arguments, name="raystate-delayed-line", daemon=True).start()

    def end(self) -> None:
        """It is over."""
        if self._ended is not None:
            self._ended.set()
            self._ended = None


def _tell(text: str, after_s: float, ended: threading.Event) -> None:
    began_s = time.monotonic()
    if ended.wait(after_s):
        return
    logger.log(logging.INFO if after_s else logging.WARNING, "%s", text)
    while not ended.wait(SAID_AGAIN_S):
        logger.warning("%s (for %.0f s)", text, time.monotonic() - began_s)


@contextlib.contextmanager
def told_if_long(text: str) -> Iterator[None]:
    """Tell it if what is done meanwhile takes long."""
    line = DelayedLine()
    line.begin(text)
    try:
        yield
    finally:
        line.end()
