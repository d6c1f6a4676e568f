"""What the machine itself can do with so many bytes: seconds of one copy, one write, one read."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

BLOCK_BYTES = 16 << 20


class Limits:
    """Measures on buffers of `nbytes` and one file in `folder`. Each method of `names` gives seconds."""

    names = ("memcpy, touched", "memcpy, fresh pages", "write", "write, fsync", "read")

    def __init__(self, folder: Path, nbytes: int):
        import numpy as np

        self._path = folder / "limit"
        self._source: Any = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self._target: Any = np.ones(nbytes, np.uint8)

    def measure(self) -> dict[str, float]:
        """Seconds by name."""
        import numpy as np

        found: dict[str, float] = {}
        begin = time.perf_counter()
        np.copyto(self._target, self._source)
        found["memcpy, touched"] = time.perf_counter() - begin
        begin = time.perf_counter()
        fresh = self._source.copy()
        found["memcpy, fresh pages"] = time.perf_counter() - begin
        del fresh
        found["write"] = self._write(sync=False)
        found["write, fsync"] = self._write(sync=True)
        begin = time.perf_counter()
        with self._path.open("rb", buffering=0) as file:
            view, at = memoryview(self._target), 0
            while got := file.readinto(view[at : at + BLOCK_BYTES]):
                at += got
        found["read"] = time.perf_counter() - begin
        self._path.unlink()
        return found

    def _write(self, *, sync: bool) -> float:
        self._path.unlink(missing_ok=True)
        begin = time.perf_counter()
        with self._path.open("wb", buffering=0) as file:
            view = memoryview(self._source)
            for at in range(0, len(view), BLOCK_BYTES):
                file.write(view[at : at + BLOCK_BYTES])
            if sync:
                os.fsync(file.fileno())
        return time.perf_counter() - begin
