"""Uploads: what a request carries, and resumable uploads, which are collected here until they are complete."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from email.message import Message
from typing import Any

from raystate.testing.gcs.answers import GcsAnswer, GcsError
from raystate.testing.gcs.conditions import Conditions
from raystate.testing.gcs.fields import show
from raystate.testing.gcs.objects import CHECKSUMS, Objects, crc32c, md5, parse_json
from raystate.testing.gcs.operations import Operation

_CHUNK_BYTES = 256 * 1024  # what arrives before the end of a resumable upload is kept in multiples of it
_DEFAULT_TYPE = "application/octet-stream"
_NAME_BYTES = 1024  # the longest name

_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+|\*)|\*)/(\d+|\*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """An object that a request brings whole.

    Attributes:
        metadata: as in the JSON API, with `contentType`.
        content: its bytes.
    """

    metadata: Mapping[str, Any]
    content: bytes


def read_upload(operation: Operation, headers: Mapping[str, str], body: bytes) -> tuple[Operation, Upload]:
    """Understand an upload in one request.

    Args:
        operation: of kind "upload".
        headers: of the request.
        body: of the request.

    Returns:
        The operation with the object's name, and the object.

    Raises:
        GcsError: 400, what is wrong.
    """
    how = operation.query.get("uploadType")
    if how == "media":
        metadata, content = {}, body
        content_type = headers.get("Content-Type", "")
    elif how == "multipart":
        metadata, content_type, content = _split_related(headers.get("Content-Type", ""), body)
    else:
        raise GcsError(400, f"uploadType must be media, multipart or resumable, not {how!r}")
    name = object_name(operation, metadata)
    metadata = {**metadata, "contentType": metadata.get("contentType") or content_type or _DEFAULT_TYPE}
    return operation.about(operation.bucket, name), Upload(metadata=metadata, content=content)


def object_name(operation: Operation, metadata: Mapping[str, Any]) -> str:
    """The name that an upload is for, from the query or from the metadata.

    Raises:
        GcsError: 400, there is none, or none that Cloud Storage allows.
    """
    name = operation.query.get("name") or metadata.get("name")
    if not isinstance(name, str) or not name:
        raise GcsError(400, "Required parameter: name", reason="required")
    if name in (".", "..") or "\n" in name or "\r" in name or len(name.encode()) > _NAME_BYTES:
        raise GcsError(400, f"Invalid object name: {name[:100]!r}")
    return name


def checksums(metadata: Mapping[str, Any], headers: Mapping[str, str], content: bytes) -> dict[str, str]:
    """The checksums that an object of these bytes is described with.

    Raises:
        GcsError: 400, the client has checksummed other bytes; names the checksum.
    """
    declared = dict(part.strip().split("=", 1) for part in headers.get("X-Goog-Hash", "").split(",") if "=" in part)
    got = {"crc32c": crc32c(content), "md5Hash": md5(content)}
    for algorithm, key in CHECKSUMS.items():
        wanted = metadata.get(key) or declared.get(algorithm)
        if wanted and wanted != got[key]:
            raise GcsError(400, f"Provided {algorithm} {wanted!r} doesn't match calculated {algorithm} {got[key]!r}")
    return got


# ------------------------------------------------------------ resumable uploads


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentRange:
    """A Content-Range header: which bytes a request brings. `first` is None in a request without any, `total` if still unknown."""

    first: int | None
    last: int | None
    total: int | None

    @classmethod
    def parse(cls, text: str | None, size: int) -> ContentRange:
        """Understand a header.

        Args:
            text: None: the request has no such header, so that it brings everything.
            size: bytes in the request.

        Raises:
            GcsError: 400, it isn't one, or not for `size` bytes.
        """
        if text is None:
            return cls(first=0, last=size - 1, total=size)
        found = _CONTENT_RANGE.fullmatch(text)
        if not found:
            raise GcsError(400, f"Invalid Content-Range: {text!r}")
        first, last, total = found.groups()
        total_bytes = None if total == "*" else int(total)
        if first is None:
            return cls(first=None, last=None, total=total_bytes)
        last_byte = int(first) + size - 1 if last == "*" else int(last)
        if last_byte - int(first) + 1 != size:
            raise GcsError(400, f"Content-Range {text!r} doesn't fit a body of {size} bytes")
        return cls(first=int(first), last=last_byte, total=total_bytes)

    def ends(self, held: int) -> bool:
        """Whether an upload of which `held` bytes are here is complete with this request."""
        if self.first is None:
            return self.total == held
        return self.total is not None and self.last == self.total - 1 and self.first <= held


@dataclass(slots=True, kw_only=True)
class UploadSession:
    """A resumable upload. `start` is the request that began it."""

    start: Operation
    metadata: dict[str, Any]
    conditions: Conditions
    content: bytearray = field(default_factory=bytearray)
    made: Mapping[str, Any] | None = None  # the object, once complete


class Sessions:
    """The resumable uploads under way.

    Args:
        objects: makes what is complete.
    """

    def __init__(self, objects: Objects):
        self._objects = objects
        self._sessions: dict[str, UploadSession] = {}

    def recognize(self, operation: Operation, content_range: str | None, size: int) -> Operation:
        """The request of a session, with its bucket and object, and as an "upload" if it completes it."""
        session = self._sessions.get(operation.query["upload_id"])
        if session is None:
            return operation
        completes = False
        if operation.kind == "upload_chunk" and session.made is None:
            try:
                completes = ContentRange.parse(content_range, size).ends(len(session.content))
            except GcsError:
                pass  # is reported when it is carried out
        return operation.about(session.start.bucket, session.start.name, "upload" if completes else None)

    def start(self, operation: Operation, headers: Mapping[str, str], body: bytes, base_url: str) -> GcsAnswer:
        """Begin one: its URL is in the answer's Location."""
        metadata = parse_json(body)
        operation = operation.about(operation.bucket, object_name(operation, metadata))
        conditions = Conditions.from_query(operation.query)
        self._objects.check_start(operation, conditions)
        content_type = metadata.get("contentType") or headers.get("X-Upload-Content-Type")
        if content_type:
            metadata["contentType"] = content_type
        upload_id = secrets.token_urlsafe(24)
        self._sessions[upload_id] = UploadSession(start=operation, metadata=metadata, conditions=conditions)
        location = f"{base_url}{operation.target}&upload_id={upload_id}"
        return GcsAnswer(
            headers={"Location": location, "X-GUploader-UploadID": upload_id, "Content-Type": "text/plain; charset=utf-8"}
        )

    def send(self, operation: Operation, headers: Mapping[str, str], body: bytes) -> GcsAnswer:
        """Take a chunk; the last one makes the object. The answer says how far the upload is, or describes the object."""
        session = self._find(operation)
        if session.made is not None:  # asked again: the answer was lost
            return show(session.made, session.start.query)
        sent = ContentRange.parse(headers.get("Content-Range"), len(body))
        held = len(session.content)
        if sent.first is not None:
            if sent.first > held:
                raise GcsError(400, f"Bytes from {sent.first} on were sent, but only {held} bytes have arrived before them")
            session.content += memoryview(body)[held - sent.first :]  # bytes that are here already were sent again
        if not sent.ends(held):
            if sent.first is not None:
                del session.content[max(held, len(session.content) // _CHUNK_BYTES * _CHUNK_BYTES) :]
            return _incomplete(len(session.content), headers)
        metadata = {"contentType": headers.get("Content-Type") or _DEFAULT_TYPE, **session.metadata}
        content = bytes(session.content)
        del session.content[held:]  # the last chunk may be sent again
        sums = checksums(metadata, headers, content)
        session.made = self._objects.insert(session.start, metadata, content, sums, session.conditions)
        session.content = bytearray()
        return show(session.made, session.start.query)

    def cancel(self, operation: Operation) -> GcsAnswer:
        self._find(operation)
        del self._sessions[operation.query["upload_id"]]
        return GcsAnswer(status=499)  # Cloud Storage's own word for it

    def _find(self, operation: Operation) -> UploadSession:
        session = self._sessions.get(operation.query["upload_id"])
        if session is None:
            raise GcsError(404, "There is no such resumable upload: it was cancelled, or belongs to another server")
        return session


def _incomplete(held: int, headers: Mapping[str, str]) -> GcsAnswer:
    had = {"Range": f"bytes=0-{held - 1}"} if held else {}
    if headers.get("X-GUploader-No-308", "").lower() == "yes":
        return GcsAnswer(headers={**had, "X-HTTP-Status-Code-Override": "308"})
    return GcsAnswer(status=308, headers=had)


# ------------------------------------------------------------ multipart/related


def _split_related(content_type: str, body: bytes) -> tuple[dict[str, Any], str, bytes]:
    """Metadata, content type and content of a multipart upload; lines may end in CR LF or, as gcsfs's do, in LF."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary()
    if not boundary:
        raise GcsError(400, f"Invalid multipart request: no boundary in Content-Type {content_type!r}")
    dashes = b"--" + boundary.encode()
    first = body.find(dashes)
    newline = b"\r\n" if body[first + len(dashes) : first + len(dashes) + 2] == b"\r\n" else b"\n"
    blank, separator = newline + newline, newline + dashes
    head = body.find(blank, first)
    second = body.find(separator, head + len(blank))
    content_head = second + len(separator)
    start = body.find(blank, content_head)
    end = body.rfind(separator + b"--")
    if first < 0 or head < 0 or second < 0 or start < 0 or end < start + len(newline):
        raise GcsError(400, "Invalid multipart request: it needs a part with metadata and a part with content")
    part = Message()
    for line in body[content_head:start].decode(errors="replace").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            part[name.strip()] = value.strip()
    metadata = parse_json(body[head + len(blank) : second])
    return metadata, part.get("Content-Type", ""), body[start + len(blank) : max(end, start + len(blank))]
