"""Lists of objects and of buckets, in pages."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any

from raystate.testing.gcs.answers import GcsError
from raystate.testing.gcs.conditions import number
from raystate.testing.gcs.objects import Objects

_PAGE = 1000  # results (objects and prefixes) of a page at most; Cloud Storage gives no more either
_NOT_HERE = ("matchGlob", "softDeleted", "filter")  # would give other results: better an error than the wrong ones


def list_objects(objects: Objects, bucket: str, query: Mapping[str, str]) -> dict[str, Any]:
    """One page of a bucket's objects.

    Args:
        objects: of all buckets.
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
    end = query.get("endOffset", "")

    items: list[Mapping[str, Any]] = []
    prefixes: list[str] = []
    entry = ""  # the newest result
    for item in objects.after(bucket, max(prefix, query.get("startOffset", ""), last)):
        name = item["name"]
        if not name.startswith(prefix) or (end and name >= end):
            break
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
            items.append(item)
    return _page("storage#objects", items, prefixes, None)


def list_buckets(objects: Objects, query: Mapping[str, str]) -> dict[str, Any]:
    """One page of the buckets."""
    room, prefix, last = _page_size(query), query.get("prefix", ""), _last_of_page(query)
    left = [name for name in sorted(objects.buckets) if name.startswith(prefix) and name > last]
    found = [objects.buckets[name].resource for name in left[:room]]
    return _page("storage#buckets", found, [], _token(left[room - 1]) if len(left) > room else None)


def _page(kind: str, items: Sequence[Mapping[str, Any]], prefixes: list[str], token: str | None) -> dict[str, Any]:
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
