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

from raystate.arrays import array_leaves, describe, native
from raystate.compat.flax_errors import TargetError
from raystate.compat.flax_replacing import replace_with_object, replace_with_tree
from raystate.core.errors import ConfigError, StorageError
from raystate.core.tree import TreeSpec
from raystate.orbax.merge import MARKER, build_files
from raystate.orbax.writer import write_item
from raystate.storage import Storage, posix, replace_tree
from raystate.storage.names import METADATA
from raystate.storage.placing import TEMPORARY, FixedNames, new_save
from raystate.storage.replacing import OLD

logger = logging.getLogger("raystate")

_ITEM = "state"
_HANDLER = "orbax.checkpoint._src.handlers.pytree_checkpoint_handler.PyTreeCheckpointHandler"  # what flax's default backend records
_under_way: set[str] = set()  # the saves of this process that write beside their places


def prepare(target: Any, *, as_msgpack: bool, copy: bool) -> Tree | Msgpack:
    """Take what is to be written, and check it.

    Args:
        target: a pytree, or a single array or number.
        as_msgpack: write flax's older form.
        copy: the caller goes on and may change numpy arrays.

    Raises:
        TargetError: there is nothing to save, or a leaf can't be kept; names it.
    """
    single = jax.tree_util.all_leaves([target])
    if as_msgpack or (single and target is not None):
        return Msgpack(serialization.msgpack_serialize(_native(serialization.to_state_dict(target)), in_place=True))
    if not jax.tree_util.tree_leaves(target):
        raise TargetError(f"target: {target!r} has no array and no number: there is nothing to save", field="target")
    try:
        described = describe({_ITEM: target}, process_index=0, process_count=1)
    except ConfigError as error:
        raise TargetError(error.message, **error.details) from error
    arrays = [
        native(np.array(leaf) if copy and not isinstance(leaf, jax.Array) else np.asarray(leaf))
        for leaf in array_leaves(described, 0)
    ]
    spec = described.layout.trees[0]
    places = [index for index, leaf in enumerate(spec.leaves) if leaf.kind == "array"]
    return Tree(spec, tuple(zip(places, arrays, strict=True)), described.values[0])


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

    def write(self, storage: Storage, name: str) -> None:
        """Put it in its place, whole and durable; what is there is replaced."""
        if not storage.is_directory:
            replace_with_object(storage, name, self.data)
            return
        with _Place(storage, name) as place:
            storage.create(place.new, self.data)
            place.take()


@dataclass(frozen=True)
class Tree:
    """A folder as flax's default backend has it: one Orbax tree, without items."""

    spec: TreeSpec
    arrays: tuple[tuple[int, np.ndarray], ...]  # leaf -> array
    values: tuple[Any, ...]

    def write(self, storage: Storage, name: str) -> None:
        """Put it in its place, whole and durable; what is there is replaced."""
        if not storage.is_directory:
            self._write_marked(storage, name)
            return
        with _Place(storage, name) as place:
            for file, data in self._files(storage, place.new, place.save).items():
                storage.create(f"{place.new}/{file}", data)
            place.take()

    def _write_marked(self, storage: Storage, name: str) -> None:
        """On an object store: data under unique names, then the files with fixed names, the marker last."""
        fixed = FixedNames(storage, name, new_save())
        try:
            files = self._files(storage, name, fixed.save)
        except BaseException:
            try:
                fixed.discard()
            except StorageError as failed:  # the failure that is already on its way says more
                logger.warning("left-overs of an unfinished save stay in %s/%s: %s", storage.url, name, failed.message)
            raise
        replace_with_tree(fixed, files)

    def _files(self, storage: Storage, prefix: str, save: str) -> dict[str, bytes]:
        """Write the arrays below `prefix`; every file with a fixed name -> its bytes."""
        writer = f"{save}h0"
        base = storage.kvstore(prefix)
        pieces = [(leaf, (0,) * array.ndim, np.ascontiguousarray(array).reshape(array.shape)) for leaf, array in self.arrays]
        written = write_item(base, writer, self.spec, pieces)
        made = build_files(0, save, [self.spec], [self.values], {_ITEM: [writer] if written else []}, lambda _: base)
        step = json.loads(made[METADATA])
        files = {name.removeprefix(f"{_ITEM}/"): data for name, data in made.items() if name.startswith(f"{_ITEM}/")}
        return {**files, METADATA: json.dumps(step | {"item_handlers": _HANDLER}).encode(), MARKER: made[MARKER]}


class _Place:
    """In a directory: what is written beside its place and then renamed. Left without `take`, nothing remains of it."""

    def __init__(self, storage: Storage, name: str):
        self.save = new_save()
        self._begin = f"{name}{TEMPORARY}"
        self.new = f"{self._begin}{self.save}"
        self._storage = storage
        self._name = name
        self._made: tuple[str, int, int] | None = None  # what tells it from what it replaces

    def __enter__(self) -> _Place:
        # One program saves to a directory of flax's, one save at a time (flax_turns), but for a signal's handler that saves while its
        # thread does: what has such a name otherwise was left by a program that died.
        _under_way.add(self.save)
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
        _under_way.discard(self.save)
        if kind is None:
            return
        try:
            # Once names were exchanged it is what was replaced, for the next save to remove.
            if self._made is None or posix.identity(str(self._storage.local_path(self.new))) == self._made:
                self._storage.delete_tree(self.new)
        except (OSError, StorageError) as failed:  # the failure that is already on its way says more
            logger.warning("left-overs of an unfinished save stay in %s/%s: %s", self._storage.url, self.new, failed)
