"""Work beside the caller's, as futures that the interpreter's exit waits for."""

from __future__ import annotations

import concurrent.futures.thread  # its own exit function must be there before ours, see _at_exit
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

logger = logging.getLogger("raystate")

T = TypeVar("T")

EXIT_WAIT_S = 600.0  # as long as one wait on storage may take

_lock = threading.Lock()
_unsettled: dict[Future[Any], str] = {}  # what is under way, and errors that nobody has asked for -> what it is
_registered = False


class Pending(Future[T]):
    """A future that notes that its outcome was told."""

    def result(self, timeout: float | None = None) -> T:
        """See `concurrent.futures.Future`."""
        try:
            return super().result(timeout)
        finally:
            self._told()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `concurrent.futures.Future`."""
        try:
            return super().exception(timeout)
        finally:
            self._told()

    def _told(self) -> None:
        if self.done():
            with _lock:
                _unsettled.pop(self, None)


def in_background(what: str, work: Callable[[], T]) -> Future[T]:
    """Do `work` in a thread of its own.

    Args:
        what: for the log: "saving gs://…".
        work: must end by itself; nothing can stop it.
    """
    future: Pending[T] = Pending()
    with _lock:
        _unsettled[future] = what
    # A daemon: the exit waits for it in _at_exit, which has a deadline.
    thread = threading.Thread(target=_run, args=(future, work), name="raystate-background", daemon=True)
    try:
        _register()
        thread.start()
    except RuntimeError:  # the interpreter is on its way out and starts no thread any more
        _run(future, work)
    return future


def _run(future: Pending[T], work: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, it is the future's to tell
            future.set_exception(error)
    if future.cancelled() or Future.exception(future) is None:
        with _lock:
            _unsettled.pop(future, None)


def _register() -> None:
    """Have `_at_exit` called before the interpreter ends.

    `atexit` comes too late: by then no executor takes work any more, and Orbax and the storage clients use executors. The function
    that concurrent.futures uses itself for that has no public name; what is registered last is called first.
    """
    global _registered
    with _lock:
        if not _registered:
            threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
            _registered = True


def _at_exit() -> None:
    deadline_s = time.monotonic() + EXIT_WAIT_S
    with _lock:
        waiting = dict(_unsettled)
    for future, what in waiting.items():
        if not future.done():
            logger.info("the interpreter ends when %s is done, at most %.0f s from now", what, EXIT_WAIT_S)
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            error = Future.exception(future, max(0.0, deadline_s - time.monotonic()))
            if error is not None:
                logger.error("%s failed, and nobody asked for the outcome: %s", what, error)
            continue
        if not future.done():
            logger.error("%s was not done %.0f s after the interpreter began to end; it is given up", what, EXIT_WAIT_S)
