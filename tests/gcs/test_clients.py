"""The libraries that people use on Cloud Storage find here what they find there."""

from __future__ import annotations

import os
from typing import Any

import gcsfs
import numpy as np
import pytest
import tensorstore as ts
from google.api_core.exceptions import NotFound, PreconditionFailed
from google.cloud import storage

from raystate.testing.gcs import GcsServer
from tests.gcs.raw import Raw, at_once

pytestmark = pytest.mark.usefixtures("environment")

# ------------------------------------------------------------ google-cloud-storage


@pytest.fixture
def cloud_bucket(bucket: str) -> Any:
    return storage.Client().bucket(bucket)


@pytest.mark.parametrize("chunk_size", [None, 256 * 1024], ids=["multipart", "resumable"])
def test_google_conditional_upload(cloud_bucket: Any, chunk_size: int | None):
    blob = cloud_bucket.blob("name", chunk_size=chunk_size)
    data = os.urandom(600_000)
    blob.upload_from_string(data, if_generation_match=0)
    with pytest.raises(PreconditionFailed):
        cloud_bucket.blob("name", chunk_size=chunk_size).upload_from_string(b"other", if_generation_match=0)
    assert cloud_bucket.blob("name").download_as_bytes(if_generation_match=blob.generation) == data
    generation = blob.generation
    blob.upload_from_string(b"new", if_generation_match=generation)
    assert blob.generation > generation
    with pytest.raises(NotFound):
        cloud_bucket.blob("name", generation=generation).download_as_bytes()


def test_google_rewrite_and_compose(cloud_bucket: Any):
    source = cloud_bucket.blob("source")
    source.upload_from_string(b"data")
    copy = cloud_bucket.blob("copy")
    assert copy.rewrite(source, if_generation_match=0)[0] is None
    with pytest.raises(PreconditionFailed):
        copy.rewrite(source, if_generation_match=0)
    cloud_bucket.blob("both").compose([source, copy], if_generation_match=0)
    assert cloud_bucket.blob("both").download_as_bytes() == b"datadata"


def test_a_download_of_what_was_listed_is_seen_by_the_server(cloud_bucket: Any, server: GcsServer):
    cloud_bucket.blob("name").upload_from_string(b"data")
    (listed,) = cloud_bucket.list_blobs()
    server.reset_counts()
    assert listed.download_as_bytes() == b"data"
    assert server.counts().kinds == {"get_media": 1}


# ------------------------------------------------------------ gcsfs


@pytest.fixture
def files() -> Any:
    return gcsfs.GCSFileSystem(token="anon", skip_instance_cache=True, use_listings_cache=False)


def test_gcsfs_create_is_once(files: Any, bucket: str):
    files.pipe_file(f"{bucket}/a/name", b"first", mode="create")
    with pytest.raises(FileExistsError):
        files.pipe_file(f"{bucket}/a/name", b"second", mode="create")
    data = os.urandom(7 << 20)  # in chunks
    with files.open(f"{bucket}/big", "xb", block_size=5 << 20) as file:
        file.write(data)
    with pytest.raises(FileExistsError), files.open(f"{bucket}/big", "xb", block_size=5 << 20) as file:
        file.write(b"x" * (7 << 20))
    assert files.cat_file(f"{bucket}/a/name") == b"first"
    assert files.cat_file(f"{bucket}/big") == data
    assert files.cat_file(f"{bucket}/big", start=100, end=200) == data[100:200]


# ------------------------------------------------------------ tensorstore


def kvstore(bucket: str, path: str = "") -> Any:
    return ts.KvStore.open({"driver": "gcs", "bucket": bucket, "path": path}, context=ts.Context()).result()


def test_tensorstore_conditional_write(bucket: str):
    store = kvstore(bucket)
    absent = ts.KvStore.ReadResult(state="missing").stamp.generation
    made = store.write("name", b"first").result()
    again = store.write("name", b"second", if_equal=made.generation).result()
    assert again.generation != made.generation
    lost = store.write("name", b"third", if_equal=made.generation).result()
    assert (lost.generation, store.read("name").result().value) == (absent, b"second")
    store.delete_range(ts.KvStore.KeyRange("n", "o")).result()
    assert store.list().result() == []
    assert store.read("name").result().state == "missing"


def test_tensorstore_reads_the_environment_when_a_store_is_opened(bucket: str, server: GcsServer, monkeypatch: pytest.MonkeyPatch):
    store = kvstore(bucket)
    monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", "http://127.0.0.1:9")
    store.write("name", b"data").result()
    assert Raw(server, bucket).names() == ["name"]


def test_four_writers_lose_nothing_in_one_database(bucket: str):
    """OCDBT commits by compare-and-swap of its manifest: a server that lets two win loses arrays without an error."""
    arrays = 4

    def spec(writer: int, number: int) -> dict[str, Any]:
        base = {"driver": "gcs", "bucket": bucket, "path": "database/"}
        return {"driver": "zarr3", "kvstore": {"driver": "ocdbt", "base": base, "path": f"array{writer}.{number}/"}}

    def write(writer: int) -> None:
        context = ts.Context()
        for number in range(arrays):
            array = ts.open(spec(writer, number), create=True, dtype=ts.int32, shape=[100], context=context).result()
            array.write(np.full(100, writer * 10 + number, np.int32)).result()

    at_once(4, write)
    context = ts.Context()
    for writer in range(4):
        for number in range(arrays):
            found = ts.open(spec(writer, number), context=context).result().read().result()
            assert np.array_equal(found, np.full(100, writer * 10 + number))
