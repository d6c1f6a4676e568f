"""Counts of this process since it began, for metrics: cheap enough for a training thread, and read by other threads."""

from __future__ import annotations

import threading
from collections import deque

# Operations of storage, by kind; of these the tries after the first, and those that failed for good.
REQUESTS, RETRIES, FAILURES = "storage_requests", "storage_retries", "storage_failures"
READ, WRITE, LIST, DELETE = (f"{REQUESTS}/{kind}" for kind in ("read", "write", "list", "delete"))
_KINDS = {"read": READ, "stat": READ, "list": LIST, "delete": DELETE, "delete_tree": DELETE, "sweep": DELETE}
KEPT = 1000  # durations that wait to be taken; older ones are lost


class ProcessCounts:
    """Sums and durations by name, and how storage fails now. A name may have values of labels behind it: "read_bytes/storage".
    Thread-safe."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._sums: dict[str, float] = {}
        self._failing: dict[str, str] = {}  # kind of operation -> why its newest try failed, if nothing has worked since
        self._durations: deque[tuple[str, float]] = deque(maxlen=KEPT)

    def add(self, name: str, value: float = 1) -> None:
        """So much more of it."""
        with self._guard:
            self._sums[name] = self._sums.get(name, 0) + value

    def request(self, operation: str) -> None:
        """Storage is asked for this."""
        self.add(_KINDS.get(operation, WRITE))

    def failed(self, operation: str, why: str) -> None:
        """A try of this has failed, and may be made again."""
        with self._guard:
            self._failing.pop(kind := _KINDS.get(operation, WRITE), None)
            self._failing[kind] = why

    def worked(self, operation: str) -> None:
        """This has worked. After a write no failure counts any more: that is what a save needs."""
        if self._failing:  # else no lock: most storage works
            with self._guard:
                kind = _KINDS.get(operation, WRITE)
                self._failing = {} if kind == WRITE else {one: why for one, why in self._failing.items() if one != kind}

    @property
    def storage_error(self) -> str:
        """Why storage fails now, by its newest answer; "": it works, as far as this process has asked."""
        with self._guard:
            return next(reversed(self._failing.values()), "")

    def took(self, name: str, seconds: float) -> None:
        """It took so long, once. No lock: the training thread calls it."""
        self._durations.append((name, seconds))

    def sums(self) -> tuple[tuple[str, float], ...]:
        """All sums, by name."""
        with self._guard:
            return tuple(sorted(self._sums.items()))

    def take_durations(self) -> list[tuple[str, float]]:
        """Those that have come since the last call."""
        taken: list[tuple[str, float]] = []
        while self._durations:
            taken.append(self._durations.popleft())
        return taken


counts = ProcessCounts()  # of this process
