"""Who has asked the Coordinator something, and what it was told."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from raystate.core.coordinator.context import remember
from raystate.core.formats.messages import Failure, Reply

REMEMBERED = 4096

Look = TypeVar("Look")


class Asks:
    """Answers by ask: `future` from any thread, the others from the loop's.

    Attributes:
        failed: the answer to all asks from now on; None: nothing has failed.
    """

    def __init__(self) -> None:
        self._futures: dict[str, Future[Reply]] = {}  # of those who wait
        # The newest few: a caller that has not got its answer asks again.
        self._answered: dict[str, Reply] = {}
        self._lock = threading.Lock()
        self.failed: Failure | None = None

    def future(self, ask: str) -> Future[Reply]:
        """Gets the answer; the same one for the same ask."""
        with self._lock:
            future = self._futures.get(ask)
            if future is None:
                future = Future[Reply]()
                known = self._answered.get(ask, self.failed)
                if known is None:
                    self._futures[ask] = future
                else:
                    future.set_result(known)
            return future

    def answer(self, ask: str, reply: Reply) -> None:
        """The first answer counts."""
        with self._lock:
            future = self._futures.pop(ask, None)
            if ask not in self._answered:
                remember(self._answered, ask, reply, most=REMEMBERED)
        if future is not None:
            future.set_result(reply)

    def fail_all(self, failure: Failure) -> None:
        """Answer all that wait, and all that ask from now on, with this failure."""
        with self._lock:
            self.failed = failure
            waiting, self._futures = [*self._futures.values()], {}
        for future in waiting:
            future.set_result(failure)


class Looks:
    """What others want to be done between two events of the machine: `ask` and `put` from any thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    def put(self, do: Callable[[], object]) -> None:
        """Do it. An exception ends the loop."""
        self._waiting.put(do)

    def ask(self, view: Callable[[], Look]) -> Future[Look]:
        """What `view` gives, or raises."""
        found: Future[Look] = Future()

        def answer() -> None:
            if not found.set_running_or_notify_cancel():
                return  # the asker has stopped waiting
            try:
                found.set_result(view())
            except Exception as error:
                found.set_exception(error)

        self._waiting.put(answer)
        return found

    def answer_all(self) -> None:
        """Those that wait."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._waiting.get_nowait()()
