"""Requests as a client sends them, without a client's retries: what the server does, not what a library makes of it."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import http.client
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from multidict import CIMultiDict

from raystate.testing.gcs import GcsControl
from tests.patience import PATIENCE_S

Result = TypeVar("Result")

UPLOADS = ("media", "multipart", "resumable", "chunked")
MAKING = (*UPLOADS, "copy", "compose")
CHUNK_BYTES = 256 * 1024  # the unit of a resumable upload's chunks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def reason(self) -> str:
        return self.json["error"]["errors"][0]["reason"]

    @property
    def generation(self) -> int:
        return int(self.json["generation"])


class Raw:
    """Requests about the objects of one bucket; each on a connection of its own."""

    def __init__(self, control: GcsControl, bucket: str):
        self.control, self.bucket = control, bucket
        self.objects = f"/storage/v1/b/{bucket}/o"
        self.uploads = f"/upload/storage/v1/b/{bucket}/o"

    def send(self, method: str, target: str, body: bytes | Any = None, **headers: str) -> Reply:
        """`body`: bytes, or a value that is sent as JSON. Header names with underscores for dashes."""
        address = urlsplit(self.control.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=PATIENCE_S)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is not None and not isinstance(body, bytes | memoryview):
            body = json.dumps(body).encode()
            named.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, target, body=body, headers=named)
            response = connection.getresponse()
            return Reply(status=response.status, headers=CIMultiDict(response.headers.items()), body=response.read())
        finally:
            connection.close()

    def path(self, name: str, **query: object) -> str:
        return f"{self.objects}/{quote(name, safe='')}{_query(query)}"

    # ------------------------------------------------------------ four ways to upload

    def media(self, name: str, data: bytes, **query: object) -> Reply:
        return self.send("POST", f"{self.uploads}{_query({'uploadType': 'media', 'name': name, **query})}", data)

    def multipart(self, name: str, data: bytes, metadata: Mapping[str, Any] | None = None, **query: object) -> Reply:
        described = json.dumps({"name": name, **(metadata or {})}).encode()
        body = b"--=b=\r\nContent-Type: application/json\r\n\r\n" + described
        body += b"\r\n--=b=\r\nContent-Type: text/x\r\n\r\n" + data + b"\r\n--=b=--"
        target = f"{self.uploads}{_query({'uploadType': 'multipart', **query})}"
        return self.send("POST", target, body, Content_Type='multipart/related; boundary="=b="')

    def start(self, name: str, metadata: Mapping[str, Any] | None = None, **query: Any) -> Reply:
        """Begin a resumable upload."""
        target = f"{self.uploads}{_query({'uploadType': 'resumable', 'name': name, **query})}"
        return self.send("POST", target, metadata or {})

    def chunk(self, started: Reply, data: bytes, content_range: str) -> Reply:
        address = urlsplit(started.headers["Location"])
        return self.send("PUT", f"{address.path}?{address.query}", data, Content_Range=content_range)

    def resumable(self, name: str, data: bytes, **query: Any) -> Reply:
        started = self.start(name, **query)
        if started.status != 200:
            return started
        return self.chunk(started, data, f"bytes 0-{len(data) - 1}/{len(data)}")

    def chunked(self, name: str, data: bytes, **query: Any) -> Reply:
        """In two chunks; the first is filled up with spaces to what a chunk must have."""
        started = self.start(name, **query)
        if started.status != 200:
            return started
        total = CHUNK_BYTES + len(data)
        first = self.chunk(started, b" " * CHUNK_BYTES, f"bytes 0-{CHUNK_BYTES - 1}/*")
        assert (first.status, first.headers["Range"]) == (308, f"bytes=0-{CHUNK_BYTES - 1}")
        return self.chunk(started, data, f"bytes {CHUNK_BYTES}-{total - 1}/{total}")

    # ------------------------------------------------------------ the rest

    def get(self, name: str, **query: object) -> Reply:
        return self.send("GET", self.path(name, **query))

    def read(self, name: str, **query: object) -> Reply:
        return self.send("GET", self.path(name, alt="media", **query))

    def delete(self, name: str, **query: object) -> Reply:
        return self.send("DELETE", self.path(name, **query))

    def patch(self, name: str, changes: Any, **query: object) -> Reply:
        return self.send("PATCH", self.path(name, **query), changes)

    def copy(self, source: str, name: str, **query: object) -> Reply:
        target = f"{self.path(source)}/rewriteTo/b/{self.bucket}/o/{quote(name, safe='')}{_query(query)}"
        return self.send("POST", target)

    def compose(self, name: str, sources: list[Mapping[str, Any]], **query: object) -> Reply:
        target = f"{self.path(name)}/compose{_query(query)}"
        return self.send("POST", target, {"sourceObjects": sources, "destination": {"contentType": "text/x"}})

    def list(self, **query: object) -> Reply:
        return self.send("GET", f"{self.objects}{_query(query)}")

    def names(self, **query: object) -> list[str]:
        return [item["name"] for item in self.list(**query).json.get("items", [])]

    def batch(self, *requests: str) -> list[int]:
        """The statuses of requests (`DELETE /path?query`) sent as one batch."""
        parts = "".join(
            f"--=b=\r\nContent-Type: application/http\r\nContent-ID: <x+{index}>\r\n\r\n{request} HTTP/1.1\r\n\r\n\r\n"
            for index, request in enumerate(requests)
        )
        body = f"{parts}--=b=--".encode()
        reply = self.send("POST", "/batch/storage/v1", body, Content_Type='multipart/mixed; boundary="=b="')
        assert reply.status == 200, reply
        lines = reply.body.decode().splitlines()
        assert [line for line in lines if line.startswith("Content-ID")] == [
            f"Content-ID: <response-x+{index}>" for index in range(len(requests))
        ]
        return [int(line.split()[1]) for line in lines if line.startswith("HTTP/1.1")]


def make(raw: Raw, how: str, name: str, data: bytes, **query: object) -> Reply:
    """Make an object in one of the ways; `copy` and `compose` from an object of these bytes."""
    if how in UPLOADS:
        return getattr(raw, how)(name, data, **query)
    source = f"source of {name}/{data!r}"
    assert raw.media(source, data).status == 200
    return raw.copy(source, name, **query) if how == "copy" else raw.compose(name, [{"name": source}], **query)


def content(raw: Raw, name: str) -> bytes:
    """An object's bytes, without what `chunked` filled them up with."""
    return raw.read(name).body.strip()


def md5(data: bytes) -> str:
    """As `md5Hash` in an object's metadata."""
    return base64.b64encode(hashlib.md5(data).digest()).decode()


def at_once(count: int, call: Callable[[int], Result]) -> list[Result]:
    """Call with 0, 1, … in as many threads, which begin together."""
    start = threading.Barrier(count)
    results: dict[int, Result] = {}

    def run(index: int) -> None:
        start.wait(timeout=PATIENCE_S)
        results[index] = call(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    return [results[index] for index in range(count)]


def _query(query: Mapping[str, object]) -> str:
    return f"?{urlencode(query)}" if query else ""
