"""Checkpoints in flax's older forms, read: `checkpoint_<step>` msgpack files, and folders of early Orbax versions."""
