"""The server that clients talk to: understands each request, plays faults, has it carried out, counts it."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import struct
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from raystate.core.formats.errors import ConfigError
from raystate.testing.gcs.answers import ConnectionCutError, GcsAnswer, GcsError, json_answer
from raystate.testing.gcs.batch import join_answers, parse_batch
from raystate.testing.gcs.conditions import Conditions
from raystate.testing.gcs.counts import Counters, Counts, LoggedRequest, WritePace
from raystate.testing.gcs.faults import FaultRule, Faults, parse_rules
from raystate.testing.gcs.fields import show
from raystate.testing.gcs.listing import list_buckets, list_objects
from raystate.testing.gcs.objects import Objects, parse_json
from raystate.testing.gcs.operations import Operation, parse
from raystate.testing.gcs.uploads import Sessions, Upload, checksums, read_upload

CONTROL = "/_raystate/"  # requests for the server itself; no client of Cloud Storage uses such a path
_NOT_IN_A_BATCH = ("upload", "upload_start", "upload_chunk", "upload_cancel", "get_media", "batch")
_MAKING = ("upload", "upload_chunk")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset, and throw away what wasn't sent


class Proxy:
    """Everything between the clients and the objects.

    Args:
        strict: whether preconditions count.
        writes_per_object_s: see `Counts.too_soon`; None: only counted.
        rules: faults from the start.
    """

    def __init__(self, *, strict: bool = True, writes_per_object_s: float | None = None, rules: tuple[FaultRule, ...] = ()):
        self.counters = Counters()
        self.faults = Faults(rules)
        self._pace = WritePace(self.counters.record_too_soon)
        self._pace.limit_per_s = writes_per_object_s
        self.objects = Objects(self._pace)
        self.objects.strict = strict
        self._sessions = Sessions(self.objects)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one HTTP request."""
        body = await request.read()
        target = request.raw_path
        if target.startswith(CONTROL):
            return send(self._control(request.method, target.removeprefix(CONTROL), body))
        self.counters.now.requests += 1
        try:
            answer, rule = await self._perform(request.method, target, request.headers, body, f"http://{request.host}")
        except ConnectionCutError:
            return reset(request)
        if rule is not None and rule.mode == "truncate":
            return await send_half(request, answer)
        return send(answer, corrupt=rule is not None and rule.mode == "corrupt" and answer.status < 400)

    # ------------------------------------------------------------ one operation

    async def _perform(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes, base_url: str, *, in_batch: bool = False
    ) -> tuple[GcsAnswer, FaultRule | None]:
        """Play faults, then carry the request out. Returns its answer, and the rule that acted on it.

        Raises:
            ConnectionCutError: there is no answer.
        """
        at_s = self.counters.now_s()
        upload = None
        try:
            operation = parse(method, target, headers)
            if "upload_id" in operation.query:
                operation = self._sessions.recognize(operation, headers.get("Content-Range"), len(body))
            elif operation.kind == "upload":
                operation, upload = read_upload(operation, headers, body)
        except GcsError as error:
            operation = Operation(kind="other", method=method, path=target, query={}, target=target)
            self._count(operation, at_s, body, error.status, carried_out=False)
            return error.answer(), None

        injection = self.faults.choose(operation.kind, operation.line)
        rule = injection.rule
        if injection.delay_s:
            await asyncio.sleep(injection.delay_s)
        if rule is not None:
            if rule.mode in ("status", "outage"):
                answer = rule.answer()
                self._count(operation, at_s, body, answer.status, carried_out=False, rule=rule, answer=answer)
                return answer, rule
            if rule.mode in ("stall", "reset") or (rule.mode == "truncate" and operation.kind in _MAKING):
                try:
                    if rule.mode == "stall":
                        await asyncio.wait_for(self.faults.replaced.wait(), rule.stall_s)
                except TimeoutError:
                    pass
                finally:  # also when the client has given up
                    self._count(operation, at_s, body, 0, carried_out=False, rule=rule)
                raise ConnectionCutError

        answer = await self._carry_out(operation, upload, headers, body, base_url, in_batch, at_s, rule)
        if rule is not None and (rule.mode == "reset_after_commit" or (rule.mode == "truncate" and in_batch)):
            raise ConnectionCutError
        return answer, rule

    async def _carry_out(
        self, operation: Operation, upload: Upload | None, headers: Mapping[str, str], body: bytes, base_url: str, in_batch: bool,
        at_s: float, rule: FaultRule | None,
    ) -> GcsAnswer:  # fmt: skip
        try:
            if in_batch and operation.kind in _NOT_IN_A_BATCH:
                raise GcsError(400, f"A batch can't hold an operation of kind {operation.kind}")
            if operation.kind == "batch":
                answer = await self._batch(headers, body, base_url)
            else:
                answer = self._execute(operation, upload, headers, body, base_url)
        except ConnectionCutError:  # by a part of a batch
            self._count(operation, at_s, body, 0, carried_out=True, rule=rule)
            raise
        except GcsError as error:
            answer = error.answer()
        cut = rule is not None and rule.mode == "reset_after_commit"
        carried_out = answer.status < 400
        self._count(operation, at_s, body, 0 if cut else answer.status, carried_out=carried_out, rule=rule, answer=answer)
        return answer

    def _execute(
        self, operation: Operation, upload: Upload | None, headers: Mapping[str, str], body: bytes, base_url: str
    ) -> GcsAnswer:
        objects, query = self.objects, operation.query
        match operation.kind:
            case "upload" | "upload_chunk" if upload is None:
                return self._sessions.send(operation, headers, body)
            case "upload":
                assert upload is not None
                sums = checksums(upload.metadata, headers, upload.content)
                conditions = Conditions.from_query(query)
                return show(objects.insert(operation, upload.metadata, upload.content, sums, conditions), query)
            case "upload_start":
                return self._sessions.start(operation, headers, body, base_url)
            case "upload_cancel":
                return self._sessions.cancel(operation)
            case "get_media":
                return objects.read_media(operation, headers)
            case "get_meta":
                if operation.method == "HEAD":
                    return objects.read_media(operation, headers)
                return show(objects.read_metadata(operation), query)
            case "list":
                return show(list_objects(objects, operation.bucket, query), query)
            case "delete":
                objects.delete(operation)
                return GcsAnswer(status=204)
            case "patch":
                return show(objects.patch(operation, body), query)
            case "rewrite":
                copied = objects.rewrite(operation, body)
                return show(copied if operation.verb == "copyTo" else _rewritten(copied), query)
            case "compose":
                return show(objects.compose(operation, body), query)
            case "list_buckets":
                return show(list_buckets(objects, query), query)
            case "get_bucket":
                return show(objects.bucket(operation.bucket).resource, query)
            case "write_bucket":
                change = parse_json(body)
                name = operation.bucket
                return show(objects.change_bucket(name, change) if name else objects.create_bucket(change), query)
            case "delete_bucket":
                objects.delete_bucket(operation.bucket)
                return GcsAnswer(status=204)
            case "other":
                return json_answer({"items": objects.read_metadata(operation)["acl"]})
            case _:
                raise AssertionError(operation.kind)

    async def _batch(self, headers: Mapping[str, str], body: bytes, base_url: str) -> GcsAnswer:
        parts = parse_batch(headers.get("Content-Type", ""), body)
        performed = await asyncio.gather(
            *(self._perform(part.method, part.target, part.headers, part.body, base_url, in_batch=True) for part in parts),
            return_exceptions=True,
        )
        answers: list[GcsAnswer] = []
        for outcome in performed:
            if isinstance(outcome, BaseException):
                raise outcome
            answers.append(outcome[0])
        return join_answers(parts, answers)

    def _count(
        self, operation: Operation, at_s: float, body: bytes, status: int, *, carried_out: bool, rule: FaultRule | None = None,
        answer: GcsAnswer | None = None,
    ) -> None:  # fmt: skip
        entry = LoggedRequest(
            at_s=at_s,
            took_s=self.counters.now_s() - at_s,
            method=operation.method,
            kind=operation.kind,
            bucket=operation.bucket,
            name=operation.name,
            target=operation.target,
            status=status,
            bytes_up=len(body),
            bytes_down=0 if answer is None or status == 0 else len(answer.body),
            fault="" if rule is None else rule.mode,
        )
        self.counters.record(entry, carried_out=carried_out)

    # ------------------------------------------------------------ the server itself

    def _control(self, method: str, target: str, body: bytes) -> GcsAnswer:
        """Requests that no fault acts on, and that count nowhere."""
        try:
            return json_answer(self._controlled(method, target, body))
        except ConfigError as error:
            return json_answer({"message": error.message, "field": error.field}, 400)
        except GcsError as error:
            return json_answer({"message": error.message, "field": target}, 400)

    def _controlled(self, method: str, target: str, body: bytes) -> Any:
        match method, target:
            case "GET", "health":
                return {"ok": True}
            case "PUT", "buckets":
                wanted = parse_json(body)
                if wanted["name"] not in self.objects.buckets:
                    self.objects.create_bucket(wanted)
                return {}
            case "DELETE", "buckets":
                self.objects.remove_bucket(parse_json(body)["name"])
                return {}
            case "PUT", "faults":
                self.faults.replace(parse_rules(body.decode()))
                return {}
            case "GET", "faults":
                return {"hits": self.faults.hits()}
            case "GET", "counts":
                return dataclasses.asdict(self.counters.now)
            case "DELETE", "counts":
                counts = dataclasses.asdict(self.counters.now)
                self.counters.now = Counts()
                return counts
            case "GET", "log":
                return [dataclasses.asdict(entry) for entry in self.counters.log]
            case "PUT", "settings":
                settings = parse_json(body)
                if "strict" in settings:
                    self.objects.strict = bool(settings["strict"])
                if "writes_per_object_s" in settings:
                    self._pace.limit_per_s = settings["writes_per_object_s"]
                return {}
            case _:
                raise ConfigError(f"{method} {CONTROL}{target}: there is no such control", field=target)


def _rewritten(resource: Mapping[str, Any]) -> dict[str, Any]:
    """A rewrite that was done at once, as all are here."""
    size = resource["size"]
    return {"kind": "storage#rewriteResponse", "totalBytesRewritten": size, "objectSize": size, "done": True, "resource": resource}


# ---------------------------------------------------------------- bytes to a client, and connections that end as faults want them to


def send(answer: GcsAnswer, *, corrupt: bool = False) -> web.Response:
    """Answer. `corrupt`: the body's first byte is another one."""
    body = bytes([answer.body[0] ^ 1]) + answer.body[1:] if corrupt and answer.body else answer.body
    return web.Response(status=answer.status, headers=answer.headers, body=body)


async def send_half(request: web.Request, answer: GcsAnswer) -> web.StreamResponse:
    """Promise everything, send half of it, end the connection in good order: bytes are missing, and nothing else tells."""
    response = web.StreamResponse(status=answer.status, headers=answer.headers)
    response.content_length = len(answer.body)
    await response.prepare(request)
    await response.write(answer.body[: len(answer.body) // 2])
    if request.transport is not None:
        request.transport.close()  # sends what is on its way first
    return response


def reset(request: web.Request) -> web.Response:
    """Cut the connection as a broken network does."""
    if (transport := request.transport) is not None:
        if (connection := transport.get_extra_info("socket")) is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        transport.abort()
    return web.Response()  # goes nowhere; aiohttp wants one
