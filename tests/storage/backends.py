"""The backends that the contract runs against, and a small step to publish."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from raystate.core.formats.entries import LogEntry
from raystate.core.formats.log import claim_entry, live_steps
from raystate.core.formats.tree import DataObject, Package
from raystate.machine.checksum import crc32c
from raystate.storage import RunLog, Storage, foreign_steps, open_storage
from raystate.testing.gcs import GcsServer

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


class S3Server:
    """moto, as a server on a free port of this machine, with one bucket. Ended with the process."""

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)  # else a line for each request
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        self._server.start()
        host, port = self._server.get_host_and_port()
        self.url = f"http://{host}:{port}"

    def environment(self) -> dict[str, str]:
        """For whoever is to use it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def close(self) -> None:
        self._server.stop()


@functools.cache
def s3_server() -> S3Server:
    """One for the process; it ends with it."""
    import fsspec

    server = S3Server()
    atexit.register(server.close)
    with mock.patch.dict(os.environ, server.environment()):
        fsspec.filesystem("s3", endpoint_url=server.url, skip_instance_cache=True).mkdir("contract")
    return server


@contextlib.contextmanager
def s3_backend(_tmp_path: Path) -> Iterator[Storage]:
    with mock.patch.dict(os.environ, s3_server().environment()):
        storage = open_storage(f"s3://contract/{secrets.token_hex(6)}/run", timeout_s=5.0)
        yield storage
        for info in storage.list():
            storage.delete(info.name)


# A backend is a context manager that makes an empty storage. Add one here and every test of the contract runs against it.
BACKENDS: dict[str, Callable[[Path], contextlib.AbstractContextManager[Storage]]] = {
    "directory": directory_backend,
    "gcs": gcs_backend,
    "memory": memory_backend,
    "s3": s3_backend,
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


def claim(storage: Storage) -> LogEntry:
    """As a Coordinator that starts, and as `raystate import`."""
    return RunLog(storage).claim(lambda tail: claim_entry(tail, "w", "lm", foreign_steps(storage, live_steps(tail))))
