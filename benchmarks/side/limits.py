"""What the machine itself can do with so many bytes: seconds of one copy, one write, one read."""

from __future__ import annotations

import os
import socket
import threading
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
        import jax
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
            self._fill(file.readinto)
        found["read"] = time.perf_counter() - begin
        self._path.unlink()
        begin = time.perf_counter()
        self._send()
        found["loopback"] = time.perf_counter() - begin
        if jax.default_backend() != "cpu":
            found["device to pinned host"] = self._fetch()
        return found

    def _fetch(self) -> float:
        import jax

        there = jax.block_until_ready(jax.device_put(self._source))
        place = there.sharding.with_memory_kind("pinned_host")
        jax.block_until_ready(jax.device_put(there, place))  # its memory is pinned once
        begin = time.perf_counter()
        jax.block_until_ready(jax.device_put(there, place))
        return time.perf_counter() - begin

    def _send(self) -> None:
        """All bytes over one TCP connection to this machine itself, from thread to thread."""
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
            receiver, _ = server.accept()
            with receiver:
                thread = threading.Thread(target=sender.sendall, args=(memoryview(self._source),))
                thread.start()
                self._fill(receiver.recv_into)
                thread.join()

    def _fill(self, read: Callable[[memoryview], int]) -> None:
        view, at = memoryview(self._target), 0
        while at < len(view) and (got := read(view[at : at + BLOCK_BYTES])):
            at += got

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
