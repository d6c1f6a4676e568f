"""One checkpoint that is no step of a run, from a tree in memory to a folder in storage: all or nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from raystate.arrays.checks import check_custom, check_metrics, hold_metrics
from raystate.arrays.items import PackedItems, pack_items
from raystate.arrays.stage import HeldState, hold, host_arrays, views
from raystate.arrays.tree import Described, describe
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, RaystateError, StorageError
from raystate.orbax.merge import build_files
from raystate.orbax.writer import write_item
from raystate.restored import STATE
from raystate.storage import Storage, new_folder
from raystate.storage.names import step_of
from raystate.storage.placing import NewFolder

logger = logging.getLogger("raystate")


@dataclass(frozen=True, kw_only=True)
class Content:
    """What is to be saved, checked and serialized but for the bytes of its arrays."""

    described: Described
    held: HeldState
    items: PackedItems
    metrics: Mapping[str, Any]
    custom: Any


def take(
    tree: object,
    *,
    items: Mapping[str, object] | None = None,
    metrics: Mapping[str, object] | None = None,
    custom: object = None,
    keep: bool = False,
) -> Content:
    """Take what a checkpoint is made of. By the rules of `StateManager.save`, of which `tree` is the state.

    Args:
        keep: copies are enqueued, so that the caller may go on, donate and overwrite the arrays.

    Raises:
        ConfigError: an argument that can't be saved, names it; or the program has several processes.
    """
    if (processes := jax.process_count()) > 1:
        raise ConfigError(
            f"raystate.save writes what one process has, and this program has {processes}, whose arrays are spread over all: use "
            "raystate.StateManager, whose save writes from all of them",
            field="tree",
            processes=processes,
        )
    checked = hold_metrics(check_metrics(metrics))
    plain = check_custom(custom)
    packed = pack_items(items, process_index=0)
    described = describe({STATE: tree, **packed.trees}, process_index=0, process_count=1)
    return Content(
        described=described, held=hold(described) if keep else views(described), items=packed, metrics=checked, custom=plain
    )


def write_checkpoint(storage: Storage, folder: str, content: Content, *, overwrite: bool = False) -> None:
    """Write one checkpoint as the folder `folder` of `storage`. Nothing of it is left if this fails.

    In a bucket it is tried twice, under two ids, as far as nothing has its place yet.

    Args:
        storage: of the folder above.
        folder: one component.
        content: from `take`; its arrays are used up.
        overwrite: see `storage.placing.new_folder`.

    Raises:
        StorageError: something is there, or storage failed. Errors of the computation of an array
            pass as they are.
    """
    arrays: list[np.ndarray] = []
    for last in (storage.is_directory, True):
        try:
            with new_folder(storage, folder, overwrite=overwrite) as place:
                arrays = arrays or host_arrays(content.held)
                try:
                    files = _write(storage, folder, place, content, arrays)
                except (CorruptCheckpointError, StorageError) as error:
                    if last:
                        raise
                    raise _UnwrittenError from error
                place.publish(files)
                return
        # An object store's lost answer or damaged download spoils what has this save's names, and no other's.
        except _UnwrittenError as unwritten:
            logger.info("saving %s/%s once more: %s", storage.url, folder, unwritten.__cause__)


class _UnwrittenError(Exception):
    """Nothing is in its place yet, and another save of the same may succeed."""


def _write(storage: Storage, folder: str, place: NewFolder, content: Content, arrays: Sequence[np.ndarray]) -> dict[str, bytes]:
    """Write the arrays below the place's prefix; every file with a fixed name -> its bytes."""
    layout = content.described.layout
    metrics = {name: float(np.asarray(value)) for name, value in content.metrics.items()}
    writer = f"{place.save}h0"
    writers: dict[str, list[str]] = {}
    try:
        for number, tree in enumerate(layout.trees):
            pieces = [
                (piece.leaf, piece.start, array)
                for piece, array in zip(layout.pieces, arrays, strict=True)
                if piece.tree == number and piece.owned
            ]
            if write_item(storage.kvstore(f"{place.prefix}/{tree.item}"), writer, tree, pieces):
                writers[tree.item] = [writer]
        return build_files(
            step_of(folder) or 0,
            place.save,
            layout.trees,
            content.described.values,
            writers,
            lambda item: storage.kvstore(f"{place.prefix}/{item}"),
            iterators={name: {0: state} for name, state in content.items.iterators.items()},
            own_files=content.items.files,
            json_items=content.items.json_items,
            metrics=metrics,
            custom=content.custom,
        )
    except RaystateError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # from Orbax in its scratch directory
        path = f"{storage.url}/{folder}"
        raise StorageError(f"{path} could not be written: {error}", operation="save", path=path) from error
