"""Lists of objects and of buckets, in pages.

The backend counts no prefixes as results, gives all of them on every page, and finds them by the first character of a delimiter. So it is
only asked for names in order, and what a page consists of is decided here.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from raystate.testing.gcs.answers import GcsError, no_such_bucket
from raystate.testing.gcs.backend_client import BackendClient, bucket_path
from raystate.testing.gcs.conditions import number
from raystate.testing.gcs.objects import Objects

_PAGE = 1000  # results (objects and prefixes) of a page at most; Cloud Storage gives no more either
_NOT_HERE = ("matchGlob", "softDeleted", "filter")  # would give other results: better an error than the wrong ones


async def list_objects(backend: BackendClient, objects: Objects, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
    """One page of a bucket's objects.

    Args:
        backend: has them in the order of their names.
        objects: completes their descriptions.
        bucket: which.
        query: prefix, delimiter, startOffset, endOffset, includeTrailingDelimiter, maxResults, pageToken.

    Raises:
        GcsError: the bucket is missing, or the query is wrong or asks for what this server doesn't have.
    """
    for name in _NOT_HERE:
        if query.get(name, "false").lower() != "false":
            raise GcsError(501, f"This server has no {name} in lists")
    room = _page_size(query)
    prefix, delimiter, last = query.get("prefix", ""), query.get("delimiter", ""), _last_of_page(query)
    asked = {"prefix": prefix, "startOffset": max(query.get("startOffset", ""), last), "endOffset": query.get("endOffset", "")}
    if not delimiter:
        asked["maxResults"] = str(room + 2)  # the last one of the page before, this page, and one more to know that there is one
    status, found = await backend.call("GET", f"{bucket_path(bucket)}/o?{urlencode({k: v for k, v in asked.items() if v})}")
    if status == 404:
        raise no_such_bucket(bucket)
    if status != 200:
        raise GcsError(status, f"list of {bucket}")

    items: list[dict[str, Any]] = []
    prefixes: list[str] = []
    entry = ""  # the newest result
    for item in found.get("items", []):
        name = item["name"]
        cut = name.find(delimiter, len(prefix)) if delimiter else -1
        folder = name[: cut + len(delimiter)] if cut >= 0 else ""
        result = folder or name
        if result <= last:
            continue
        if result != entry:
            if len(items) + len(prefixes) == room:
                return _page("storage#objects", items, prefixes, _token(entry))
            entry = result
            if folder:
                prefixes.append(folder)
        if not folder or (folder == name and query.get("includeTrailingDelimiter", "false").lower() == "true"):
            items.append(objects.describe(item))
    return _page("storage#objects", items, prefixes, None)


async def list_buckets(backend: BackendClient, query: Mapping[str, str]) -> dict[str, Any]:
    """One page of the buckets."""
    room, prefix, last = _page_size(query), query.get("prefix", ""), _last_of_page(query)
    _, found = await backend.call("GET", "/storage/v1/b")
    buckets = sorted(found.get("items", []), key=lambda bucket: bucket["name"])
    left = [bucket for bucket in buckets if bucket["name"].startswith(prefix) and bucket["name"] > last]
    return _page("storage#buckets", left[:room], [], _token(left[room - 1]["name"]) if len(left) > room else None)


def _page(kind: str, items: list[dict[str, Any]], prefixes: list[str], token: str | None) -> dict[str, Any]:
    page: dict[str, Any] = {"kind": kind}
    if token is not None:
        page["nextPageToken"] = token
    if prefixes:
        page["prefixes"] = prefixes
    if items:
        page["items"] = items
    return page


def _page_size(query: Mapping[str, str]) -> int:
    asked = number(query, "maxResults")
    if asked is not None and asked < 0:
        raise GcsError(400, f"Invalid value for maxResults: {asked}")
    return min(asked or _PAGE, _PAGE)


def _token(last: str) -> str:
    """Where the next page begins: behind the last result of this one, also if names were created or
    deleted between."""
    return base64.urlsafe_b64encode(last.encode()).decode()


def _last_of_page(query: Mapping[str, str]) -> str:
    try:
        return base64.b64decode(query.get("pageToken", ""), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        raise GcsError(400, f"Invalid pageToken: {query['pageToken']!r}") from None
