"""What Orbax itself does in the place of raystate: saves of several processes, and its own transformations."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax import serialization
from flax.training import orbax_utils
from jax.experimental.multihost_utils import sync_global_devices

from raystate.compat.flax_directory import FlaxDirectory
from raystate.storage import canonical_url


def save(directory: FlaxDirectory, name: str, target: Any, *, overwrite: bool, keep: int, keep_every_n_steps: int | None) -> None:
    """Save from all processes, as flax's default backend does. Every process calls it.

    Raises:
        ValueError: the checkpoint exists and `overwrite` is False. OutdatedCheckpointError: it would be removed at once.
    """
    warnings.warn(
        "several processes: Orbax itself writes this checkpoint, without raystate's checksums; raystate.StateManager saves with them",
        UserWarning,
        stacklevel=4,
    )
    there = directory.check_order(name, overwrite=overwrite, strict=False, keep=keep, keep_every_n_steps=keep_every_n_steps)
    sync_global_devices("raystate:flax_checkpoints:checked")  # before the first of them writes
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(_for_orbax(directory.path_of(name)), target, force=overwrite)
    if jax.process_index() == 0:
        directory.clean(name, there, overwrite=overwrite, keep=keep, keep_every_n_steps=keep_every_n_steps)
    sync_global_devices("raystate:flax_checkpoints:cleaned")


def restore_transformed(path: str, target: Any, transforms: Mapping[str, Any]) -> Any:
    """Restore a folder with Orbax's own transformations, as flax does."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            _for_orbax(path), item=target, restore_args=orbax_utils.restore_args_from_target(target), transforms=transforms
        )
    return serialization.from_state_dict(target, serialization.to_state_dict(restored))


def _for_orbax(path: str) -> str:
    """The absolute path, or the URL of a bucket."""
    return canonical_url(path).removeprefix("file://")
