"""Objects: every operation on one, with its preconditions, over a backend that knows none.

Changes of one name wait for each other, so that looking at the object and changing it is one operation, as in Cloud Storage. Reads don't
wait: what they looked at they then read by its generation.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from weakref import WeakValueDictionary

from raystate.testing.gcs.answers import GcsAnswer, GcsError, no_such_bucket, no_such_object
from raystate.testing.gcs.backend_client import BackendClient, bucket_path, object_path
from raystate.testing.gcs.conditions import ABSENT, Conditions, Version, number
from raystate.testing.gcs.counts import WritePace
from raystate.testing.gcs.operations import Operation

_COMPOSED_AT_MOST = 32  # sources of one compose


@dataclass(frozen=True, slots=True, kw_only=True)
class _Extra:
    """What the backend doesn't keep of an object; only of objects that have any of it."""

    generation: int  # of the object that it is about: one that replaced it has nothing extra
    metageneration: int = 1
    updated: str = ""  # when the metadata changed last, RFC 3339
    components: int | None = None  # of a composed object


class Objects:
    """The objects of all buckets.

    Args:
        backend: keeps their bytes.
        pace: is told of every change, and may refuse one.
    """

    def __init__(self, backend: BackendClient, pace: WritePace):
        self.strict = True  # False: no precondition is looked at, as a lax server would
        self._backend, self._pace = backend, pace
        self._extras: dict[tuple[str, str], _Extra] = {}
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    # ------------------------------------------------------------ making

    async def insert(
        self,
        operation: Operation,
        metadata: Mapping[str, Any],
        content: bytes | bytearray | memoryview,
        conditions: Conditions,
        *,
        components: int | None = None,
    ) -> dict[str, Any]:
        """Make `operation`'s object, replacing one of its name, and describe it.

        Args:
            operation: names bucket and object.
            metadata: as in the JSON API, with `contentType`.
            content: all bytes.
            conditions: of the object that is replaced.
            components: of a composed object.

        Raises:
            GcsError: a condition doesn't hold, the bucket is missing, or the name is written too often.
        """
        bucket, name = operation.bucket, operation.name
        passed = {key: operation.query[key] for key in ("predefinedAcl", "contentEncoding") if key in operation.query}
        async with self._changing(bucket, name):
            if self.strict and conditions:
                conditions.check(_version(await self.look_up(bucket, name)), f"{bucket}/{name}")
            self._check_pace(bucket, name)
            made = await self._backend.insert(bucket, {**metadata, "name": name}, content, passed)
            extra = None if components is None else _Extra(generation=int(made["generation"]), components=components)
            self._changed(bucket, name, extra)
        return self.describe(made)

    async def check_start(self, operation: Operation, conditions: Conditions) -> None:
        """Refuse to begin an upload that could not end.

        Raises:
            GcsError: the bucket is missing, or a condition doesn't hold now.
        """
        await self.check_bucket(operation.bucket)
        if self.strict and conditions:
            found = await self.look_up(operation.bucket, operation.name)
            conditions.check(_version(found), f"{operation.bucket}/{operation.name}")

    async def check_bucket(self, bucket: str) -> None:
        """Raises GcsError, 404, if there is no such bucket."""
        status, _ = await self._backend.call("GET", bucket_path(bucket))
        if status == 404:
            raise no_such_bucket(bucket)

    async def rewrite(self, operation: Operation, body: bytes) -> dict[str, Any]:
        """Copy `operation`'s source to its object, at once and whole; describes the copy."""
        made = None
        while made is None:  # again if the source is replaced while this waits for its turn
            source = await self._existing(
                operation.source_bucket, operation.source_name, number(operation.query, "sourceGeneration")
            )
            if self.strict:
                what = f"{operation.source_bucket}/{operation.source_name}"
                Conditions.from_query(operation.query, "ifSource").check(_version(source), what)
            made = await self._copy(operation, body, source["generation"])
        return self.describe(made)

    async def _copy(self, operation: Operation, body: bytes, source_generation: str) -> dict[str, Any] | None:
        """Copy exactly this generation; None: it is gone."""
        bucket, name = operation.bucket, operation.name
        destination = object_path(bucket, name).removeprefix("/storage/v1")
        source = object_path(operation.source_bucket, operation.source_name)
        async with self._changing(bucket, name):
            self._check(operation, await self.look_up(bucket, name))
            self._check_pace(bucket, name)
            target = f"{source}/copyTo{destination}?sourceGeneration={source_generation}"
            status, made = await self._backend.call("POST", target, body)
            if status == 404:
                await self.check_bucket(bucket)
                return None
            _expect(status, f"copy to {bucket}/{name}", made)
            self._changed(bucket, name, None)
            return made

    async def compose(self, operation: Operation, body: bytes) -> dict[str, Any]:
        """Make an object of the bytes of others. Not by the backend's compose, which keeps the generation of an object it replaces."""
        request = parse_json(body)
        sources = request.get("sourceObjects") or []
        if not 1 <= len(sources) <= _COMPOSED_AT_MOST:
            raise GcsError(400, f"compose takes 1 to {_COMPOSED_AT_MOST} sources, not {len(sources)}")
        parts: list[bytes] = []
        components = 0
        for source in sources:
            found = await self._existing(operation.bucket, source["name"], number(source, "generation"))
            if self.strict:
                conditions = Conditions.from_query(
                    {key: str(value) for key, value in source.get("objectPreconditions", {}).items()}
                )
                conditions.check(_version(found), f"{operation.bucket}/{source['name']}")
            part = await self._backend.media(
                "GET", operation.bucket, source["name"], int(found["generation"]), {"Accept-Encoding": "gzip"}
            )
            parts.append(part.body if part.stream is None else await part.stream.read())
            components += found.get("componentCount", 1)
        metadata = {"contentType": "application/octet-stream", **request.get("destination", {})}
        conditions = Conditions.from_query(operation.query)
        return await self.insert(operation, metadata, b"".join(parts), conditions, components=components)

    # ------------------------------------------------------------ reading

    async def look_up(self, bucket: str, name: str, generation: int | None = None) -> dict[str, Any] | None:
        """An object as the JSON API describes it; None: there is none, or not of this generation."""
        found = await self._backend.metadata(bucket, name, generation)
        return None if found is None else self.describe(found)

    async def read_metadata(self, operation: Operation) -> dict[str, Any]:
        """Describe an object, if the request's conditions hold."""
        found = await self._existing(operation.bucket, operation.name, number(operation.query, "generation"))
        self._check(operation, found, reading=True)
        return found

    async def read_media(self, operation: Operation, headers: Mapping[str, str]) -> GcsAnswer:
        """The bytes of an object, of exactly the generation that the request's conditions were checked against."""
        generation = number(operation.query, "generation")
        asked = self.strict and bool(Conditions.from_query(operation.query))
        while True:
            found = None
            if asked:
                found = await self._existing(operation.bucket, operation.name, generation)
                self._check(operation, found, reading=True)
            pinned = int(found["generation"]) if found else generation
            answer = await self._backend.media(operation.method, operation.bucket, operation.name, pinned, headers)
            if answer.status != 404:
                break
            if not asked or generation is not None:
                raise no_such_object(operation.bucket, operation.name)
            # Replaced since it was looked at: look again.
        if answer.status == 416:
            size = (await self._existing(operation.bucket, operation.name, generation))["size"]
            message = f"The requested range {headers.get('Range')} of {operation.bucket}/{operation.name} cannot be satisfied"
            raise GcsError(416, message, headers={"Content-Range": f"bytes */{size}"})
        _expect(200 if answer.status == 206 else answer.status, f"read {operation.bucket}/{operation.name}", {})
        extra = self._extra(operation.bucket, operation.name, int(answer.headers["X-Goog-Generation"]))
        added = {"X-Goog-Metageneration": str(extra.metageneration), "ETag": _etag(extra)}
        return replace(answer, headers={**answer.headers, **added})

    def describe(self, resource: Mapping[str, Any]) -> dict[str, Any]:
        """What the backend says of an object, completed."""
        extra = self._extra(resource["bucket"], resource["name"], int(resource["generation"]))
        described = {
            **resource,
            "metageneration": str(extra.metageneration),
            "etag": _etag(extra),
            "id": f"{resource['bucket']}/{resource['name']}/{resource['generation']}",
        }
        if extra.updated:
            described["updated"] = extra.updated
        if extra.components is not None:
            described["componentCount"] = extra.components
            del described["md5Hash"]  # Cloud Storage knows no MD5 of a composed object
        return described

    # ------------------------------------------------------------ changing

    async def delete(self, operation: Operation) -> None:
        """Delete an object, if the request's conditions hold."""
        bucket, name = operation.bucket, operation.name
        async with self._changing(bucket, name):
            self._check(operation, await self._existing(bucket, name, number(operation.query, "generation")))
            self._check_pace(bucket, name)
            status, answer = await self._backend.call("DELETE", object_path(bucket, name))
            _expect(status, f"delete {bucket}/{name}", answer)
            self._changed(bucket, name, None)

    async def patch(self, operation: Operation, body: bytes) -> dict[str, Any]:
        """Change an object's metadata (PATCH: the fields given; PUT: all) or its access controls."""
        bucket, name = operation.bucket, operation.name
        async with self._changing(bucket, name):
            found = await self._existing(bucket, name, number(operation.query, "generation"))
            self._check(operation, found)
            self._check_pace(bucket, name)
            answer = None
            if operation.verb != "acl":
                await self._patch(operation, body, found)
            else:
                status, answer = await self._backend.call(operation.method, operation.path, body)
                _expect(status, f"{operation.method} {operation.path}", answer)
            version = _version(found)
            extra = self._extra(bucket, name, version.generation)
            now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
            self._changed(bucket, name, replace(extra, metageneration=version.metageneration + 1, updated=now))
            return answer if answer is not None else await self._existing(bucket, name)

    async def _patch(self, operation: Operation, body: bytes, found: Mapping[str, Any]) -> None:
        changes = parse_json(body)
        if operation.method == "PUT" or "metadata" in changes:
            # The backend's PATCH can't take a key away, as null does, and changes a map that other requests read. Its PUT sets them all.
            metadata = changes.pop("metadata", None)
            kept = found.get("metadata", {}) if operation.method == "PATCH" and metadata is not None else {}
            merged = {key: value for key, value in {**kept, **(metadata or {})}.items() if value is not None}
            await self._send_changes("PUT", operation, {"metadata": merged})
        if changes:
            await self._send_changes("PATCH", operation, changes)

    async def _send_changes(self, method: str, operation: Operation, changes: Mapping[str, Any]) -> None:
        target = object_path(operation.bucket, operation.name)
        status, answer = await self._backend.call(method, target, json.dumps(changes).encode())
        _expect(status, f"{method} {operation.bucket}/{operation.name}", answer)

    # ------------------------------------------------------------ buckets, without conditions

    async def create_bucket(self, bucket: str) -> None:
        """Create a bucket; one that exists is fine.

        Raises:
            GcsError: the name isn't allowed.
        """
        status, answer = await self._backend.call("POST", "/storage/v1/b?project=test", json.dumps({"name": bucket}).encode())
        if status != 409:
            _expect(status, f"bucket {bucket!r} can't be created", answer)

    async def remove_bucket(self, bucket: str) -> None:
        """Delete a bucket with everything in it; one that is missing is fine."""
        status, listed = await self._backend.call("GET", f"{bucket_path(bucket)}/o")
        while status == 200 and listed.get("items"):
            for item in listed["items"]:
                async with self._changing(bucket, item["name"]):
                    await self._backend.call("DELETE", object_path(bucket, item["name"]))
                    self._extras.pop((bucket, item["name"]), None)
            status, listed = await self._backend.call("GET", f"{bucket_path(bucket)}/o")
        await self._backend.call("DELETE", bucket_path(bucket))
        self._pace.forget(bucket)

    # ------------------------------------------------------------ inside

    def _changing(self, bucket: str, name: str) -> asyncio.Lock:
        """Held while an object is looked at and then changed. It lives as long as somebody holds or awaits it."""
        lock = self._locks.get((bucket, name))
        if lock is None:
            lock = self._locks[bucket, name] = asyncio.Lock()
        return lock

    async def _existing(self, bucket: str, name: str, generation: int | None = None) -> dict[str, Any]:
        found = await self.look_up(bucket, name, generation)
        if found is None:
            raise no_such_object(bucket, name)
        return found

    def _check(self, operation: Operation, found: Mapping[str, Any] | None, *, reading: bool = False) -> None:
        if self.strict:
            what = f"{operation.bucket}/{operation.name}"
            Conditions.from_query(operation.query).check(_version(found), what, reading=reading)

    def _check_pace(self, bucket: str, name: str) -> None:
        if not self._pace.allows(bucket, name):
            raise GcsError(
                429,
                f"The object {bucket}/{name} exceeded the rate limit for object mutation operations (create, update, and delete). "
                "Please reduce your request rate.",
            )

    def _changed(self, bucket: str, name: str, extra: _Extra | None) -> None:
        self._pace.changed(bucket, name)
        if extra is None:
            self._extras.pop((bucket, name), None)
        else:
            self._extras[bucket, name] = extra

    def _extra(self, bucket: str, name: str, generation: int) -> _Extra:
        extra = self._extras.get((bucket, name))
        return extra if extra is not None and extra.generation == generation else _Extra(generation=generation)


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


def _version(resource: Mapping[str, Any] | None) -> Version:
    return ABSENT if resource is None else Version.of(resource)


def _etag(extra: _Extra) -> str:
    # It changes with the metadata too, as Cloud Storage's does; the backend's is the MD5, equal for equal bytes.
    return base64.b64encode(f"{extra.generation}/{extra.metageneration}".encode()).decode()


def _expect(status: int, what: str, answer: Any) -> None:
    if status != 200:
        message = answer.get("error", {}).get("message", "") if isinstance(answer, dict) else ""
        raise GcsError(status, f"{what}: {message}")
