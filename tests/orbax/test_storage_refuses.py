"""Storage that refuses to be read says nothing of a step: only bytes that were read and don't match, or are not there, are damage."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import raystate
from raystate.core.formats.errors import CorruptCheckpointError, StorageError
from raystate.core.formats.tree import DataObject, Package
from raystate.orbax import kv
from raystate.orbax.step_reader import StepReader
from raystate.storage import Storage, open_storage
from raystate.testing.gcs import FaultRule, GcsServer
from tests.processes import run_python
from tests.storage.backends import gcs_backend, gcs_server

WHOLE = np.arange(100_000, dtype=np.float32)

# All that a server can say. But 412, which no read of ours asks for: there TensorStore 0.1.86 ends the process.
STATUSES = [*range(400, 412), *range(413, 419), *range(421, 427), 428, 429, 431, 451, 499, *range(500, 509), 510, 511, 520, 599]
# All that a kernel says of a file that is there.
ERRNOS = [
    *(
        "EACCES",
        "EPERM",
        "EROFS",
        "EIO",
        "ENOSPC",
        "ESTALE",
        "ENOTCONN",
        "EBUSY",
        "EINVAL",
        "ENODEV",
        "ENXIO",
        "ETIMEDOUT",
        "EFBIG",
    ),
    *("ENOMEM", "EBADF", "EREMOTEIO"),
]


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    monkeypatch.setattr(kv, "_GCS_RETRIES", {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"})
    with gcs_backend(tmp_path) as storage:
        yield storage


@pytest.fixture
def server() -> GcsServer:
    return gcs_server()


def a_reader(storage: Storage, *, packaged: bool) -> StepReader:
    """Of a step; packaged: as a run has it, so that only data are read from storage. Asks for a tenth of a second."""
    impatient = open_storage(storage.url, timeout_s=0.1)
    if not packaged:
        return StepReader(impatient, "7")
    found = storage.list("7")
    data = [info for info in found if "/d/" in info.name or "/ocdbt.process_" in info.name]
    objects = [DataObject(name=info.name.removeprefix("7/"), size=info.size, crc32c=0, writer="h0") for info in data]
    files = {info.name.removeprefix("7/"): storage.read(info.name) for info in found if info not in data}
    package = Package(step=7, save="a1k1", run="r", files=files, objects=tuple(objects))
    return StepReader(impatient, "7", package=package)


def read(reader: StepReader) -> None:
    [got] = reader.read("state", [(0, (0,), WHOLE.shape)])
    assert np.array_equal(got, WHOLE)


@pytest.mark.parametrize("packaged", [True, False])
def test_no_http_status_is_damage(bucket: Storage, server: GcsServer, packaged: bool):
    raystate.save(f"{bucket.url}/7", {"w": WHOLE})
    for status in STATUSES:
        server.clear()
        reader = a_reader(bucket, packaged=packaged)
        server.faults([FaultRule(status=status, kinds=() if status == 404 else ("get_media",))])
        with pytest.raises(StorageError):
            read(reader)


def test_an_object_that_is_listed_is_not_missing(bucket: Storage, server: GcsServer):
    raystate.save(f"{bucket.url}/7", {"w": WHOLE})
    reader = a_reader(bucket, packaged=True)
    server.faults([FaultRule(status=404, kinds=("get_media",))])
    with pytest.raises(StorageError, match="lists every object of the step"):
        read(reader)
    server.clear()
    largest = max(bucket.list("7"), key=lambda info: info.size)
    bucket.delete(largest.name)
    with pytest.raises(CorruptCheckpointError):
        read(reader)


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_list_that_is_refused_is_no_empty_folder(bucket: Storage, server: GcsServer, status: int):
    """Without a package what a step has is found by listing; TensorStore's own list takes these answers for an empty one."""
    raystate.save(
        f"{bucket.url}/7",
        {"w": WHOLE},
        items={"data": mock.Mock(get_state=lambda: {"at": 3}, set_state=print, spec=["get_state", "set_state"])},
    )
    server.faults([FaultRule(status=status, kinds=("list",))])
    with pytest.raises(StorageError, match=r"list .*(40[0134] |credentials)"):
        a_reader(bucket, packaged=False).iterator_states("data")


@pytest.mark.parametrize(
    ("status", "says"), [(400, "HTTP 400$"), (403, r"HTTP 403 \(this account .*objectAdmin"), (503, "HTTP 503$")]
)
def test_a_write_that_is_refused_names_the_place_and_what_to_do(bucket: Storage, server: GcsServer, status: int, says: str):
    server.faults([FaultRule(status=status, kinds=("upload",), match=r"/d%2F|/d/")])
    with pytest.raises(StorageError, match=rf"writing item 'state'.* to {bucket.url}/7/state/: .*{says}"):
        raystate.save(f"{bucket.url}/7", {"w": WHOLE})


REFUSED = """
import ctypes, errno, json, os, struct, sys
import numpy as np
import raystate
from raystate.storage import open_storage
from raystate.orbax.step_reader import StepReader

folder, *names = sys.argv[1:]
PREAD, OPENAT = 17, 257

def refuse(call, number):
    # A filter of the kernel's, for all threads: of two that speak of a call the one that came last counts.
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, call), (0x06, 0, 0, 0x00050000 | number), (0x06, 0, 0, 0x7FFF0000)]
    data = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
    program = struct.pack("HxxxxxxQ", len(code), ctypes.addressof(data))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(317, 1, 1, program):
        raise OSError(ctypes.get_errno(), "no filters here")

def opened():
    reader = StepReader(open_storage(folder, timeout_s=0.1), "7")
    reader.tree("state")
    return reader

readers = {(call, name): opened() for call in (PREAD, OPENAT) for name in names}
found = {}
for (call, name), reader in readers.items():
    refuse(call, getattr(errno, name))
    try:
        reader.read("state", [(0, (0,), (100_000,))])
        found[f"{name} {call}"] = "read"
    except Exception as error:
        found[f"{name} {call}"] = f"{type(error).__name__} {error}"
os.write(1, json.dumps(found).encode())
os._exit(0)
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="knows the calls of Linux on x86-64")
def test_no_error_of_a_file_system_is_damage(tmp_path: Path):
    raystate.save(tmp_path / "7", {"w": WHOLE})
    found = json.loads(run_python("-c", REFUSED, tmp_path, *ERRNOS).stdout)
    assert len(found) == 2 * len(ERRNOS)
    assert {what: said for what, said in found.items() if not said.startswith("StorageError")} == {}
