"""fsspec's memory file system looks for a name and stores it in two steps; the backend makes them one."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raystate.storage import ObjectExistsError
from tests.patience import PATIENCE_S
from tests.storage.backends import memory_backend


def test_two_creators_cannot_both_find_the_name_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    both_looked = threading.Barrier(2)
    real = MemoryFileSystem.exists

    def exists(self: MemoryFileSystem, path: str) -> bool:
        found = real(self, path)
        # Both meet here if nothing keeps them apart; else the first waits in vain and goes on.
        with contextlib.suppress(threading.BrokenBarrierError):
            both_looked.wait(timeout=0.2)
        return found

    outcomes: list[str] = []
    with memory_backend(tmp_path) as storage:
        monkeypatch.setattr(MemoryFileSystem, "exists", exists)

        def create(data: bytes) -> None:
            try:
                storage.create("name", data)
            except ObjectExistsError:
                outcomes.append("exists")
            else:
                outcomes.append("created")

        threads = [threading.Thread(target=create, args=(data,)) for data in (b"1", b"2")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=PATIENCE_S)
    assert sorted(outcomes) == ["created", "exists"]
