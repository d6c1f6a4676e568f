"""The server is as strict as Cloud Storage. If this fails, no other test against it means anything."""

from __future__ import annotations

import json

import pytest

from raystate.testing.gcs import GcsServer
from tests.gcs.raw import MAKING, UPLOADS, Raw, at_once, content, make


@pytest.mark.parametrize("how", MAKING)
class TestPreconditionsOfMaking:
    def test_create_is_once(self, raw: Raw, how: str):
        assert make(raw, how, "name", b"first", ifGenerationMatch=0).status == 200
        second = make(raw, how, "name", b"second", ifGenerationMatch=0)
        assert (second.status, second.reason) == (412, "conditionNotMet")
        assert content(raw, "name") == b"first"

    def test_replace_needs_the_generation(self, raw: Raw, how: str):
        make(raw, how, "name", b"first")
        before = raw.get("name").generation
        assert make(raw, how, "name", b"second", ifGenerationMatch=before + 1).status == 412
        assert content(raw, "name") == b"first"
        assert make(raw, how, "name", b"second", ifGenerationMatch=before).status == 200
        assert content(raw, "name") == b"second"
        assert raw.get("name").generation > before

    def test_generation_not_match(self, raw: Raw, how: str):
        assert make(raw, how, "name", b"first", ifGenerationNotMatch=0).status == 412  # only if there is one
        make(raw, how, "name", b"first")
        generation = raw.get("name").generation
        assert make(raw, how, "name", b"second", ifGenerationNotMatch=generation).status == 412
        assert make(raw, how, "name", b"second", ifGenerationNotMatch=0).status == 200

    def test_metageneration_conditions(self, raw: Raw, how: str):
        make(raw, how, "name", b"first")
        raw.patch("name", {"metadata": {"key": "value"}})
        assert make(raw, how, "name", b"second", ifMetagenerationMatch=1).status == 412
        assert make(raw, how, "name", b"second", ifMetagenerationNotMatch=2).status == 412
        assert make(raw, how, "name", b"second", ifMetagenerationMatch=2).status == 200
        assert raw.get("name").json["metageneration"] == "1"

    def test_one_of_many_creators_wins(self, raw: Raw, how: str):
        statuses = at_once(16, lambda index: make(raw, how, "name", b"%d" % index, ifGenerationMatch=0).status)
        assert sorted(statuses) == [200, *[412] * 15]
        assert content(raw, "name") == b"%d" % statuses.index(200)

    def test_a_lax_server_is_noticed(self, raw: Raw, server: GcsServer, how: str):
        server.set_strict(False)
        statuses = at_once(16, lambda index: make(raw, how, "name", b"%d" % index, ifGenerationMatch=0).status)
        assert statuses.count(200) == 16  # sixteen winners: the test above can see it


def test_a_condition_that_is_no_number(raw: Raw):
    assert raw.media("name", b"", ifGenerationMatch="x").status == 400


def test_a_counter_loses_nothing(raw: Raw):
    raw.media("counter", b"0")

    def add(index: int) -> None:
        left = 8
        while left:
            reply = raw.read("counter")
            generation = reply.headers["X-Goog-Generation"]
            if raw.media("counter", b"%d" % (int(reply.body) + 1), ifGenerationMatch=generation).status == 200:
                left -= 1

    at_once(6, add)
    assert raw.read("counter").body == b"48"


# ------------------------------------------------------------ delete, patch, read


def test_delete(raw: Raw):
    generation = raw.media("name", b"data").generation
    assert raw.delete("name", ifGenerationMatch=generation + 1).status == 412
    assert raw.delete("name", ifMetagenerationMatch=2).status == 412
    assert raw.delete("name", generation=generation + 1).status == 404
    gone = raw.delete("name", ifGenerationMatch=generation)
    assert (gone.status, gone.body) == (204, b"")
    missing = raw.delete("name")
    assert (missing.status, missing.reason) == (404, "notFound")


def test_one_of_many_deleters_wins(raw: Raw):
    generation = raw.media("name", b"data").generation
    statuses = at_once(16, lambda _: raw.delete("name", ifGenerationMatch=generation).status)
    assert sorted(statuses) == [204, *[404] * 15]


def test_patch(raw: Raw):
    made = raw.media("name", b"data")
    generation = made.generation
    patched = raw.patch("name", {"metadata": {"a": "1", "b": "2"}, "contentType": "text/x"}, ifMetagenerationMatch=1).json
    assert (patched["metadata"], patched["contentType"]) == ({"a": "1", "b": "2"}, "text/x")
    assert (patched["generation"], patched["metageneration"]) == (str(generation), "2")
    assert patched["etag"] != made.json["etag"]
    assert raw.patch("name", {"metadata": {"a": "3"}}, ifMetagenerationMatch=1).status == 412
    assert raw.patch("name", {"metadata": {"a": None}}, ifGenerationMatch=generation).json["metadata"] == {"b": "2"}
    assert raw.read("name").headers["X-Goog-Metageneration"] == "3"
    assert raw.send("PUT", raw.path("name"), {"metadata": {"c": "4"}}).json["metadata"] == {"c": "4"}
    assert raw.list().json["items"][0]["metageneration"] == "4"
    assert raw.read("name").body == b"data"
    assert raw.patch("missing", {}).status == 404


@pytest.mark.parametrize("read", ["get", "read"])
def test_reads_have_conditions(raw: Raw, read: str):
    generation = raw.media("name", b"data").generation
    reads = getattr(raw, read)
    assert reads("name", ifGenerationMatch=generation, ifMetagenerationMatch=1).status == 200
    assert reads("name", ifGenerationMatch=generation + 1).status == 412
    assert reads("name", ifMetagenerationMatch=2).status == 412
    same = reads("name", ifGenerationNotMatch=generation)
    assert (same.status, same.body) == (304, b"")
    assert reads("name", ifMetagenerationNotMatch=1).status == 304
    assert reads("missing", ifGenerationMatch=generation).status == 404


@pytest.mark.parametrize("read", ["get", "read"])
def test_a_generation_is_immutable(raw: Raw, read: str):
    old = raw.media("name", b"old").generation
    reads = getattr(raw, read)
    assert reads("name", generation=old).status == 200
    new = raw.media("name", b"new").generation
    assert reads("name", generation=old).status == 404
    assert reads("name", generation=new).status == 200
    assert raw.delete("name", generation=old).status == 404
    assert raw.copy("name", "copy", sourceGeneration=old).status == 404


def test_what_a_read_says(raw: Raw):
    made = raw.media("name", b"0123456789").json
    reply = raw.read("name")
    assert reply.headers["X-Goog-Generation"] == made["generation"]
    assert reply.headers["X-Goog-Hash"] == f"crc32c={made['crc32c']},md5={made['md5Hash']}"
    assert reply.headers["ETag"] == made["etag"]
    part = raw.send("GET", raw.path("name", alt="media"), Range="bytes=2-4")
    assert (part.status, part.body, part.headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")
    assert raw.send("GET", raw.path("name", alt="media"), Range="bytes=-3").body == b"789"
    assert raw.send("GET", raw.path("name", alt="media"), Range="bytes=8-99").body == b"89"
    beyond = raw.send("GET", raw.path("name", alt="media"), Range="bytes=10-")
    assert (beyond.status, beyond.headers["Content-Range"]) == (416, "bytes */10")
    head = raw.send("HEAD", raw.path("name", alt="media"))
    assert (head.status, head.headers["Content-Length"], head.body) == (200, "10", b"")
    assert raw.send("GET", f"/download{raw.path('name')}?alt=media").body == b"0123456789"


def test_copy_conditions_of_the_source(raw: Raw):
    generation = raw.media("source", b"data").generation
    assert raw.copy("source", "copy", ifSourceGenerationMatch=generation + 1).status == 412
    assert raw.copy("source", "copy", ifSourceMetagenerationNotMatch=1).status == 412
    done = raw.copy("source", "copy", ifSourceGenerationMatch=generation).json
    assert (done["done"], done["resource"]["name"], done["objectSize"]) == (True, "copy", "4")
    assert raw.copy("missing", "copy").status == 404
    assert raw.send("POST", f"{raw.path('source')}/rewriteTo/b/missing/o/copy").status == 404
    assert raw.read("copy").body == b"data"


def test_compose(raw: Raw):
    first, second = raw.media("first", b"12").generation, raw.media("second", b"34").generation
    wrong = raw.compose("both", [{"name": "first", "objectPreconditions": {"ifGenerationMatch": second}}])
    assert wrong.status == 412
    assert raw.compose("both", [{"name": "first", "generation": second}]).status == 404
    sources = [{"name": "first", "objectPreconditions": {"ifGenerationMatch": first}}, {"name": "second"}]
    made = raw.compose("both", sources).json
    assert (raw.read("both").body, made["componentCount"], made["contentType"]) == (b"1234", 2, "text/x")
    assert "md5Hash" not in raw.get("both").json  # as Cloud Storage: only CRC32C of composed objects
    again = raw.compose("both", [{"name": "both"}, {"name": "first"}]).json
    assert (raw.read("both").body, again["componentCount"]) == (b"123412", 3)
    assert int(again["generation"]) > int(made["generation"])
    assert raw.compose("none", []).status == 400


# ------------------------------------------------------------ batches, buckets, the rest


def test_parts_of_a_batch_have_conditions(raw: Raw):
    generations = [raw.media(f"name{index}", b"data").generation for index in range(3)]
    statuses = raw.batch(
        f"DELETE {raw.path('name0', ifGenerationMatch=generations[0] + 1)}",
        f"DELETE {raw.path('name1', ifGenerationMatch=generations[1])}",
        f"DELETE http://storage.googleapis.com{raw.path('missing')}",
        f"GET {raw.path('name2', fields='name')}",
        f"POST {raw.uploads}?uploadType=media&name=name3",
    )
    assert statuses == [412, 204, 404, 200, 400]
    assert raw.names() == ["name0", "name2"]


def test_buckets(raw: Raw, server: GcsServer, bucket: str):
    assert raw.send("POST", "/storage/v1/b?project=p", {"name": bucket}).status == 409
    assert raw.send("GET", f"/storage/v1/b/{bucket}").json["name"] == bucket
    raw.media("name", b"data")
    assert raw.send("DELETE", f"/storage/v1/b/{bucket}").status == 409  # not empty
    assert raw.send("GET", "/storage/v1/b/missing").status == 404
    server.create_bucket(f"{bucket}-2")
    page = raw.send("GET", f"/storage/v1/b?project=p&prefix={bucket}&maxResults=1").json
    assert [item["name"] for item in page["items"]] == [bucket]
    page = raw.send("GET", f"/storage/v1/b?project=p&prefix={bucket}-&pageToken={page['nextPageToken']}").json
    assert [item["name"] for item in page["items"]] == [f"{bucket}-2"]
    assert raw.send("DELETE", f"/storage/v1/b/{bucket}-2").status == 204
    assert raw.send("POST", "/storage/v1/b?project=p", {"name": "versioned", "versioning": {"enabled": True}}).status == 501


@pytest.mark.parametrize("how", UPLOADS)
def test_a_missing_bucket(server: GcsServer, how: str):
    raw = Raw(server, "missing")
    assert make(raw, how, "name", b"data").status == 404
    assert raw.list().status == raw.get("name").status == raw.read("name").status == raw.delete("name").status == 404


@pytest.mark.parametrize(
    "request_line", ["PUT /bucket/name", "GET /bucket?list-type=2", "DELETE /storage/v1/b/bucket/o/a/b", "GET /x"]
)
def test_what_the_server_does_not_have_is_an_error(raw: Raw, request_line: str):
    assert raw.send(*request_line.split()).status == 501


def test_access_controls_count_as_metadata(raw: Raw):
    raw.media("name", b"data")
    access = {"entity": "allUsers", "role": "READER"}
    assert raw.send("POST", f"{raw.path('name')}/acl?ifMetagenerationMatch=2", access).status == 412
    assert raw.send("POST", f"{raw.path('name')}/acl", access).status == 200
    assert raw.get("name").json["metageneration"] == "2"


def test_errors_are_what_clients_expect(raw: Raw):
    error = json.loads(raw.get("missing").body)["error"]
    assert (error["code"], error["errors"][0]["domain"]) == (404, "global")
    assert f"{raw.bucket}/missing" in error["message"]
