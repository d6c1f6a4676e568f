"""What the machine itself can do with so many bytes: seconds of one copy, one write, one read."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK_BYTES = 16 << 20


class Limits:
    """Measures on buffers of `nbytes` and one file in `folder`."""

    def __init__(self, folder: Path, nbytes: int):
        import numpy as np

        self._path = folder / "limit"
        self._source: Any = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
        self._target: Any = np.ones(nbytes, np.uint8)

    def measure(self) -> dict[str, float]:
        """Seconds by name."""
        import numpy as np

        found = {
            "memcpy, touched": timed(lambda: np.copyto(self._target, self._source)),
            "memcpy, fresh pages": timed(self._source.copy),
            "write": timed(lambda: self._write(sync=False)),
            "write, fsync": timed(lambda: self._write(sync=True)),
            "read": timed(self._read),
        }
        self._path.unlink()
        return found

    def _read(self) -> None:
        view = memoryview(self._target)
        with self._path.open("rb", buffering=0) as file:
            for at in range(0, len(view), BLOCK_BYTES):
                file.readinto(view[at : at + BLOCK_BYTES])

    def _write(self, *, sync: bool) -> None:
        view = memoryview(self._source)
        self._path.unlink(missing_ok=True)
        with self._path.open("wb", buffering=0) as file:
            for at in range(0, len(view), BLOCK_BYTES):
                file.write(view[at : at + BLOCK_BYTES])
            if sync:
                os.fsync(file.fileno())


def timed(work: Callable[[], object]) -> float:
    """Its seconds."""
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s
