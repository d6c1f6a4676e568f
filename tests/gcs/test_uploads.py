"""Uploads are exact, whole or not there, however they are sent."""

from __future__ import annotations

import base64
import gzip

import google_crc32c
import pytest

from tests.gcs.raw import CHUNK_BYTES, UPLOADS, Raw, content, make, md5


@pytest.mark.parametrize("how", UPLOADS)
@pytest.mark.parametrize("name", ["a b+c%2F?#&=.json", "ü/☃", "folder/", "a//b", ".hidden", "a", "a/b"])
def test_names(raw: Raw, how: str, name: str):
    raw.media("a", b"a file where others see a folder")
    made = make(raw, how, name, b"data").json
    assert made["name"] == name
    assert content(raw, name) == b"data"
    assert name in raw.names()
    assert raw.delete(name).status == 204


@pytest.mark.parametrize("name", ["", ".", "..", "line\nbreak", "x" * 1025])
def test_bad_names(raw: Raw, name: str):
    assert raw.media(name, b"data").status == 400
    assert raw.multipart(name, b"data").status == 400


@pytest.mark.parametrize("how", UPLOADS)
def test_every_upload_is_described(raw: Raw, how: str):
    made = make(raw, how, "name", b"data").json
    data = raw.read("name").body
    assert made["size"] == str(len(data))
    assert made["crc32c"] == base64.b64encode(google_crc32c.value(data).to_bytes(4, "big")).decode()
    assert made["md5Hash"] == md5(data)
    assert made == raw.get("name").json == raw.list().json["items"][0]


@pytest.mark.parametrize("data", [b"", b"\r\n", b"--=b=--", b"\r\n--=b=\r\n\r\nx", bytes(range(256)) * 20])
def test_content_is_exact(raw: Raw, data: bytes):
    assert raw.multipart("multipart", data).status == 200
    assert raw.media("media", data).status == 200
    assert raw.read("multipart").body == raw.read("media").body == data


def test_lines_of_a_multipart_upload_may_end_as_those_of_gcsfs(raw: Raw):
    body = b'--=b=\nContent-Type: application/json\n\n{"name": "name"}\n--=b=\nContent-Type: text/x\n\n data\r\n--=b=--'
    made = raw.send("POST", f"{raw.uploads}?uploadType=multipart", body, Content_Type="multipart/related; boundary==b=")
    assert (made.json["contentType"], raw.read("name").body) == ("text/x", b" data\r")


def test_wrong_checksums_make_nothing(raw: Raw):
    crc32c = base64.b64encode(google_crc32c.value(b"other").to_bytes(4, "big")).decode()
    assert raw.multipart("name", b"data", {"crc32c": crc32c}).status == 400
    assert raw.multipart("name", b"data", {"md5Hash": md5(b"other")}).status == 400
    hashed = raw.send("POST", f"{raw.uploads}?uploadType=media&name=name", b"data", X_Goog_Hash=f"crc32c={crc32c}")
    assert hashed.status == 400
    started = raw.start("name", {"crc32c": crc32c})
    assert raw.chunk(started, b"data", "bytes 0-3/4").status == 400
    assert raw.get("name").status == 404
    assert raw.multipart("name", b"other", {"crc32c": crc32c}).status == 200


def test_a_gzip_object_is_unpacked_unless_wanted(raw: Raw):
    packed = gzip.compress(b"data" * 100)
    assert raw.multipart("name", packed, {"contentEncoding": "gzip"}).status == 200
    assert raw.read("name").body == b"data" * 100
    assert raw.send("GET", raw.path("name", alt="media"), Accept_Encoding="gzip").body == packed


def test_a_big_object(raw: Raw):
    data = bytes(1 << 20) + b"x" * (40 << 20)
    assert raw.media("name", data).json["size"] == str(len(data))
    assert raw.read("name").body == data
    assert raw.send("GET", raw.path("name", alt="media"), Range=f"bytes={1 << 20}-").body == data[1 << 20 :]


class TestResumable:
    def test_nothing_is_there_before_the_end(self, raw: Raw):
        started = raw.start("name")
        assert raw.get("name").status == 404
        raw.chunk(started, b" " * CHUNK_BYTES, f"bytes 0-{CHUNK_BYTES - 1}/*")
        assert raw.get("name").status == 404

    def test_to_ask_how_far_it_is_ends_nothing(self, raw: Raw):
        started = raw.start("name")
        assert raw.chunk(started, b"", "bytes */*").headers.get("Range") is None
        raw.chunk(started, b" " * CHUNK_BYTES, f"bytes 0-{CHUNK_BYTES - 1}/*")
        for question in ("bytes */*", f"bytes */{2 * CHUNK_BYTES}"):
            reply = raw.chunk(started, b"", question)
            assert (reply.status, reply.headers["Range"]) == (308, f"bytes=0-{CHUNK_BYTES - 1}")
        assert raw.get("name").status == 404
        assert raw.chunk(started, b"", f"bytes */{CHUNK_BYTES}").status == 200  # now it is the end
        assert raw.get("name").json["size"] == str(CHUNK_BYTES)

    def test_bytes_that_are_sent_again_count_once(self, raw: Raw):
        started = raw.start("name")
        first, second = b"1" * CHUNK_BYTES, b"2" * CHUNK_BYTES
        raw.chunk(started, first, f"bytes 0-{CHUNK_BYTES - 1}/*")
        raw.chunk(started, first, f"bytes 0-{CHUNK_BYTES - 1}/*")
        assert raw.chunk(started, first + second, f"bytes 0-{2 * CHUNK_BYTES - 1}/{2 * CHUNK_BYTES}").status == 200
        assert raw.read("name").body == first + second

    def test_only_whole_chunks_are_kept_before_the_end(self, raw: Raw):
        started = raw.start("name")
        reply = raw.chunk(started, b"1" * (CHUNK_BYTES + 5), f"bytes 0-{CHUNK_BYTES + 4}/*")
        assert (reply.status, reply.headers["Range"]) == (308, f"bytes=0-{CHUNK_BYTES - 1}")
        total = CHUNK_BYTES + 5
        assert raw.chunk(started, b"2" * 5, f"bytes {CHUNK_BYTES}-{total - 1}/{total}").status == 200
        assert raw.read("name").body == b"1" * CHUNK_BYTES + b"2" * 5

    def test_a_gap_is_refused(self, raw: Raw):
        assert raw.chunk(raw.start("name"), b"data", "bytes 4-7/8").status == 400
        assert raw.chunk(raw.start("name"), b"data", "bytes 0-2/3").status == 400

    def test_an_end_whose_answer_was_lost_is_told_again(self, raw: Raw):
        started = raw.start("name", ifGenerationMatch=0)
        made = raw.chunk(started, b"data", "bytes 0-3/4")
        again = raw.chunk(started, b"data", "bytes 0-3/4")
        assert (again.status, again.json) == (200, made.json)
        assert raw.chunk(started, b"", "bytes */4").json == made.json

    def test_conditions_are_checked_again_at_the_end(self, raw: Raw):
        started = raw.start("name", ifGenerationMatch=0)
        assert raw.media("name", b"first").status == 200
        assert raw.chunk(started, b"second", "bytes 0-5/6").status == 412
        assert raw.read("name").body == b"first"
        assert raw.start("name", ifGenerationMatch=0).status == 412

    def test_cancelled(self, raw: Raw):
        started = raw.start("name")
        target = started.headers["Location"].removeprefix(raw.control.url)
        assert raw.send("DELETE", target).status == 499
        assert raw.chunk(started, b"data", "bytes 0-3/4").status == 404
        assert raw.get("name").status == 404

    def test_a_client_that_cannot_take_308(self, raw: Raw):
        target = raw.start("name").headers["Location"].removeprefix(raw.control.url)
        reply = raw.send("PUT", target, b"", Content_Range="bytes */*", X_GUploader_No_308="yes")
        assert (reply.status, reply.headers["X-HTTP-Status-Code-Override"]) == (200, "308")
