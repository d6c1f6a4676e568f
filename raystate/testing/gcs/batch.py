"""Batch requests: several requests in one, each with an answer of its own (multipart/mixed of application/http)."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from email.parser import HeaderParser
from http.client import responses
from urllib.parse import urlsplit

from multidict import CIMultiDict

from raystate.testing.gcs.answers import GcsAnswer, GcsError

_MOST = 1000  # requests in a batch; Cloud Storage recommends at most 100, and its own client sends up to 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One request of a batch.

    Attributes:
        content_id: by which its answer is found; "" if the client goes by the order.
        method: HTTP method.
        target: path and query, percent-encoded.
        headers: of this request.
        body: of this request.
    """

    content_id: str
    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


def parse_batch(content_type: str, body: bytes) -> list[Part]:
    """Take a batch apart.

    Raises:
        GcsError: 400, it isn't one.
    """
    message = message_from_bytes(f"Content-Type: {content_type}\r\n\r\n".encode() + body)
    if not message.is_multipart() or message.get_content_type() != "multipart/mixed":
        raise GcsError(400, f"A batch is multipart/mixed with a boundary, not {content_type!r}")
    parts = [_part(part) for part in message.get_payload() if isinstance(part, Message)]
    if not 1 <= len(parts) <= _MOST:
        raise GcsError(400, f"A batch has 1 to {_MOST} requests, not {len(parts)}")
    return parts


def join_answers(parts: Iterable[Part], answers: Iterable[GcsAnswer]) -> GcsAnswer:
    """One answer with those of all parts, in their order."""
    boundary = f"batch_{secrets.token_urlsafe(16)}"
    pieces: list[bytes] = []
    for part, answer in zip(parts, answers, strict=True):
        lines = [f"--{boundary}", "Content-Type: application/http"]
        if part.content_id:
            lines.append(f"Content-ID: {part.content_id.replace('<', '<response-', 1)}")
        headers = [f"{name}: {value}" for name, value in answer.headers.items()]
        lines += [
            "",
            f"HTTP/1.1 {answer.status} {responses.get(answer.status, 'Unknown')}",
            *headers,
            f"Content-Length: {len(answer.body)}",
            "",
            "",
        ]
        pieces += ["\r\n".join(lines).encode(), answer.body, b"\r\n"]
    pieces.append(f"--{boundary}--\r\n".encode())
    return GcsAnswer(headers={"Content-Type": f"multipart/mixed; boundary={boundary}"}, body=b"".join(pieces))


def _part(message: Message) -> Part:
    content = message.get_payload(decode=True)
    if message.get_content_type() != "application/http" or not isinstance(content, bytes):
        raise GcsError(400, f"Each part of a batch is application/http, not {message.get_content_type()}")
    request_line, _, rest = content.lstrip().partition(b"\n")
    try:
        method, url, _ = request_line.decode().split()
    except ValueError:
        raise GcsError(400, f"Not a request line: {request_line[:200]!r}") from None
    inner = HeaderParser().parsestr(rest.decode(errors="surrogateescape"))
    body = str(inner.get_payload()).encode(errors="surrogateescape")
    split = urlsplit(url)
    target = f"{split.path}?{split.query}" if split.query else split.path
    return Part(
        content_id=message.get("Content-ID", ""), method=method, target=target, headers=CIMultiDict(inner.items()), body=body
    )
