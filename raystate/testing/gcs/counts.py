"""What was asked of the server: by kind, by what Google Cloud Storage would bill for it, and how often one name was written too soon."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from raystate.testing.gcs.operations import Kind
from raystate.waits import NAME_CHANGES_S

Billing: TypeAlias = Literal["class_a", "class_b", "free"]

# https://cloud.google.com/storage/pricing#operations-by-class, for the JSON API. What isn't here (a batch around its parts, the
# requests of a resumable upload before the finishing one) isn't billed by itself.
_BILLING: dict[Kind, Billing] = {
    "upload": "class_a",
    "list": "class_a",
    "patch": "class_a",
    "rewrite": "class_a",
    "compose": "class_a",
    "list_buckets": "class_a",
    "write_bucket": "class_a",
    "get_media": "class_b",
    "get_meta": "class_b",
    "get_bucket": "class_b",
    "other": "class_b",
    "delete": "free",
    "delete_bucket": "free",
}

_LOGGED = 10_000  # newest operations that the log keeps
_REMEMBERED = 100_000  # names after which those that were not written lately are forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One operation: a request, or a part of a batch.

    Attributes:
        at_s: seconds from the server's start to the request.
        took_s: seconds until its answer began.
        method: HTTP method.
        kind: see `operations.Kind`.
        bucket: "" if none.
        name: of the object; "" if none.
        target: path and query as sent.
        status: of the answer; 0: the connection was cut.
        bytes_up: of the request's body.
        bytes_down: of the answer's body.
        fault: mode of the rule that acted on it; "" if none did.
    """

    at_s: float
    took_s: float
    method: str
    kind: Kind
    bucket: str
    name: str
    target: str
    status: int
    bytes_up: int
    bytes_down: int
    fault: str = ""


@dataclass(slots=True, kw_only=True)
class Counts:
    """Since the start, or since the last `reset_counts`.

    Attributes:
        requests: HTTP requests; a batch is one.
        kinds: operations by kind, failed ones included; each part of a batch is one, and so is the
            batch itself.
        statuses: operations by status; 0: the connection was cut before or instead of an answer.
        class_a: billed as class A (uploads, lists, rewrites, …). Operations that fail aren't billed; an upload in many requests is
            one; an operation that was carried out is billed, even if its answer was lost.
        class_b: billed as class B (reads of objects and metadata).
        free: that would be free (deletes).
        bytes_up: of objects and other bodies that came in.
        bytes_down: of answers' bodies.
        too_soon: changes (create, update, delete) less than 1 s after the one before of the same name, by "bucket/object". Cloud
            Storage answers such with 429 when they go on; this server does with `writes_per_object_s`, and counts the refused too.
    """

    requests: int = 0
    kinds: dict[str, int] = field(default_factory=dict[str, int])
    statuses: dict[int, int] = field(default_factory=dict[int, int])
    class_a: int = 0
    class_b: int = 0
    free: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    too_soon: dict[str, int] = field(default_factory=dict[str, int])


class Counters:
    """The counts of now and the log."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self.log: deque[LoggedRequest] = deque(maxlen=_LOGGED)
        self.now = Counts()

    def now_s(self) -> float:
        """Seconds since the server's start."""
        return time.monotonic() - self._start_s

    def record(self, entry: LoggedRequest, *, carried_out: bool) -> None:
        """Count one operation.

        Args:
            entry: goes into the log.
            carried_out: it had its effect, even if the client was told otherwise.
        """
        self.log.append(entry)
        now = self.now
        now.kinds[entry.kind] = now.kinds.get(entry.kind, 0) + 1
        now.statuses[entry.status] = now.statuses.get(entry.status, 0) + 1
        now.bytes_up += entry.bytes_up
        now.bytes_down += entry.bytes_down
        if carried_out and (billing := _BILLING.get(entry.kind)) is not None:
            setattr(now, billing, getattr(now, billing) + 1)

    def record_too_soon(self, bucket: str, name: str) -> None:
        too_soon, name = self.now.too_soon, f"{bucket}/{name}"
        too_soon[name] = too_soon.get(name, 0) + 1


class WritePace:
    """How often one name is changed.

    Args:
        too_soon: called with bucket and object at a change less than 1 s after the one before.
        clock: seconds, monotonic.
    """

    def __init__(self, too_soon: Callable[[str, str], None], clock: Callable[[], float] = time.monotonic):
        self.limit_per_s: float | None = None  # changes per second and name that are let through; None: all
        self._report, self._clock = too_soon, clock
        self._changed_s: dict[tuple[str, str], float] = {}

    def allows(self, bucket: str, name: str) -> bool:
        """Whether this name may be changed now. A change that is refused counts as too soon."""
        if self.limit_per_s is None:
            return True
        since_s = self._clock() - self._changed_s.get((bucket, name), float("-inf"))
        if since_s >= 1 / self.limit_per_s:
            return True
        self._report(bucket, name)
        return False

    def changed(self, bucket: str, name: str) -> None:
        """The name was changed."""
        now_s = self._clock()
        if now_s - self._changed_s.get((bucket, name), float("-inf")) < NAME_CHANGES_S:
            self._report(bucket, name)
        if len(self._changed_s) >= _REMEMBERED:
            self._changed_s = {key: at_s for key, at_s in self._changed_s.items() if now_s - at_s < NAME_CHANGES_S}
        self._changed_s[bucket, name] = now_s

    def forget(self, bucket: str) -> None:
        """The bucket is gone; one of its name starts afresh."""
        self._changed_s = {key: at_s for key, at_s in self._changed_s.items() if key[0] != bucket}
