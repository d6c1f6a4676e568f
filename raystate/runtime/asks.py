"""Who has asked the Coordinator something, and what it was told."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from raystate.core.coordinator.context import remember
from raystate.core.formats.messages import Failure, Reply

REMEMBERED = 4096


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
