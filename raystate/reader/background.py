"""Work beside the caller's, as futures that the interpreter's exit waits for."""

from __future__ import annotations

import concurrent.futures.thread  # its own exit function must be there before ours, see _at_exit
import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from raystate.core.formats.errors import RaystateError
from raystate.waits import LONGEST_S

logger = logging.getLogger("raystate")

T = TypeVar("T")


_lock = threading.RLock()  # a signal's handler may save while its thread holds it
_unsettled: dict[Future[Any], str] = {}  # what is under way -> what it is
_registered = False


def in_background(what: str, work: Callable[[], T], *, at_once: bool = False) -> Future[T]:
    """Do `work` in a thread of its own. A failure is logged at once, and is the future's to raise.

    Args:
        what: for the log: "saving gs://…".
        work: must end by itself; nothing can stop it.
        at_once: do it now, in this thread.
    """
    future: Future[T] = Future()
    try:
        with _lock:
            _unsettled[future] = what
        if at_once:
            _run_here(future, what, work)
            return future
        # A daemon: the exit waits for it in _at_exit, which has a deadline.
        thread = threading.Thread(target=_run, args=(future, what, work), name="raystate-background", daemon=True)
        try:
            _register()
            thread.start()
        except RuntimeError:  # the interpreter is on its way out and starts no thread any more
            _run_here(future, what, work)
    except BaseException:
        if future.cancel():  # it has not begun, and never will
            _settled(future)
        raise
    return future


def _run_here(future: Future[T], what: str, work: Callable[[], T]) -> None:
    _run(future, what, work)
    error = future.exception(0.0)
    if error is not None and not isinstance(error, Exception):
        raise error  # Ctrl-C and sys.exit are this thread's, too


def _run(future: Future[T], what: str, work: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        _settled(future)
        return
    try:
        done = work()
    except BaseException as error:  # any at all: the future tells it
        if not isinstance(error, RaystateError):  # else its sentence says all
            error.add_note("".join(traceback.format_exception(error)))
        logger.error("%s failed: %s", what, "\n".join([str(error), *getattr(error, "__notes__", ())]))
        _forget_frames(error)
        _settled(future)
        future.set_exception(error)
    else:
        _settled(future)
        future.set_result(done)


def _settled(future: Future[Any]) -> None:
    with _lock:
        _unsettled.pop(future, None)


def _forget_frames(error: BaseException) -> None:
    """Drop an error's tracebacks: through the variables and closures of their frames a forgotten
    future would hold a whole state."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]


def _register() -> None:
    """Have `_at_exit` called before the interpreter ends.

    `atexit` comes too late: by then no executor takes work any more, and Orbax and the storage
    clients use executors. The function that concurrent.futures uses itself for that has no public
    name; the last one registered is called first.
    """
    global _registered
    with _lock:
        if not _registered:
            threading._register_atexit(_at_exit)  # type: ignore[attr-defined]
            _registered = True


def _at_exit() -> None:
    deadline_s = time.monotonic() + LONGEST_S
    with _lock:
        waiting = dict(_unsettled)
    for future, what in waiting.items():
        if not future.done():
            logger.info("the interpreter ends when %s is done, at most %.0f s from now", what, LONGEST_S)
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            future.exception(max(0.0, deadline_s - time.monotonic()))  # a failure is logged by then
        if not future.done():
            logger.error("%s was not done %.0f s after the interpreter began to end; it is given up", what, LONGEST_S)


def _in_a_forked_child() -> None:
    """Saves under way are the parent's: the child has none of its threads, and would wait for them
    in vain."""
    global _lock
    _lock = threading.RLock()
    _unsettled.clear()


os.register_at_fork(after_in_child=_in_a_forked_child)
