"""Buckets and objects, in memory: every operation on one, with its preconditions.

The server has one thread, and nothing is waited for between the look at an object and what follows from it. So each operation is
atomic, as in Cloud Storage.
"""

from __future__ import annotations

import base64
import bisect
import gzip
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote

import google_crc32c

from raystate.testing.gcs.answers import GcsAnswer, GcsError, no_such_bucket, no_such_object
from raystate.testing.gcs.conditions import ABSENT, Conditions, Version, number
from raystate.testing.gcs.counts import WritePace
from raystate.testing.gcs.operations import Operation

_COMPOSED_AT_MOST = 32  # sources of one compose
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")
# What a client may say of an object; all else of its description is the server's.
_COPIED = ("cacheControl", "contentDisposition", "contentEncoding", "contentLanguage", "contentType", "customTime", "metadata")
_SAID = (*_COPIED, "acl", "storageClass")
# How a download says it.
_MEDIA_HEADERS = {
    "cacheControl": "Cache-Control", "contentDisposition": "Content-Disposition", "contentLanguage": "Content-Language",
    "contentType": "Content-Type", "etag": "ETag", "generation": "X-Goog-Generation", "metageneration": "X-Goog-Metageneration",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredObject:
    """One object. `resource`: as the JSON API describes it."""

    resource: Mapping[str, Any]
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A bucket, as the JSON API describes it, and its objects by name."""

    resource: dict[str, Any]
    objects: dict[str, StoredObject] = field(default_factory=dict[str, StoredObject])


class Objects:
    """The objects of all buckets.

    Args:
        pace: is told of every change, and may refuse one.
    """

    def __init__(self, pace: WritePace):
        self.strict = True  # False: no precondition is looked at, as a lax server would
        self.buckets: dict[str, Bucket] = {}
        self._pace = pace
        self._newest = 0  # generation

    # ------------------------------------------------------------ making

    def insert(
        self, operation: Operation, metadata: Mapping[str, Any], content: bytes, sums: Mapping[str, Any], conditions: Conditions
    ) -> Mapping[str, Any]:
        """Make `operation`'s object, replacing one of its name, and describe it.

        Args:
            operation: names bucket and object.
            metadata: as in the JSON API, with `contentType`.
            content: all bytes.
            sums: the checksums that the object is described with, and `componentCount` of a composed one.
            conditions: of the object that is replaced.

        Raises:
            GcsError: a condition doesn't hold, the bucket is missing, or the name is written too often.
        """
        bucket, name = operation.bucket, operation.name
        there = self.bucket(bucket).objects
        self._check(conditions, there.get(name), bucket, name)
        self._check_pace(bucket, name)
        self._newest = max(self._newest + 1, time.time_ns() // 1000)
        now = _now()
        said = {"storageClass": "STANDARD", **metadata}
        if "contentEncoding" in operation.query:
            said["contentEncoding"] = operation.query["contentEncoding"]
        resource = {
            "kind": "storage#object",
            "id": f"{bucket}/{name}/{self._newest}",
            "bucket": bucket,
            "name": name,
            "generation": str(self._newest),
            "size": str(len(content)),
            "timeCreated": now,
            "timeStorageClassUpdated": now,
            "acl": [_access("projectOwner-test", "OWNER")],
            **{key: said[key] for key in _SAID if said.get(key)},
            **sums,
        }
        return self._put(there, _changed(resource, 1, now), content)

    def check_start(self, operation: Operation, conditions: Conditions) -> None:
        """Refuse to begin an upload that could not end.

        Raises:
            GcsError: the bucket is missing, or a condition doesn't hold now.
        """
        found = self.bucket(operation.bucket).objects.get(operation.name)
        self._check(conditions, found, operation.bucket, operation.name)

    def rewrite(self, operation: Operation, body: bytes) -> Mapping[str, Any]:
        """Copy `operation`'s source to its object, at once and whole; describes the copy."""
        query, where = operation.query, (operation.source_bucket, operation.source_name)
        source = self._existing(*where, number(query, "sourceGeneration"))
        self._check(Conditions.from_query(query, "ifSource"), source, *where)
        kept = {key: source.resource[key] for key in _COPIED if key in source.resource}
        sums = {key: source.resource[key] for key in ("crc32c", "md5Hash", "componentCount") if key in source.resource}
        return self.insert(operation, {**kept, **parse_json(body)}, source.content, sums, Conditions.from_query(query))

    def compose(self, operation: Operation, body: bytes) -> Mapping[str, Any]:
        """Make an object of the bytes of others."""
        request = parse_json(body)
        sources = request.get("sourceObjects") or []
        if not 1 <= len(sources) <= _COMPOSED_AT_MOST:
            raise GcsError(400, f"compose takes 1 to {_COMPOSED_AT_MOST} sources, not {len(sources)}")
        parts: list[StoredObject] = []
        for source in sources:
            part = self._existing(operation.bucket, source["name"], number(source, "generation"))
            asked = {key: str(value) for key, value in source.get("objectPreconditions", {}).items()}
            self._check(Conditions.from_query(asked), part, operation.bucket, source["name"])
            parts.append(part)
        content = b"".join(part.content for part in parts)
        # Cloud Storage knows no MD5 of a composed object.
        sums = {"crc32c": crc32c(content), "componentCount": sum(part.resource.get("componentCount", 1) for part in parts)}
        metadata = {"contentType": "application/octet-stream", **request.get("destination", {})}
        return self.insert(operation, metadata, content, sums, Conditions.from_query(operation.query))

    # ------------------------------------------------------------ reading

    def read_metadata(self, operation: Operation) -> Mapping[str, Any]:
        """Describe an object, if the request's conditions hold."""
        return self._read(operation).resource

    def read_media(self, operation: Operation, headers: Mapping[str, str]) -> GcsAnswer:
        """The bytes of an object, or the range of them that `headers` ask for, if the request's conditions hold."""
        found = self._read(operation)
        resource, content = found.resource, found.content
        packed = resource.get("contentEncoding") == "gzip"
        said = {header: resource[key] for key, header in _MEDIA_HEADERS.items() if key in resource}
        said |= {
            "Accept-Ranges": "bytes",
            "Last-Modified": formatdate(datetime.fromisoformat(resource["updated"]).timestamp(), usegmt=True),
            "X-Goog-Hash": ",".join(f"{name}={resource[key]}" for name, key in CHECKSUMS.items() if key in resource),
            "X-Goog-Stored-Content-Encoding": resource.get("contentEncoding", "identity"),
        }
        if packed and "gzip" not in headers.get("Accept-Encoding", ""):
            return GcsAnswer(headers=said, body=gzip.decompress(content))  # of which there are no ranges
        if packed:
            said["Content-Encoding"] = "gzip"
        wanted = _RANGE.fullmatch(headers.get("Range", ""))
        if wanted is None or not any(wanted.groups()):
            return GcsAnswer(headers=said, body=content)
        size = len(content)
        if wanted[1]:
            first, last = int(wanted[1]), min(int(wanted[2] or size), size - 1)
        else:
            first, last = max(0, size - int(wanted[2])), size - 1
        if first > last:
            text = f"The requested range {headers['Range']} of {operation.bucket}/{operation.name} cannot be satisfied"
            raise GcsError(416, text, headers={"Content-Range": f"bytes */{size}"})
        said["Content-Range"] = f"bytes {first}-{last}/{size}"
        return GcsAnswer(status=206, headers=said, body=content[first : last + 1])

    def after(self, bucket: str, name: str) -> Iterator[Mapping[str, Any]]:
        """The objects of a bucket from this name on, in the order of their names."""
        objects = self.bucket(bucket).objects
        names = sorted(objects)
        return (objects[one].resource for one in names[bisect.bisect_left(names, name) :])

    def _read(self, operation: Operation) -> StoredObject:
        found = self._existing(operation.bucket, operation.name, number(operation.query, "generation"))
        self._check(Conditions.from_query(operation.query), found, operation.bucket, operation.name, reading=True)
        return found

    # ------------------------------------------------------------ changing

    def delete(self, operation: Operation) -> None:
        """Delete an object, if the request's conditions hold."""
        self._to_change(operation)
        del self.bucket(operation.bucket).objects[operation.name]
        self._pace.changed(operation.bucket, operation.name)

    def patch(self, operation: Operation, body: bytes) -> Any:
        """Change an object's metadata (PATCH: the fields given; PUT: all) or its access controls, which are kept and not looked at."""
        found = self._to_change(operation)
        changes, answer = parse_json(body), None
        if operation.verb == "acl":
            entity = unquote(operation.path.rpartition("/acl")[2].strip("/")) or changes.get("entity")
            answer = _access(entity, changes.get("role", "READER"))
            others = [one for one in found.resource["acl"] if one["entity"] != entity]
            changes: dict[str, Any] = {"acl": others if operation.method == "DELETE" else [*others, answer]}
        elif "metadata" in changes:
            given = changes["metadata"] or {}
            before = found.resource.get("metadata", {}) if operation.method == "PATCH" and given else {}
            changes["metadata"] = {key: value for key, value in {**before, **given}.items() if value is not None}
        kept = {key: value for key, value in found.resource.items() if key not in _COPIED or operation.method != "PUT"}
        said = {key: changes[key] for key in _SAID if key in changes}
        resource = {key: value for key, value in {**kept, **said}.items() if value not in (None, "", {})}
        changed = _changed(resource, int(resource["metageneration"]) + 1, _now())
        made = self._put(self.bucket(operation.bucket).objects, changed, found.content)
        return made if answer is None else answer

    def _to_change(self, operation: Operation) -> StoredObject:
        found = self._existing(operation.bucket, operation.name, number(operation.query, "generation"))
        self._check(Conditions.from_query(operation.query), found, operation.bucket, operation.name)
        self._check_pace(operation.bucket, operation.name)
        return found

    # ------------------------------------------------------------ buckets, without conditions

    def bucket(self, name: str) -> Bucket:
        """Raises GcsError, 404, if there is no such bucket."""
        if name not in self.buckets:
            raise no_such_bucket(name)
        return self.buckets[name]

    def create_bucket(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Create a bucket.

        Raises:
            GcsError: 409, it exists; 400, the name isn't allowed; 501, it would have what this server has not.
        """
        name = str(request.get("name"))
        if not _BUCKET_NAME.fullmatch(name):
            raise GcsError(400, f"bucket {name!r} can't be created: invalid bucket name")
        if name in self.buckets:
            raise GcsError(409, f"The bucket {name} exists already")
        resource = {"kind": "storage#bucket", "id": name, "location": "US", "storageClass": "STANDARD", "timeCreated": _now()}
        self.buckets[name] = Bucket(resource=resource | {"metageneration": "0"})
        return self.change_bucket(name, request)

    def change_bucket(self, name: str, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Change what is said of a bucket; describes it."""
        for feature in ("versioning", "hierarchicalNamespace"):
            if (changes.get(feature) or {}).get("enabled"):
                raise GcsError(501, f"This server has no {feature}")
        resource = self.bucket(name).resource
        resource |= _changed({**resource, **changes}, int(resource["metageneration"]) + 1, _now())
        return resource

    def delete_bucket(self, name: str) -> None:
        """Delete an empty bucket."""
        if self.bucket(name).objects:
            raise GcsError(409, f"The bucket you tried to delete is not empty: {name}")
        self.remove_bucket(name)

    def remove_bucket(self, name: str) -> None:
        """Delete a bucket with everything in it; one that is missing is fine."""
        self.buckets.pop(name, None)
        self._pace.forget(name)

    # ------------------------------------------------------------ inside

    def _existing(self, bucket: str, name: str, generation: int | None) -> StoredObject:
        found = self.bucket(bucket).objects.get(name)
        if found is None or generation not in (None, int(found.resource["generation"])):
            raise no_such_object(bucket, name)
        return found

    def _check(self, conditions: Conditions, found: StoredObject | None, bucket: str, name: str, *, reading: bool = False) -> None:
        if self.strict:
            version = ABSENT if found is None else Version.of(found.resource)
            conditions.check(version, f"{bucket}/{name}", reading=reading)

    def _check_pace(self, bucket: str, name: str) -> None:
        if not self._pace.allows(bucket, name):
            raise GcsError(
                429,
                f"The object {bucket}/{name} exceeded the rate limit for object mutation operations (create, update, and delete). "
                "Please reduce your request rate.",
            )

    def _put(self, objects: dict[str, StoredObject], resource: Mapping[str, Any], content: bytes) -> Mapping[str, Any]:
        objects[resource["name"]] = StoredObject(resource=resource, content=content)
        self._pace.changed(resource["bucket"], resource["name"])
        return resource


CHECKSUMS = {"crc32c": "crc32c", "md5": "md5Hash"}  # as a header calls it → as the JSON API does


def crc32c(content: bytes) -> str:
    """As `crc32c` in an object's description."""
    return base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()


def md5(content: bytes) -> str:
    """As `md5Hash` in an object's description."""
    return base64.b64encode(hashlib.md5(content, usedforsecurity=False).digest()).decode()


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a request's body; an empty body is an empty object.

    Raises:
        GcsError: 400, it is something else.
    """
    try:
        value = json.loads(body) if body.strip() else {}
    except ValueError:
        raise GcsError(400, "Parse Error: the body is not JSON", reason="parseError") from None
    if not isinstance(value, dict):
        raise GcsError(400, "Parse Error: the body is not a JSON object", reason="parseError")
    return value


def _changed(resource: Mapping[str, Any], metageneration: int, now: str) -> dict[str, Any]:
    """The same with what changes whenever something does."""
    etag = base64.b64encode(f"{resource.get('generation', '')}/{metageneration}".encode()).decode()
    return {**resource, "metageneration": str(metageneration), "etag": etag, "updated": now}


def _access(entity: Any, role: str) -> dict[str, Any]:
    return {"kind": "storage#objectAccessControl", "entity": entity, "role": role}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
