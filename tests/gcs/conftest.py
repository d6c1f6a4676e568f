"""One server per process of the test run; each test has a bucket of its own and a server without faults."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from raystate.testing.gcs import GcsServer
from tests.gcs.raw import Raw

_FIRST = ("test_server.py", "test_uploads.py", "test_lists.py")
_buckets = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whether the server is strict comes first: nothing else means anything if it isn't."""
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ours = sorted((items[place] for place in places), key=lambda item: item.path.name not in _FIRST)
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def shared_server() -> Iterator[GcsServer]:
    with GcsServer() as server:
        yield server


@pytest.fixture
def server(shared_server: GcsServer) -> Iterator[GcsServer]:
    """The shared server; whatever the test sets is undone."""
    shared_server.reset_counts()
    yield shared_server
    shared_server.clear()
    shared_server.set_strict(True)
    shared_server.limit_writes(None)


@pytest.fixture
def bucket(server: GcsServer) -> Iterator[str]:
    """A fresh, empty bucket."""
    name = f"bucket-{next(_buckets)}"
    server.create_bucket(name)
    yield name
    server.delete_bucket(name)


@pytest.fixture
def raw(server: GcsServer, bucket: str) -> Raw:
    return Raw(server, bucket)


@pytest.fixture
def environment(server: GcsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that are made in this test use the server."""
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
