"""What is said of a whole run, beside its steps, where Orbax's managers have it: `CheckpointManager(metadata=…)`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.orbax.json_checks import parse_object
from raystate.storage import ObjectExistsError, Storage

logger = logging.getLogger("raystate")

_FILE, _EARLY = "metadata/_ROOT_METADATA", "metadata/metadata"  # of Orbax of now, and until 2024


def read_run_metadata(storage: Storage) -> dict[str, Any] | None:
    """None: nothing is there, or nothing that Orbax would write, which is warned of. Raises StorageError."""
    try:
        if (data := storage.find(_FILE)) is not None:
            custom = parse_object(data, _FILE).get("custom_metadata")
            return custom if isinstance(custom, dict) else {}
        return parse_object(data, _EARLY) if (data := storage.find(_EARLY)) is not None else None
    except CorruptCheckpointError as error:  # no step depends on it
        logger.warning("%s: %s", storage.url, error)
        return None


def put_run_metadata(storage: Storage, metadata: Mapping[str, Any]) -> bool:
    """Write it down, unless something is there, which stays as in Orbax. Returns whether it was written. Raises StorageError."""
    if storage.exists(_EARLY):
        return False
    try:
        storage.create(_FILE, json.dumps({"internal_metadata": {}, "custom_metadata": dict(metadata)}).encode())
    except ObjectExistsError:
        return False
    return True
