"""A host's share of a step: written under its unique names, and what then lies there."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from raystate.core.formats.tree import DataObject, TreeSpec
from raystate.orbax.writer import WRITER_PREFIX, write_item
from raystate.storage import Storage, data_objects


def write_share(
    storage: Storage, step_folder: str, writer: str, tree: TreeSpec, pieces: Iterable[tuple[int, tuple[int, ...], np.ndarray]]
) -> list[DataObject]:
    """Write one writer's pieces of an item (see `write_item`).

    Returns:
        The objects, names relative to the step's folder, as storage has them; empty if there was no piece.
    """
    if not write_item(storage.kvstore(f"{step_folder}/{tree.item}"), writer, tree, pieces):
        return []
    return data_objects(storage, step_folder, f"{tree.item}/{WRITER_PREFIX}{writer}", writer=writer)
