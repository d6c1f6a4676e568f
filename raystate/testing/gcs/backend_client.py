"""Requests to the server behind this one, which keeps the bytes."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
from yarl import URL

from raystate.testing.gcs.answers import GcsAnswer, GcsError, no_such_bucket

_PIECE_BYTES = 1 << 20  # of a body that is passed on in pieces

# of a download's answer
_MEDIA_HEADERS = (
    "Accept-Ranges", "Cache-Control", "Content-Disposition", "Content-Encoding", "Content-Language", "Content-Range", "Content-Type",
    "Last-Modified", "X-Goog-Generation", "X-Goog-Hash", "X-Goog-Stored-Content-Encoding", "X-Goog-Stored-Content-Length",
)  # fmt: skip


class BackendClient:
    """The operations of the backend that this server builds on.

    Args:
        session: with a pool of connections that stay open.
        url: of the backend.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str):
        self._session, self._url = session, url

    async def call(self, method: str, target: str, body: bytes = b"", content_type: str = "application/json") -> tuple[int, Any]:
        """Send a request with a small answer.

        Args:
            method: HTTP method.
            target: path and query, percent-encoded.
            body: of the request.
            content_type: of the body.

        Returns:
            The status, and what the answer's JSON says.
        """
        headers = {"Content-Type": content_type} if body else {}
        async with self._request(method, target, headers, body) as response:
            text = await response.read()
        try:
            return response.status, json.loads(text) if text else {}
        except ValueError:
            return response.status, {}

    async def metadata(self, bucket: str, name: str, generation: int | None = None) -> dict[str, Any] | None:
        """An object as the backend describes it; None: there is no such object, or not of this generation."""
        query = "projection=full" if generation is None else f"projection=full&generation={generation}"
        status, resource = await self.call("GET", f"{object_path(bucket, name)}?{query}")
        return resource if status == 200 else None

    async def insert(
        self, bucket: str, metadata: Mapping[str, Any], content: bytes | bytearray | memoryview, query: Mapping[str, str]
    ) -> dict[str, Any]:
        """Make an object, replacing one of its name.

        Args:
            bucket: where.
            metadata: `name`, `contentType` and more, as in the JSON API.
            content: its bytes.
            query: further parameters of the request.

        Raises:
            GcsError: there is no such bucket, or the backend refuses.
        """
        boundary = secrets.token_hex(16)
        described = json.dumps(metadata)
        head = (
            f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{described}\r\n"
            f"--{boundary}\r\nContent-Type: {metadata['contentType']}\r\n\r\n"
        ).encode()
        tail = f"\r\n--{boundary}--\r\n".encode()
        size = len(head) + len(content) + len(tail)
        headers = {"Content-Type": f"multipart/related; boundary={boundary}", "Content-Length": str(size)}
        body = _pieces(head, memoryview(content), tail) if size > _PIECE_BYTES else b"".join((head, content, tail))
        target = f"/upload/storage/v1/b/{quote(bucket, safe='')}/o?{urlencode({'uploadType': 'multipart', **query})}"
        async with self._request("POST", target, headers, body) as response:
            answer = await response.read()
        if response.status == 404:
            raise no_such_bucket(bucket)
        if response.status != 200:
            raise GcsError(response.status, f"upload of {bucket}/{metadata['name']}: {answer[:500].decode(errors='replace')}")
        return json.loads(answer)

    async def media(self, method: str, bucket: str, name: str, generation: int | None, headers: Mapping[str, str]) -> GcsAnswer:
        """The bytes of an object, or of the range that `headers` ask for.

        Args:
            method: GET or HEAD.
            bucket: where.
            name: of the object.
            generation: None: the one of now.
            headers: of the client's request.

        Returns:
            An answer of status 200, 206, 404 or 416, streamed if it isn't small.
        """
        query = "alt=media" if generation is None else f"alt=media&generation={generation}"
        # Accept-Encoding decides whether an object stored with gzip is unpacked.
        passed = {key: headers[key] for key in ("Range", "Accept-Encoding") if key in headers}
        response = await self._request(method, f"{object_path(bucket, name)}?{query}", passed)
        kept = {key: response.headers[key] for key in _MEDIA_HEADERS if key in response.headers}
        length = int(response.headers.get("Content-Length", 0))
        if method == "HEAD" or response.status >= 400 or length <= _PIECE_BYTES:
            async with response:
                body = await response.read()
            return GcsAnswer(status=response.status, headers=kept, body=body, length=length if method == "HEAD" else None)
        return GcsAnswer(status=response.status, headers=kept, stream=response, length=length)

    def _request(self, method: str, target: str, headers: Mapping[str, str], body: Any = None) -> Any:
        return self._session.request(
            method, URL(self._url + target, encoded=True), headers=headers, data=body or None, allow_redirects=False,
            skip_auto_headers=("Accept-Encoding", "User-Agent", "Content-Type"),
        )  # fmt: skip


def bucket_path(bucket: str) -> str:
    return f"/storage/v1/b/{quote(bucket, safe='')}"


def object_path(bucket: str, name: str) -> str:
    return f"{bucket_path(bucket)}/o/{quote(name, safe='')}"


async def _pieces(*parts: bytes | memoryview) -> AsyncIterator[bytes | memoryview]:
    for part in parts:
        for piece in _cut(memoryview(part)):
            yield piece


def _cut(part: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(part), _PIECE_BYTES):
        yield part[start : start + _PIECE_BYTES]
