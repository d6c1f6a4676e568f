"""What is S3's own: conditional requests that a store may lack, a bucket that is not there, a checkpoint in it."""

from __future__ import annotations

import functools
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import StorageError
from raystate.storage import Storage, open_storage, s3
from tests.storage.backends import s3_backend, s3_server


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    with s3_backend(tmp_path) as storage:
        yield storage


def test_a_checkpoint_there_and_back(storage: Storage):
    """Through s3fs and TensorStore's own S3 driver."""
    tree = {"w": jnp.arange(12.0).reshape(3, 4), "n": 7, "name": "größer"}
    raystate.save(f"{storage.url}/one", tree)
    got = raystate.load(f"{storage.url}/one")
    assert (got["n"], got["name"]) == (7, "größer") and np.array_equal(got["w"], tree["w"])
    with pytest.raises(StorageError, match="overwrite=True"):
        raystate.save(f"{storage.url}/one", tree)
    assert raystate.Reader(f"{storage.url}/one").all_steps() == [0]


def test_a_store_that_ignores_conditions_is_refused(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    fs: Any = s3._file_system(s3_server().url)
    plain = fs.pipe_file
    monkeypatch.setattr(fs, "pipe_file", lambda path, data, mode: plain(path, data))
    with pytest.raises(StorageError, match="a second exclusive create of one name succeeded"):
        storage.self_test()


def test_an_object_of_equal_bytes_in_its_place_is_another_one(storage: Storage):
    """Two saves of stock Orbax have equal markers; a reader of the first must see that the second has taken its place."""
    storage.create("marker", b"done")
    first = storage.stat("marker")
    assert storage.generation("marker") == first.generation
    deadline_s = time.monotonic() + 60
    while storage.generation("marker") == first.generation:  # the store's clock has seconds
        assert time.monotonic() < deadline_s
        storage.delete("marker")
        storage.create("marker", b"done")
    [listed] = storage.list()
    assert storage.delete("marker", listed.generation)


def test_a_missing_bucket(storage: Storage):
    missing = open_storage(f"s3://missing-{secrets.token_hex(4)}/run", timeout_s=5.0)
    for operation in (missing.list, functools.partial(missing.create, "a", b"b"), missing.self_test):
        with pytest.raises(StorageError, match="no such bucket"):
            operation()


def test_credentials_that_are_missing(storage: Storage, tmp_path: Path):
    url = f"{s3_server().url}/"  # another spelling of the endpoint: a client of its own
    away = {
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "none"),
        "AWS_CONFIG_FILE": str(tmp_path / "none"),
        "AWS_ENDPOINT_URL": url,
    }
    with mock.patch.dict(os.environ, away):
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            os.environ.pop(name)
        with pytest.raises(StorageError, match="credentials"):
            open_storage(storage.url, timeout_s=2.0).read("a")
