"""What goes back to a client: an answer, or an error in the shape in which Google Cloud Storage reports it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# `reason` in an error's body, by status: clients decide by it whether to try again.
_REASONS = {
    400: "invalid",
    401: "required",
    403: "forbidden",
    404: "notFound",
    408: "requestTimeout",
    409: "conflict",
    412: "conditionNotMet",
    416: "requestedRangeNotSatisfiable",
    429: "rateLimitExceeded",
    500: "internalError",
    501: "notImplemented",
    502: "backendError",
    503: "backendError",
    504: "gatewayTimeout",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GcsAnswer:
    """One response.

    Attributes:
        status: the HTTP status.
        headers: without Content-Length, which follows from `body`.
        body: a HEAD request is told its length alone.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


class GcsError(Exception):
    """A request is answered with an error.

    Args:
        status: HTTP status, 304 or at least 400.
        message: for people; names bucket and object.
        reason: for programs; None: what GCS says for this status.
        headers: beside Content-Type.
    """

    def __init__(self, status: int, message: str, *, reason: str | None = None, headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers or {}
        self.reason = reason or _REASONS.get(status, "unknown")

    def answer(self) -> GcsAnswer:
        if self.status == 304:
            return GcsAnswer(status=304, headers=self.headers)
        detail = {"domain": "global", "reason": self.reason, "message": self.message}
        return json_answer({"error": {"code": self.status, "message": self.message, "errors": [detail]}}, self.status, self.headers)


class ConnectionCutError(Exception):
    """A fault rule wants the connection cut instead of an answer."""


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> GcsAnswer:
    return GcsAnswer(
        status=status,
        headers={"Content-Type": "application/json; charset=UTF-8", **(headers or {})},
        body=json.dumps(value).encode(),
    )


def no_such_bucket(bucket: str) -> GcsError:
    return GcsError(404, f"The specified bucket does not exist: {bucket}")


def no_such_object(bucket: str, name: str) -> GcsError:
    return GcsError(404, f"No such object: {bucket}/{name}")
