"""A stand-in for NVIDIA's driver (standin.c), built by the C compiler and loaded in place of libcuda.so.1."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raystate.arrays import gpu, ways
from raystate.arrays.gpus import Gpus
from raystate.arrays.spare import Spare
from raystate.machine import cuda

INIT, REGISTER, UNREGISTER, OFF, ONTO, SYNC, EVENT, WAIT, OTHER = range(9)
COPY_BYTES = 1 << 20  # of the real 64 MiB
PIECE_BYTES = 1 << 20  # of the real 256


class StandIn:
    """What the library has been told, and may be told."""

    def __init__(self, path: Path):
        self.path = path
        self._library = ctypes.CDLL(str(path))
        self._library.fake_reset.argtypes = [ctypes.c_double]
        for name in ("fake_calls", "fake_unregistered", "fake_registered"):
            getattr(self._library, name).restype = ctypes.c_long
        self._library.fake_fail.argtypes = [ctypes.c_long] * 4
        self._library.fake_most_registered.argtypes = [ctypes.c_long]

    def reset(self, gigabytes_per_s: float = 0.0) -> None:
        self._library.fake_reset(gigabytes_per_s)

    def fail(self, *kinds: int, after: int = 0, times: int = 1, status: int = 999) -> None:
        """After so many calls of these kinds (none: of any), so many fail."""
        self._library.fake_fail(sum(1 << kind for kind in kinds or range(OTHER + 1)), after, times, status)

    def let_register(self, nbytes: int) -> None:
        """At most so many, in all."""
        self._library.fake_most_registered(nbytes)

    def hold(self, on: bool) -> None:
        """No queued copy goes on meanwhile."""
        self._library.fake_hold(on)

    def calls(self, kind: int) -> int:
        return self._library.fake_calls(kind)

    @property
    def all_calls(self) -> int:
        return sum(map(self.calls, range(OTHER + 1)))

    @property
    def contexts(self) -> int:
        """That the calling thread has turned to and not yet from."""
        return self._library.fake_contexts()

    @property
    def unregistered_copies(self) -> int:
        return self._library.fake_unregistered()

    @property
    def registered_bytes(self) -> int:
        return self._library.fake_registered()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    path = tmp_path_factory.mktemp("cuda") / "libcuda.so"
    source = Path(__file__).with_name("standin.c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", path, source], check=True, timeout=120)
    return StandIn(path)


@pytest.fixture
def standin(built: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """As fast as memory; small pieces, so that small arrays have several."""
    monkeypatch.setattr(cuda, "_library", str(built.path))
    monkeypatch.setattr(cuda, "COPY_BYTES", COPY_BYTES)
    monkeypatch.setattr(cuda, "PIECE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(cuda, "LEAST_PIECE_BYTES", PIECE_BYTES // 4)
    cuda._load.cache_clear()
    built.reset()
    yield built
    built.reset()
    cuda._load.cache_clear()


@pytest.fixture
def gpus(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpus]:
    """JAX's CPU devices count as GPUs, whose memory the stand-in copies."""
    made = Gpus()
    monkeypatch.setattr(gpu, "GPUS", made)
    monkeypatch.setattr(gpu, "is_cuda", _is_cuda)
    monkeypatch.setattr(ways, "is_cuda", _is_cuda)
    monkeypatch.setattr(Spare, "takes", lambda *_: False)
    gpu._is_ours.cache_clear()
    yield made
    gpu._is_ours.cache_clear()


def _is_cuda(device: Any) -> bool:
    return device.platform == "cpu"
