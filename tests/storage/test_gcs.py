"""A bucket that fails: what is said, and that nothing waits without end."""

from __future__ import annotations

import gc
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import StorageError
from raystate.storage import ObjectExistsError, ObjectMissingError, Storage, gcs, open_storage
from raystate.testing.gcs import FaultRule, GcsServer
from tests.storage.backends import gcs_backend, gcs_server

OPERATIONS: dict[str, Callable[[Storage], object]] = {
    "create": lambda storage: storage.create("new", b"data"),
    "read": lambda storage: storage.read("there"),
    "stat": lambda storage: storage.stat("there"),
    "list": lambda storage: storage.list(),
    "delete": lambda storage: storage.delete("there"),
    "copy": lambda storage: storage.copy("there", "copy"),
}


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Storage]:
    with gcs_backend(tmp_path) as storage:
        storage.create("there", b"bytes")
        yield storage


@pytest.fixture
def server() -> GcsServer:
    return gcs_server()


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("status", "hint"), [(401, "the credentials are not valid"), (403, "it needs roles/storage.objectAdmin"), (400, "400 ")]
)
def test_a_refusal_is_final_and_says_what_to_do(storage: Storage, server: GcsServer, operation: str, status: int, hint: str):
    server.faults([FaultRule(status=status)])
    with pytest.raises(StorageError) as caught:
        OPERATIONS[operation](storage)
    assert caught.value.operation == operation
    assert f"{operation} {storage.url}/" in caught.value.message
    assert hint in caught.value.message
    assert f"{status} " in caught.value.message or status == 401  # credentials that can't be refreshed: the library says so itself
    assert server.hits() == [1], "asked once"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_machine_without_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str):
    for name in ("STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # else the library looks for a metadata server
    with pytest.raises(StorageError, match=r"no credentials of Google Cloud .*`gcloud auth") as caught:
        OPERATIONS[operation](open_storage("gs://bucket/run"))
    assert "gs://bucket/run" in caught.value.message


@pytest.mark.parametrize("operation", ["create", "list"])
def test_a_missing_bucket(server: GcsServer, operation: str):
    with mock.patch.dict(os.environ, server.environment()):
        storage = open_storage(f"gs://missing-{secrets.token_hex(4)}/run", timeout_s=5.0)
        with pytest.raises(StorageError, match="there is no such bucket") as caught:
            OPERATIONS[operation](storage)
    assert not isinstance(caught.value, ObjectMissingError)


def test_a_garbage_collection_that_imports_while_the_client_is_made(storage: Storage):
    """As of JAX and Orbax: the first look into a bucket failed with "dictionary changed size during iteration"."""
    made: list[str] = []

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            made.append(f"tests.made_up_{len(made)}")
            sys.modules[made[-1]] = gc
            if len(made) < 10_000:
                Garbage()

    thresholds = gc.get_threshold()
    assert storage.stat("there") is not None, "the library is imported"
    try:
        gc.collect()  # no tuple is left over to be used again: each new one may begin a collection
        gc.set_threshold(1)
        Garbage()
        gcs._client.__wrapped__(None)
    finally:
        gc.set_threshold(*thresholds)
        for name in made:
            del sys.modules[name]
    assert made, "nothing was collected"


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_what_passes_is_asked_again(storage: Storage, server: GcsServer, operation: str, status: int):
    server.faults([FaultRule(status=status, times=2)])
    OPERATIONS[operation](storage)
    assert server.hits() == [2]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", ["reset", "truncate", "stall"])
def test_broken_connections(storage: Storage, server: GcsServer, monkeypatch: pytest.MonkeyPatch, operation: str, mode: str):
    monkeypatch.setattr(gcs, "ASKED_AGAIN_S", 0.3)
    server.faults([FaultRule.model_validate({"mode": mode, "times": 1})])
    try:
        OPERATIONS[operation](storage)
    except ObjectExistsError:
        assert (operation, mode) == ("create", "truncate"), "half an answer is no answer: it may have worked"
    assert server.hits() == [1]


def test_a_lost_acknowledgement_is_read_back(storage: Storage, server: GcsServer):
    server.faults([FaultRule(mode="reset_after_commit", kinds=("upload",), times=1)])
    storage.create_or_same("new", b"data")
    server.faults([FaultRule(mode="reset_after_commit", kinds=("upload",), times=1)])
    with pytest.raises(ObjectExistsError):
        storage.create("newer", b"data")
    assert storage.read("newer") == b"data"


def test_a_download_that_comes_changed_is_asked_again_until_the_deadline(storage: Storage, server: GcsServer):
    server.faults([FaultRule(mode="corrupt", times=2)])
    assert storage.read("there") == b"bytes"
    assert server.hits() == [2]
    server.faults([FaultRule(mode="corrupt")])
    with pytest.raises(StorageError, match=r"read .*/there failed: .*[Cc]hecksum.*\(tried for 0 s\)") as caught:
        open_storage(storage.url, timeout_s=0.5).read("there")
    assert caught.value.path == f"{storage.url}/there"


def test_an_error_answer_that_breaks_off_is_asked_again(storage: Storage, server: GcsServer):
    server.faults([FaultRule(mode="truncate", times=2)])
    assert storage.find("not there") is None
    assert server.hits() == [2]


@pytest.mark.parametrize("operation", ["read", "stat", "list"])
def test_a_failed_precondition_of_what_sets_none_is_told_as_such(storage: Storage, server: GcsServer, operation: str):
    server.faults([FaultRule(status=412)])
    with pytest.raises(StorageError, match=f"{operation} .* failed: 412 ") as caught:
        OPERATIONS[operation](storage)
    assert not isinstance(caught.value, ObjectExistsError)


def test_a_server_that_leaves_out_a_size_of_zero(storage: Storage):
    found = mock.Mock(
        size=None, crc32c=None, md5_hash=None, generation=7, spec=["size", "crc32c", "md5_hash", "generation", "reload"]
    )
    with mock.patch.object(gcs.GcsStorage, "_blob", return_value=found):
        assert storage.stat("there").size == 0


def test_after_a_lost_answer_the_error_is_that_of_reading_back(storage: Storage, server: GcsServer):
    lost = FaultRule(mode="reset_after_commit", kinds=("upload",), times=1)
    server.faults([lost, FaultRule(status=403, kinds=("get_media",))])
    with pytest.raises(StorageError, match=r"read .*/new failed: 403 ") as caught:
        storage.create_or_same("new", b"data")
    assert not isinstance(caught.value, ObjectExistsError)


@pytest.mark.parametrize(
    ("kinds", "says"), [(("delete", "batch"), "is still there, whole"), (("upload",), "could not be put back")]
)
def test_a_replacement_that_is_refused_says_what_is_there(storage: Storage, server: GcsServer, kinds: tuple[str, ...], says: str):
    path = f"{storage.url}/one"
    raystate.save(path, {"w": np.ones(2)})
    server.faults([FaultRule.model_validate({"status": 403, "kinds": kinds, "match": "METADATA|commit_success"})])
    with pytest.raises(StorageError, match=f"403 .*{says}: save again"):
        raystate.save(path, {"w": np.zeros(2)}, overwrite=True)
    server.clear()
    assert storage.exists("one/commit_success.txt") == ("whole" in says)


@pytest.mark.parametrize("refused", ["state/commit_success", "_CHECKPOINT_METADATA"])
def test_an_unfinished_save_is_replaced_as_soon_as_storage_lets_it(storage: Storage, server: GcsServer, refused: str):
    path = f"{storage.url}/one"
    raystate.save(path, {"w": np.ones(2)})
    server.faults([FaultRule(status=403, kinds=("upload",), match="_CHECKPOINT_METADATA")])
    with pytest.raises(StorageError, match="was being replaced, and it could not be put back: save again"):
        raystate.save(path, {"w": np.zeros(2)}, overwrite=True)
    server.faults([FaultRule(status=403, kinds=("upload",), match=refused)])
    with pytest.raises(StorageError, match=r"403 ") as caught:
        raystate.save(path, {"w": np.zeros(2)}, overwrite=True)
    assert "whole" not in str(caught.value), "an unfinished save is none"
    server.clear()
    raystate.save(path, {"w": np.zeros(2)}, overwrite=True)
    assert not raystate.load(path)["w"].any()


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_outage_ends_at_the_deadline(server: GcsServer, operation: str):
    with mock.patch.dict(os.environ, server.environment()):
        storage = open_storage(f"gs://contract/{secrets.token_hex(6)}", timeout_s=0.5)
        storage.create("there", b"bytes")
        with server.outage(503), pytest.raises(StorageError, match=r"503 .*\(tried for 0 s\)") as caught:
            OPERATIONS[operation](storage)
        assert caught.value.operation == operation


def test_no_server_at_all(storage: Storage, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match=r"read .*there failed: ConnectionError"):
        open_storage(storage.url, timeout_s=0.5).read("there")


def test_many_objects_go_in_batches_and_one_that_cannot_go_keeps_no_other(storage: Storage, server: GcsServer):
    for number in range(130):
        storage.create(f"many/{number:03d}", b"")
    found = storage.list("many")
    storage.delete(found[7].name)
    storage.create(found[7].name, b"another object now")
    server.reset_counts()
    with pytest.raises(StorageError, match="many/007 refused: it is another object now"):
        storage.delete_all(found)
    assert [info.name for info in storage.list("many")] == [found[7].name]
    assert server.counts().kinds["batch"] == 2
