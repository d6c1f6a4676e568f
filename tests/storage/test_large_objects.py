"""Whoever can put an object into a bucket must not fill the memory of those who read it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import CorruptCheckpointError, StorageError
from raystate.machine.memory import MOST_READ_BYTES
from raystate.orbax import step_files
from raystate.storage import gcs, objects, s3
from tests.storage.backends import BACKENDS, gcs_server, s3_server

BUCKETS = sorted(BACKENDS.keys() - {"directory"})
LIMIT_BYTES = 1 << 20  # instead of MOST_READ_BYTES


@pytest.mark.parametrize("name", BUCKETS)
def test_an_object_that_fills_the_memory_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for module in (objects, gcs):
        assert module.MOST_READ_BYTES == MOST_READ_BYTES
        monkeypatch.setattr(module, "MOST_READ_BYTES", LIMIT_BYTES)
    with BACKENDS[name](tmp_path) as storage:
        storage.create("much", bytes(LIMIT_BYTES + 1))
        storage.create("enough", bytes(LIMIT_BYTES))
        storage.create("nothing", b"")
        assert (len(storage.read("enough")), storage.read("nothing")) == (LIMIT_BYTES, b"")
        with pytest.raises(
            StorageError, match=r"much failed: it is too large; an object that is read whole has at most 1,048,576 bytes"
        ) as caught:
            storage.read("much")
        assert caught.value.operation == "read"


@pytest.mark.parametrize("name", [name for name in BUCKETS if name != "memory"])
def test_the_limit_costs_no_request(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with BACKENDS[name](tmp_path) as storage:
        storage.create("some", b"bytes")
        if name == "gcs":
            server = gcs_server()
            server.reset_counts()
            assert storage.read("some") == b"bytes"
            assert server.counts().kinds == {"get_media": 1}
            return
        with caplog.at_level(logging.INFO, logger="werkzeug"):
            assert storage.read("some") == b"bytes"
        [line] = [line for line in caplog.messages if "/run/some" in line]
        assert "GET" in line


def test_s3_refuses_a_range_of_an_object_without_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Amazon's does; moto's server does not."""

    class InvalidRangeError(Exception):
        def __init__(self) -> None:
            super().__init__("InvalidRange")
            self.response = {"Error": {"Code": "InvalidRange"}, "ResponseMetadata": {"HTTPStatusCode": 416}}

    def refuse(*_args: Any, **_more: Any) -> bytes:
        raise OSError("The requested range is not satisfiable") from InvalidRangeError()

    with BACKENDS["s3"](tmp_path) as storage:
        storage.create("nothing", b"")
        monkeypatch.setattr(s3._file_system(s3_server().url), "cat_file", refuse)
        assert storage.read("nothing") == b""


@pytest.mark.parametrize("name", [name for name in BUCKETS if name != "memory"])
def test_a_step_of_other_peoples_whose_manifest_fills_the_memory(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """TensorStore reads it; what we read ourselves is refused above."""
    file = "state/manifest.ocdbt"
    written = tmp_path / "3"
    raystate.save(written, {"w": np.arange(4.0)})
    for module in (objects, gcs, step_files):
        monkeypatch.setattr(module, "MOST_READ_BYTES", LIMIT_BYTES)
    with BACKENDS[name](tmp_path / "storage") as storage:
        for path in written.rglob("*"):
            inside = path.relative_to(written).as_posix()
            if path.is_file():
                storage.create(f"3/{inside}", bytes(LIMIT_BYTES + 1) if inside == file else path.read_bytes())
                storage.create(f"4/{inside}", path.read_bytes())
        with pytest.raises(CorruptCheckpointError, match=f"{file} has 1,048,577 bytes, at most 1,048,576 are read"):
            raystate.load(f"{storage.url}/3")
        assert np.array_equal(raystate.load(f"{storage.url}/4")["w"], np.arange(4.0))
