"""What is said of a whole run, beside its steps, where Orbax's managers have it: `CheckpointManager(metadata=…)`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from raystate.orbax.said import parse_object
from raystate.storage import ObjectExistsError, Storage

_FILE, _EARLY = "metadata/_ROOT_METADATA", "metadata/metadata"  # of Orbax of now, and until 2024


def read_run_metadata(storage: Storage) -> dict[str, Any] | None:
    """None: nobody has said anything. Raises CorruptCheckpointError, StorageError."""
    if (data := storage.find(_FILE)) is not None:
        custom = parse_object(data, _FILE).get("custom_metadata")
        return custom if isinstance(custom, dict) else {}
    return parse_object(data, _EARLY) if (data := storage.find(_EARLY)) is not None else None


def put_run_metadata(storage: Storage, metadata: Mapping[str, Any]) -> bool:
    """Write it down, unless something is there, which stays as in Orbax. Returns whether it was written. Raises StorageError."""
    if storage.exists(_EARLY):
        return False
    try:
        storage.create(_FILE, json.dumps({"internal_metadata": {}, "custom_metadata": dict(metadata)}).encode())
    except ObjectExistsError:
        return False
    return True
