"""What happens between a look at an object and what follows from it: with a backend that changes in exactly that moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from raystate.testing.gcs.answers import GcsAnswer, GcsError
from raystate.testing.gcs.backend_client import BackendClient
from raystate.testing.gcs.counts import WritePace
from raystate.testing.gcs.objects import Objects
from raystate.testing.gcs.operations import Operation, parse

NAME = "/storage/v1/b/bucket/o/name"


class Replacing:
    """A backend with one object, of generation 1, which is replaced right after it was looked at first."""

    def __init__(self) -> None:
        self.generation, self.looks = 1, 0

    async def metadata(self, bucket: str, name: str, generation: int | None = None) -> dict[str, Any] | None:
        if name == "copy" or generation not in (None, self.generation):
            return None
        described = {"bucket": bucket, "name": name, "generation": str(self.generation), "size": "4"}
        self.looks += 1
        if self.looks == 1:
            self.generation = 2
        return described

    async def media(self, method: str, bucket: str, name: str, generation: int | None, headers: Mapping[str, str]) -> GcsAnswer:
        if generation not in (None, self.generation):
            return GcsAnswer(status=404)
        return GcsAnswer(headers={"X-Goog-Generation": str(self.generation)}, body=b"%d" % self.generation)

    async def call(self, method: str, target: str, body: bytes = b"") -> tuple[int, Any]:
        if method == "POST" and f"sourceGeneration={self.generation}" not in target:
            return 404, {}
        return 200, {"bucket": "bucket", "name": "copy", "generation": str(self.generation * 100)}


def objects() -> Objects:
    return Objects(cast(BackendClient, Replacing()), WritePace(lambda bucket, name: None))


async def read(target: str) -> bytes:
    return (await objects().read_media(parse("GET", target, {}), {})).body


async def copy(target: str) -> bytes:
    copied = await objects().rewrite(parse("POST", target, {}), b"")
    return b"%d" % (int(copied["generation"]) // 100)


@pytest.mark.parametrize(
    ("call", "target", "match", "not_match"),
    [
        (read, f"{NAME}?alt=media", "ifGenerationMatch", "ifGenerationNotMatch"),
        (copy, f"{NAME}/copyTo/b/bucket/o/copy?", "ifSourceGenerationMatch", "ifSourceGenerationNotMatch"),
    ],
)
def test_what_is_taken_is_what_was_checked(call: Callable[[str], Any], target: str, match: str, not_match: str):
    with pytest.raises(GcsError) as caught:
        asyncio.run(call(f"{target}&{match}=1"))  # held at the first look, but not of what is there now
    assert caught.value.status == 412
    assert asyncio.run(call(f"{target}&{not_match}=7")) == b"2"


def test_a_generation_that_is_asked_for_is_gone():
    for call, target in (
        (read, f"{NAME}?alt=media&generation=1&ifMetagenerationMatch=1"),
        (copy, f"{NAME}/copyTo/b/bucket/o/copy?sourceGeneration=1"),
    ):
        with pytest.raises(GcsError) as caught:
            asyncio.run(call(target))
        assert caught.value.status == 404


def test_changes_of_one_name_wait_for_each_other():
    """A deletion that looks while another one is between look and deletion would delete twice."""

    class Slow(Replacing):
        def __init__(self) -> None:
            super().__init__()
            self.there, self.inside, self.most = True, 0, 0

        async def metadata(self, bucket: str, name: str, generation: int | None = None) -> dict[str, Any] | None:
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0)
            return {"bucket": bucket, "name": name, "generation": "1"} if self.there else None

        async def call(self, method: str, target: str, body: bytes = b"") -> tuple[int, Any]:
            await asyncio.sleep(0)
            self.there = False
            return 200, {}

    async def delete_twice() -> tuple[int, Any]:
        backend = Slow()
        kept = Objects(cast(BackendClient, backend), WritePace(lambda bucket, name: None))

        async def delete(operation: Operation) -> None:
            try:
                await kept.delete(operation)
            finally:
                backend.inside -= 1

        operation = parse("DELETE", f"{NAME}?ifGenerationMatch=1", {})
        outcomes = await asyncio.gather(delete(operation), delete(operation), return_exceptions=True)
        return backend.most, outcomes

    most, (first, second) = asyncio.run(delete_twice())
    assert (most, first) == (1, None)
    assert isinstance(second, GcsError) and second.status == 404
