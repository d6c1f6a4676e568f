"""A target of flax, written: an Orbax tree with a checksum in each chunk, or a msgpack file."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import serialization

from raystate.arrays.stage import HeldState, hold, host_arrays, native, views
from raystate.arrays.tree import Described, describe
from raystate.compat.flax_errors import TargetError
from raystate.compat.flax_several import Meeting, Share
from raystate.core.formats.errors import ConfigError, StorageError
from raystate.core.formats.local_values import local_checksums
from raystate.core.formats.tree import ArraySpec, SlotTable
from raystate.machine.checksum import crc32c
from raystate.orbax.merge import MARKER, build_files
from raystate.orbax.writer import write_item
from raystate.storage import Storage, posix, replace_tree
from raystate.storage.names import METADATA
from raystate.storage.placing import TEMPORARY
from raystate.storage.replacing import OLD
from raystate.storage.replacing_objects import FixedNames, replace_with_files, replace_with_object

logger = logging.getLogger("raystate")

_ITEM = "state"
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"  # what flax's default backend records
_under_way: set[str] = set()  # the saves of this process that write beside their places


def prepare(target: Any, *, as_msgpack: bool, copy: bool, meeting: Meeting | None) -> Tree | Msgpack:
    """Take what is to be written, and check it.

    Args:
        target: a pytree, or a single array or number.
        as_msgpack: write flax's older form.
        copy: the caller goes on, may donate jax arrays and change numpy arrays.
        meeting: of a program whose processes save together; None: this one saves alone.

    Raises:
        TargetError: there is nothing to save, or a leaf can't be kept; names it.
    """
    single = jax.tree_util.all_leaves([target])
    if single and target is not None and meeting is not None:
        raise TargetError("target: a single array or number of several processes: put it into a dict", field="target")
    if as_msgpack or (single and target is not None):
        return Msgpack(serialization.msgpack_serialize(_native(serialization.to_state_dict(target)), in_place=True))
    if not jax.tree_util.tree_leaves(target, is_leaf=lambda value: value is None) or target is None:
        raise TargetError(f"target: {target!r} has no array and no number: there is nothing to save", field="target")
    try:
        trees = {_ITEM: target}
        described = describe(trees, process_index=0, process_count=1) if meeting is None else describe(trees)
    except ConfigError as error:
        raise TargetError(error.message, **error.details) from error
    return Tree(described, hold(described) if copy else views(described), meeting)


def _native(state: Any) -> Any:
    """A state dict whose arrays have the machine's byte order. flax writes their bytes as they are, and not the order, so that other
    numbers come back."""
    if isinstance(state, dict):
        return {key: _native(value) for key, value in state.items()}
    return native(state) if isinstance(state, np.ndarray) else state


@dataclass(frozen=True)
class Msgpack:
    """A file as flax's older form has it. It has no checksums: nothing in it has a place for them."""

    data: bytes

    layout_hash = ""  # one process writes it

    def write(self, storage: Storage, name: str, save: str) -> None:
        """Put it in its place, whole and durable; what is there is replaced. `save`: drawn for it by `new_save`."""
        if not storage.is_directory:
            replace_with_object(storage, name, self.data)
            return
        with _Place(storage, name, save) as place:
            storage.create(place.new, self.data)
            place.take()


@dataclass(frozen=True)
class Tree:
    """A folder as flax's default backend has it: one Orbax tree, without items. It is written once: its arrays are used up."""

    described: Described
    held: HeldState
    meeting: Meeting | None

    @property
    def layout_hash(self) -> str:
        """Equal in all processes that save one tree."""
        return self.described.layout_hash

    def write(self, storage: Storage, name: str, save: str) -> None:
        """Put it in its place, whole and durable; what is there is replaced. `save`: drawn for it by `new_save`."""
        if self.meeting is not None and self.meeting.rank:
            place = _beside(name, save) if storage.is_directory else name
            self.meeting.end(lambda: self._write_share(storage, place, save))
        elif not storage.is_directory:
            self._write_marked(storage, name, save)
        else:
            with _Place(storage, name, save) as place:
                for file, data in self._files(storage, place.new, save).items():
                    storage.create(f"{place.new}/{file}", data)
                place.take()

    def _write_marked(self, storage: Storage, name: str, save: str) -> None:
        """On an object store: data under unique names, then the files with fixed names, the marker last."""
        fixed = FixedNames(storage, name, save)
        try:
            files = self._files(storage, name, save)
        except BaseException:
            try:
                fixed.discard()
            except StorageError as failed:  # the failure that is already on its way says more
                logger.warning("left-overs of an unfinished save stay in %s/%s: %s", storage.url, name, failed.message)
            raise
        replace_with_files(fixed, files)

    def _files(self, storage: Storage, prefix: str, save: str) -> dict[str, bytes]:
        """Write the arrays below `prefix`; every file with a fixed name -> its bytes."""
        share = self._write_share(storage, prefix, save)
        writers = self.meeting.writers(share) if self.meeting else [share[0]]
        base = storage.kvstore(prefix)
        made = build_files(
            0, save, self.described.layout.trees, self.described.values, {_ITEM: list(filter(None, writers))}, lambda _: base
        )
        step = json.loads(made[METADATA])
        files = {name.removeprefix(f"{_ITEM}/"): data for name, data in made.items() if name.startswith(f"{_ITEM}/")}
        return {**files, METADATA: json.dumps(step | {"item_handlers": _HANDLER}).encode(), MARKER: made[MARKER]}

    def _write_share(self, storage: Storage, prefix: str, save: str) -> Share:
        layout = self.described.layout
        (spec,) = layout.trees
        arrays = host_arrays(self.held)
        pieces = [(piece.leaf, piece.start, data) for piece, data in zip(layout.pieces, arrays, strict=True) if piece.owned]
        writer = f"{save}h{self.meeting.rank if self.meeting else 0}"
        if not write_item(storage.kvstore(prefix), writer, spec, pieces):
            writer = ""
        crcs = tuple(
            crc32c(np.ascontiguousarray(data).reshape(-1).view(np.uint8)) if _is_local(spec.leaves[piece.leaf].array) else 0
            for piece, data in zip(layout.pieces, arrays, strict=True)
        )
        return writer, local_checksums(layout, SlotTable(layout_ref="", crc32c=crcs, values=self.described.values))


def _is_local(array: ArraySpec | None) -> bool:
    return array is not None and array.local


def _beside(name: str, save: str) -> str:
    """Where in a directory a save writes."""
    return f"{name}{TEMPORARY}{save}"


class _Place:
    """In a directory: what is written beside its place and then renamed. Left without `take`, nothing remains of it."""

    def __init__(self, storage: Storage, name: str, save: str):
        self._save = save
        self._begin = _beside(name, "")
        self.new = _beside(name, save)
        self._storage = storage
        self._name = name
        self._made: tuple[str, int, int] | None = None  # what tells it from what it replaces

    def __enter__(self) -> _Place:
        # One program saves to a directory of flax's, one save at a time (flax_turns), but for a signal's handler that saves while its
        # thread does: any other entry of such a name was left by a program that died.
        _under_way.add(self._save)
        alone = not os.path.lexists(self._storage.local_path(self._name))  # then what could not be put back is all that there is
        for info in self._storage.list(recursive=False):
            name = info.name.rstrip("/")
            save = name.removeprefix(self._begin).removesuffix(OLD)
            if name.startswith(self._begin) and save not in _under_way and not (alone and name.endswith(OLD)):
                self._storage.delete_tree(name)
        return self

    def take(self) -> None:
        """Give it its name, in the place of what has it."""
        storage = self._storage
        storage.fsync_tree(self.new)
        self._made = posix.identity(str(storage.local_path(self.new)))
        if os.path.lexists(storage.local_path(self._name)):
            replace_tree(storage, self.new, self._name)
        else:
            storage.rename_tree(self.new, self._name)

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        _under_way.discard(self._save)
        if kind is None:
            return
        try:
            # Once names were exchanged it is what was replaced, for the next save to remove.
            if self._made is None or posix.identity(str(self._storage.local_path(self.new))) == self._made:
                self._storage.delete_tree(self.new)
        except (OSError, StorageError) as failed:  # the failure that is already on its way says more
            logger.warning("left-overs of an unfinished save stay in %s/%s: %s", self._storage.url, self.new, failed)
