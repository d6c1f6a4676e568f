"""What a request asks for: its kind, its bucket and its object, from the method, the path and the query."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self, TypeAlias, get_args
from urllib.parse import parse_qsl, unquote

from raystate.testing.gcs.answers import GcsError

Kind: TypeAlias = Literal[
    "upload",  # makes an object: in one request, or the one that finishes a resumable upload
    "upload_start",  # of a resumable upload
    "upload_chunk",  # that finishes nothing, or asks how far the upload is
    "upload_cancel",
    "get_media",
    "get_meta",
    "list",
    "delete",
    "patch",  # changes metadata or access: PATCH, PUT, access controls
    "rewrite",  # also copyTo
    "compose",
    "batch",  # the request around the parts; each part is an operation of its own kind
    "list_buckets",
    "get_bucket",
    "write_bucket",
    "delete_bucket",
    "other",
]
KINDS: tuple[str, ...] = get_args(Kind)

_PREFIX = r"(?:/download)?/storage/v1"
_BUCKETS = re.compile(rf"{_PREFIX}/b/?")
_BUCKET = re.compile(rf"{_PREFIX}/b/([^/]+)")
_LIST = re.compile(rf"{_PREFIX}/b/([^/]+)/o/?")
_OBJECT = re.compile(rf"{_PREFIX}/b/([^/]+)/o/([^/]+)")
_COPY = re.compile(rf"{_PREFIX}/b/([^/]+)/o/([^/]+)/(rewriteTo|copyTo)/b/([^/]+)/o/([^/]+)")
_COMPOSE = re.compile(rf"{_PREFIX}/b/([^/]+)/o/([^/]+)/compose")
_ACCESS = re.compile(rf"{_PREFIX}/b/([^/]+)/o/([^/]+)/acl(?:/[^/]+)?")
_UPLOAD = re.compile(r"(?:/resumable)?/upload/storage/v1/b/([^/]+)/o/?")
_BATCH = re.compile(r"/batch(?:/storage/v1)?/?")

_BUCKET_KINDS: dict[str, Kind] = {"GET": "get_bucket", "DELETE": "delete_bucket"}
_OBJECT_KINDS: dict[str, Kind] = {"GET": "get_meta", "HEAD": "get_meta", "DELETE": "delete", "PATCH": "patch", "PUT": "patch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A request, or a part of a batch, understood.

    Attributes:
        kind: what it does.
        method: of the request, a method override applied.
        path: as sent, percent-encoded.
        query: decoded; the last of repeated names.
        bucket: "" if none.
        name: the object that is read or changed, for rewrite and compose the one that is made; "" if none (yet).
        source_bucket: of a rewrite.
        source_name: of a rewrite.
        verb: what follows the object in the path: "rewriteTo", "copyTo", "compose", "acl" or "".
        target: path and query as sent.
    """

    kind: Kind
    method: str
    path: str
    query: Mapping[str, str]
    target: str
    bucket: str = ""
    name: str = ""
    source_bucket: str = ""
    source_name: str = ""
    verb: str = ""

    @property
    def line(self) -> str:
        """What fault rules match: `METHOD path?query gs://bucket/object`. Uploads name the object in the body, so it is added."""
        return f"{self.method} {self.target} gs://{self.bucket}/{self.name}"

    def about(self, bucket: str, name: str, kind: Kind | None = None) -> Self:
        """The same request, now that more is known of it."""
        return replace(self, bucket=bucket, name=name, kind=kind or self.kind)


def parse(method: str, target: str, headers: Mapping[str, str]) -> Operation:
    """Understand a request of the JSON API.

    Args:
        method: HTTP method.
        target: path and query as sent, percent-encoded.
        headers: for a method override.

    Raises:
        GcsError: 501, a request that this server doesn't have. Nothing unknown is carried out.
    """
    path, _, query_text = target.partition("?")
    query = dict(parse_qsl(query_text, keep_blank_values=True))
    method = headers.get("X-HTTP-Method-Override", method).upper()

    def operation(
        kind: Kind, bucket: str = "", name: str = "", source_bucket: str = "", source_name: str = "", verb: str = ""
    ) -> Operation:
        return Operation(
            kind=kind, method=method, path=path, query=query, target=target, bucket=unquote(bucket), name=unquote(name),
            source_bucket=unquote(source_bucket), source_name=unquote(source_name), verb=verb,
        )  # fmt: skip

    if (found := _OBJECT.fullmatch(path)) and method in _OBJECT_KINDS:
        kind = _OBJECT_KINDS[method]
        if kind == "get_meta" and method == "GET" and (query.get("alt") == "media" or path.startswith("/download")):
            kind = "get_media"
        return operation(kind, *found.groups())
    if (found := _UPLOAD.fullmatch(path)) and method in ("POST", "PUT", "DELETE"):
        return operation(_upload_kind(method, query), found.group(1), query.get("name", ""))
    if (found := _LIST.fullmatch(path)) and method == "GET":
        return operation("list", found.group(1))
    if _BATCH.fullmatch(path) and method == "POST":
        return operation("batch")
    if (found := _COPY.fullmatch(path)) and method == "POST":
        source_bucket, source_name, verb, bucket, name = found.groups()
        return operation("rewrite", bucket, name, source_bucket, source_name, verb)
    if (found := _COMPOSE.fullmatch(path)) and method == "POST":
        return operation("compose", *found.groups(), verb="compose")
    if found := _ACCESS.fullmatch(path):
        return operation("other" if method == "GET" else "patch", *found.groups(), verb="acl")
    if _BUCKETS.fullmatch(path):
        return operation("list_buckets" if method == "GET" else "write_bucket")
    if found := _BUCKET.fullmatch(path):
        return operation(_BUCKET_KINDS.get(method, "write_bucket"), found.group(1))
    raise GcsError(
        501, f"This server has the JSON API of Cloud Storage only, not {method} {path} (the XML API, signed URLs or gRPC)"
    )


def _upload_kind(method: str, query: Mapping[str, str]) -> Kind:
    if "upload_id" in query:
        return "upload_cancel" if method == "DELETE" else "upload_chunk"  # whether it finishes the upload, its session knows
    return "upload_start" if query.get("uploadType") == "resumable" else "upload"
