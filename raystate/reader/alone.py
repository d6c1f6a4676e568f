"""One checkpoint that is no step of a run: the folder of a step, of a tree without items, or of one item."""

from __future__ import annotations

from raystate.orbax.step_reader import StepReader
from raystate.restored import open_step
from raystate.storage import Storage, open_storage
from raystate.storage.names import MARKER, METADATA, TREE_METADATA, step_of


def single_checkpoint(storage: Storage) -> SingleCheckpoint | None:
    """The checkpoint whose folder this is; None: it is a run's, or nothing is there yet."""
    for name in (TREE_METADATA, METADATA):  # a bare tree may have both
        if storage.exists(name):
            return SingleCheckpoint(storage, name)
    return None


class SingleCheckpoint:
    """The folder of one checkpoint, or of one item: a tree that Orbax wrote without items lies like one.

    Args:
        storage: its folder.
        metadata: the file of it that says which of both it is.
    """

    def __init__(self, storage: Storage, metadata: str):
        self._storage = storage
        self._metadata = metadata
        self._above, _, self._name = storage.url.rpartition("/")
        self.step = step_of(self._name) or 0

    def is_there(self) -> bool:
        markers = [self._metadata]
        if self._metadata == METADATA and not self._storage.is_directory:
            markers.append(MARKER)
        return all(self._storage.exists(name) for name in markers)

    def open(self) -> StepReader:
        if self._metadata == TREE_METADATA:
            folder = self._storage.kvstore("")
            above = {**folder, "path": folder["path"].removesuffix(f"{self._name}/")}
            return StepReader(lambda _: above, self._name, item=self._name)
        if step_of(self._name) is not None and not self._above.endswith("/"):
            return open_step(open_storage(self._above), self.step)
        return StepReader(lambda _: self._storage.kvstore(""), self._name)
