"""This process counts its requests to storage."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import StorageError
from raystate.machine.counts import DELETE, FAILURES, LIST, READ, RETRIES, WRITE, counts
from raystate.observe.counted import process_counts
from raystate.storage import ObjectMissingError, open_storage
from raystate.testing.gcs import GcsServer

pytestmark = pytest.mark.usefixtures("environment")


@pytest.fixture
def more() -> Callable[[], tuple[float, ...]]:
    """(requests, retries, failures) since this was asked last."""
    before = dict(process_counts())

    def since() -> tuple[float, ...]:
        nonlocal before
        now, old = dict(process_counts()), before
        before = now
        news = {name: now.get(name, 0) - old.get(name, 0) for name in now}
        requests = sum(news.get(name, 0) for name in (READ, WRITE, LIST, DELETE))
        return requests, news.get(RETRIES, 0), news.get(FAILURES, 0)

    return since


def test_requests_retries_and_failures(
    server: GcsServer, bucket: str, more: Callable[[], tuple[float, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[str] = []
    storage = open_storage(f"gs://{bucket}/run", timeout_s=5.0)
    storage.create("a", b"1")
    assert more() == (1, 0, 0)
    server.faults([{"status": 503, "kinds": ["upload"], "times": 2}])
    with monkeypatch.context() as patch:
        patch.setattr(counts, "worked", lambda _: errors.append(counts.storage_error))
        storage.create("b", b"2")
    assert more() == (1, 2, 0)
    assert len(errors) == 1 and errors[0].startswith("503 "), "while it is tried again"
    storage.create("d", b"4")
    assert counts.storage_error == ""
    assert more() == (1, 0, 0)
    with pytest.raises(ObjectMissingError):  # an answer like others
        storage.read("c")
    assert more() == (1, 0, 0)
    server.faults([{"status": 403, "kinds": ["get_media"]}])
    with pytest.raises(StorageError):
        storage.read("a")
    assert more() == (1, 0, 1)


def test_what_tensorstore_does_counts_too(server: GcsServer, bucket: str, more: Callable[[], tuple[float, ...]]) -> None:
    before = dict(process_counts())
    raystate.save(f"gs://{bucket}/one", {"w": np.arange(100_000.0)})
    raystate.load(f"gs://{bucket}/one")
    after = dict(process_counts())
    for name in ("written_bytes", "read_bytes/storage"):
        assert after[name] - before.get(name, 0) > 10_000, name
    assert more()[0] > 10
