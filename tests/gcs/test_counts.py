"""Operations are counted as Cloud Storage bills them, and changes that come too soon are seen."""

from __future__ import annotations

import pytest

from raystate.testing.gcs import GcsServer
from raystate.testing.gcs.counts import WritePace
from tests.gcs.raw import Raw


@pytest.fixture
def counted(raw: Raw, server: GcsServer) -> Raw:
    """Two objects are there; what made them isn't counted."""
    for name in ("a", "b"):
        raw.media(name, b"data")
    server.reset_counts()
    return raw


@pytest.mark.parametrize(
    ("request_line", "kind", "billed"),
    [
        ("GET {objects}", "list", "class_a"),
        ("POST {objects}/a/rewriteTo/b/{bucket}/o/c", "rewrite", "class_a"),
        ("PATCH {objects}/a", "patch", "class_a"),
        ("GET {objects}/a", "get_meta", "class_b"),
        ("GET {objects}/a?alt=media", "get_media", "class_b"),
        ("GET /download{objects}/a?alt=media", "get_media", "class_b"),
        ("GET /storage/v1/b/{bucket}", "get_bucket", "class_b"),
        ("GET /storage/v1/b", "list_buckets", "class_a"),
        ("DELETE {objects}/a", "delete", "free"),
        ("GET {objects}/missing", "get_meta", None),
        ("DELETE {objects}/a?ifGenerationMatch=1", "delete", None),
        ("GET /nothing", "other", None),
    ],
)
def test_billing(counted: Raw, server: GcsServer, request_line: str, kind: str, billed: str | None):
    counted.send(*request_line.format(objects=counted.objects, bucket=counted.bucket).split())
    counts = server.counts()
    assert (counts.requests, counts.kinds) == (1, {kind: 1})
    assert {name: getattr(counts, name) for name in ("class_a", "class_b", "free")} == {
        name: int(name == billed) for name in ("class_a", "class_b", "free")
    }


@pytest.mark.parametrize(
    ("how", "requests", "kinds"),
    [
        ("media", 1, {"upload": 1}),
        ("multipart", 1, {"upload": 1}),
        ("resumable", 2, {"upload_start": 1, "upload": 1}),
        ("chunked", 3, {"upload_start": 1, "upload_chunk": 1, "upload": 1}),
    ],
)
def test_an_upload_is_billed_once(counted: Raw, server: GcsServer, how: str, requests: int, kinds: dict[str, int]):
    getattr(counted, how)("name", b"data")
    counts = server.counts()
    assert (counts.requests, counts.kinds, counts.class_a, counts.class_b) == (requests, kinds, 1, 0)


def test_each_part_of_a_batch_counts(counted: Raw, server: GcsServer):
    counted.batch(f"DELETE {counted.path('a')}", f"GET {counted.path('b')}", f"DELETE {counted.path('missing')}")
    counts = server.counts()
    assert (counts.requests, counts.kinds) == (1, {"delete": 2, "get_meta": 1, "batch": 1})
    assert (counts.class_a, counts.class_b, counts.free) == (0, 1, 1)
    assert counts.statuses == {204: 1, 404: 1, 200: 2}


def test_what_was_done_is_billed_even_if_its_answer_was_lost(counted: Raw, server: GcsServer):
    server.faults([{"mode": "reset_after_commit", "times": 1}, {"mode": "reset", "times": 1}])
    for _ in range(2):
        with pytest.raises(ConnectionError):
            counted.media("name", b"data")
    counts = server.counts()
    assert (counts.kinds, counts.statuses, counts.class_a) == ({"upload": 2}, {0: 2}, 1)


def test_bytes_and_windows(counted: Raw, server: GcsServer):
    counted.media("name", b"x" * 3_000_000)
    counted.read("name")
    window = server.reset_counts()
    assert (window.bytes_up, window.bytes_down >= 3_000_000) == (3_000_000, True)
    assert server.counts().requests == 0


def test_log(counted: Raw, server: GcsServer):
    server.faults([{"status": 503, "kinds": ["list"]}])
    counted.media("a/b", b"data")
    counted.list()
    upload, listing = server.log(2)
    assert (upload.method, upload.kind, upload.bucket, upload.name, upload.status) == ("POST", "upload", counted.bucket, "a/b", 200)
    assert (upload.bytes_up, upload.bytes_down > 0, upload.fault) == (4, True, "")
    assert (listing.kind, listing.status, listing.fault, listing.target) == ("list", 503, "status", counted.objects)
    assert 0 < upload.at_s < listing.at_s


def test_changes_that_come_too_soon_are_counted(counted: Raw, server: GcsServer):
    for _ in range(3):
        counted.media("hot", b"data")
    counted.media("hot", b"data", ifGenerationMatch=0)  # changes nothing
    counted.media("cold", b"data")
    assert server.counts().too_soon == {f"{counted.bucket}/hot": 2}


def test_a_limit_on_changes(raw: Raw, server: GcsServer):
    server.limit_writes(1 / 3600)
    assert raw.media("name", b"first").status == 200
    for refused in (raw.media("name", b"second"), raw.patch("name", {}), raw.delete("name"), raw.copy("name", "name")):
        assert (refused.status, refused.reason) == (429, "rateLimitExceeded")
    assert raw.media("name", b"second", ifGenerationMatch=0).status == 412  # a lost race stays a lost race
    assert raw.media("other", b"data").status == 200
    assert raw.read("name").body == b"first"
    assert server.counts().too_soon == {f"{raw.bucket}/name": 4}


def test_pace():
    now_s = [0.0]
    reported: list[str] = []
    pace = WritePace(lambda bucket, name: reported.append(name), clock=lambda: now_s[0])
    for now_s[0], name in ((0, "a"), (0.5, "b"), (0.875, "a"), (1.875, "a"), (2.75, "a")):
        pace.changed("bucket", name)
    assert reported == ["a", "a"]  # at 0.875 and 2.75
    pace.limit_per_s = 1
    assert not pace.allows("bucket", "a")
    now_s[0] = 3.75
    assert pace.allows("bucket", "a")
