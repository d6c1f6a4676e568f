"""SIGTERM to a script or a driver: it ends as by `sys.exit(143)`, so that its newest step becomes durable."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Generator
from typing import Any

logger = logging.getLogger("raystate")


class Stopped(SystemExit):
    """This process was asked to end, by a signal."""

    def __str__(self) -> str:
        return "SIGTERM"


def tell_stop(by: str, run: str) -> None:
    """At once: until the process ends, some seconds pass."""
    logger.warning("stopped by %s: the newest step becomes durable first; the same command goes on from it", by, extra={"run": run})


def in_main_thread() -> bool:
    """Whether this thread may set handlers of signals."""
    return threading.current_thread() is threading.main_thread()


class Sigterm:
    """Once taken, SIGTERM raises `Stopped` in the main thread, unless the script has a handler of its own.

    Ray's handler, which replaces the default one, ends a Ray that this process has started before anything is durable.

    Attributes:
        raised: what it has raised last.
    """

    def __init__(self) -> None:
        self.raised: Stopped | None = None
        self._ends = False  # as it said: a second signal must not end what the first one began
        self._before: Any = None
        self._pid = -1

    def take(self) -> None:
        """From here on. Another thread than the main one can't, and leaves things as they are."""
        before = signal.getsignal(signal.SIGTERM)
        is_rays = str(getattr(before, "__module__", "")).startswith("ray.")
        if in_main_thread() and (before is signal.SIG_DFL or is_rays):
            self.raised, self._before, self._pid = None, before, os.getpid()
            signal.signal(signal.SIGTERM, self._stop)

    @contextlib.contextmanager
    def instead_of(self, error: BaseException | None) -> Generator[BaseException | None, None, None]:
        """Around an end by `error`. Ray that is waited for puts an exit of its own in the place of what this raised, and asyncio
        cancels its tasks: gives what this raised then, and raises it."""
        is_rays = isinstance(error, SystemExit) and hasattr(error, "ray_terminate_msg")
        stopped = self.raised if is_rays or isinstance(error, asyncio.CancelledError) else None
        self._ends = isinstance(stopped or error, Stopped)
        try:
            yield stopped or error
        finally:
            self._ends = False
            if stopped is not None:
                raise stopped from None

    def give_back(self) -> None:
        """The handler from before counts again, if the script has not set another one meanwhile."""
        if in_main_thread() and signal.getsignal(signal.SIGTERM) == self._stop:
            signal.signal(signal.SIGTERM, self._before)

    def _stop(self, number: int, _frame: object) -> None:
        if os.getpid() != self._pid:  # a fork, which dies of it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self._ends:
            self.raised = Stopped(128 + number)
            raise self.raised
