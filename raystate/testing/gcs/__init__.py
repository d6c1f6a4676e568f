"""A strict local Google Cloud Storage server, for users' tests and our own. It runs in memory:

    pip install 'raystate[gcs-server]'
    python -m raystate.testing.gcs --port 4480 --bucket experiments

or from Python:

    with GcsServer(buckets=["experiments"]) as server:
        ...

Preconditions hold, atomically, for every kind of change and for each part of a batch. The server counts requests by what Cloud
Storage bills, and plays faults. See `GcsServer`, `GcsControl` for a
server that runs already, and `FaultRule`. It has the JSON API without versions, soft delete, folders, matchGlob and permissions.

`environment()` says what to set. Who reads it when:

- google-cloud-storage: STORAGE_EMULATOR_HOST when a `Client` is made.
- gcsfs: STORAGE_EMULATOR_HOST at each request, but fsspec keeps file systems (`GCSFileSystem.clear_instance_cache()`), with their
  connections; GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT when it is imported.
- TensorStore: TENSORSTORE_GCS_HTTP_URL when a kvstore is opened.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raystate.testing.gcs.control import GcsControl
    from raystate.testing.gcs.counts import Counts, LoggedRequest
    from raystate.testing.gcs.faults import FaultRule
    from raystate.testing.gcs.server import GcsServer

__all__ = ["Counts", "FaultRule", "GcsControl", "GcsServer", "LoggedRequest"]

_MODULES = {"Counts": "counts", "FaultRule": "faults", "GcsControl": "control", "GcsServer": "server", "LoggedRequest": "counts"}


def __getattr__(name: str) -> Any:
    """Loaded when it is used: the server's own process needs other parts than its clients."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
