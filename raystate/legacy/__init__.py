"""Checkpoints in flax's older forms, read: `checkpoint_<step>` msgpack files, and folders of early Orbax versions."""

from raystate.legacy.directory import LegacyCheckpoint, LegacyDirectory, LegacyStep, legacy_checkpoint
from raystate.legacy.names import GDA, is_temporary, last_number, natural_sort, safe_normpath
from raystate.legacy.reader import LegacyReader

__all__ = [
    "GDA",
    "LegacyCheckpoint",
    "LegacyDirectory",
    "LegacyReader",
    "LegacyStep",
    "is_temporary",
    "last_number",
    "legacy_checkpoint",
    "natural_sort",
    "safe_normpath",
]
