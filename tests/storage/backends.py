"""The backends that the contract runs against, and a small step to publish."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import platform
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from raystate.checksum import crc32c
from raystate.core.tree import DataObject, Package
from raystate.storage import Storage, open_storage
from raystate.testing.gcs import GcsServer

# The wheel of fake-gcs-server is for Linux on x86-64.
GCS_SERVER_RUNS = (sys.platform, platform.machine()) == ("linux", "x86_64")

STEP, SAVE = 1200, "a7k1"
WRITERS = (f"{SAVE}h0", f"{SAVE}h1")


@contextlib.contextmanager
def directory_backend(tmp_path: Path) -> Iterator[Storage]:
    yield open_storage(tmp_path / secrets.token_hex(4) / "run", timeout_s=2.0)


@contextlib.contextmanager
def memory_backend(_tmp_path: Path) -> Iterator[Storage]:
    storage = open_storage(f"memory://{secrets.token_hex(6)}/run", timeout_s=2.0)
    yield storage
    for info in storage.list():
        storage.delete(info.name)


@functools.cache
def gcs_server() -> GcsServer:
    """One for the process; it ends with it."""
    server = GcsServer(buckets=["contract"])
    server.start()
    atexit.register(server.close)
    return server


@contextlib.contextmanager
def gcs_backend(_tmp_path: Path) -> Iterator[Storage]:
    server = gcs_server()
    with mock.patch.dict(os.environ, server.environment()):
        yield open_storage(f"gs://contract/{secrets.token_hex(6)}/run", timeout_s=5.0)
    server.clear()


# A backend is a context manager that makes an empty storage. Add one here and every test of the contract runs against it.
BACKENDS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Storage]]] = {
    "directory": directory_backend,
    **({"gcs": gcs_backend} if GCS_SERVER_RUNS else {}),
    "memory": memory_backend,
}


def a_package(step: int = STEP, save: str = SAVE, *, seed: int = 0) -> tuple[Package, dict[str, bytes]]:
    """A package and the bytes of its data objects, by name relative to the step."""
    data = {f"state/ocdbt.process_{save}h{host}/d/{part}": bytes([seed, host, part]) * 40 for host in range(2) for part in range(2)}
    package = Package(
        step=step,
        save=save,
        run="lm",
        files={
            "_CHECKPOINT_METADATA": b"{}",
            "commit_success.txt": f"step {save}".encode(),
            "state/_METADATA": b'{"tree": %d}' % seed,
            "state/manifest.ocdbt": f"manifest of {save}".encode(),
            "state/commit_success.txt": b"item",
            "metrics/metrics": b'{"loss": 1.5}',
        },
        objects=tuple(
            DataObject(name=name, size=len(part), crc32c=crc32c(part), writer=f"{save}h0") for name, part in data.items()
        ),
    )
    return package, data


def step_tree(package: Package, data: dict[str, bytes]) -> dict[str, bytes]:
    """What a published step consists of."""
    return {f"{package.step}/{name}": part for name, part in {**package.files, **data}.items()}
