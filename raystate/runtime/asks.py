"""Who has asked the Coordinator something, and what it was told."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from raystate.core.messages import Failure, Reply

REMEMBERED = 4096


class Asks:
    """Answers by ask: `future` from any thread, the others from the loop's.

    Attributes:
        failed: what everybody is told from now on; None: nothing has failed.
    """

    def __init__(self) -> None:
        self._futures: dict[str, Future[Reply]] = {}
        self._lock = threading.Lock()
        self.failed: Failure | None = None

    def future(self, ask: str) -> Future[Reply]:
        """Gets the answer; the same one for the same ask."""
        with self._lock:
            future = self._futures.get(ask)
            if future is None:
                self._forget_answered()
                future = self._futures[ask] = Future()
                if self.failed is not None:
                    future.set_result(self.failed)
            return future

    def answer(self, ask: str, reply: Reply) -> None:
        """The first answer counts."""
        with self._lock:
            future = self._futures.setdefault(ask, Future())
        if not future.done():
            future.set_result(reply)

    def fail_all(self, failure: Failure) -> None:
        """Tell it to whoever waits, and to whoever asks from now on."""
        with self._lock:
            self.failed = failure
            waiting = [future for future in self._futures.values() if not future.done()]
        for future in waiting:
            future.set_result(failure)

    def _forget_answered(self) -> None:
        """Whoever asked has read its answer long ago."""
        if len(self._futures) >= 2 * REMEMBERED:
            answered = [ask for ask, future in self._futures.items() if future.done()]
            for ask in answered[:-REMEMBERED]:
                del self._futures[ask]
