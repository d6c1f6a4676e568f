"""Where histories are played: fresh, empty storages of each backend, many of them and fast."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raystate.storage.log
from raystate.core.formats import entries
from raystate.storage import Storage, open_storage
from raystate.testing.gcs import GcsServer

ALL = os.environ.get("RAYSTATE_ALL") == "1"
SEED = int(os.environ["RAYSTATE_SEED"])
BACKENDS = ("directory", "memory", "gcs")

ENTRY_BYTES = 300  # so that most log entries of these small histories need a new base

Fresh = Callable[[], Storage]


@contextlib.contextmanager
def stage(backend: str, *, strict: bool = True, entry_bytes: int = ENTRY_BYTES) -> Iterator[Fresh]:
    """A maker of empty storages, each gone when the next one is made.

    Args:
        backend: "directory" (in shared memory where there is any), "memory" (fsspec's), or "gcs" (the local server).
        strict: False: the local server ignores preconditions.
        entry_bytes: of a log entry, at most.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raystate.storage.log, "_wait_after_failure", lambda state: 0.0)  # nobody waits here
        patch.setattr(entries, "ENTRY_BYTES", entry_bytes)
        with {"directory": _directories, "memory": _memories, "gcs": lambda: _buckets(patch, strict=strict)}[backend]() as fresh:
            yield fresh


@contextlib.contextmanager
def _directories() -> Iterator[Fresh]:
    where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with contextlib.ExitStack() as stack:

        def fresh() -> Storage:
            stack.close()
            return open_storage(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="stage-", dir=where))) / "run")

        yield fresh
        stack.close()


@contextlib.contextmanager
def _memories() -> Iterator[Fresh]:
    from fsspec.implementations.memory import MemoryFileSystem

    made: list[str] = []

    def clear() -> None:
        for name in made:
            MemoryFileSystem().rm(f"/{name}", recursive=True)
        made.clear()

    def fresh() -> Storage:
        clear()
        made.append(f"stage-{secrets.token_hex(4)}")
        storage = open_storage(f"memory://{made[-1]}/run")
        storage.create("placeholder", b"")  # so that there is something to clear
        storage.delete("placeholder")
        return storage

    yield fresh
    clear()


@contextlib.contextmanager
def _buckets(patch: pytest.MonkeyPatch, *, strict: bool) -> Iterator[Fresh]:
    numbers = itertools.count()
    with GcsServer(strict=strict) as server:
        for name, value in server.environment().items():
            patch.setenv(name, value)

        def fresh() -> Storage:
            number = next(numbers)
            server.delete_bucket(f"stage-{number - 1}")
            server.create_bucket(f"stage-{number}")
            return open_storage(f"gs://stage-{number}/run", timeout_s=10.0)

        yield fresh
