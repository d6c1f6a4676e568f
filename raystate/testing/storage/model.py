"""Random sequences of operations on a storage and on a dict: both must say the same.

class MyModel(StorageModel):
    @contextlib.contextmanager
    def empty_storage(self, folder):
        yield MyStorage(…)

TestMyModel = MyModel.TestCase              # hypothesis' own way to run it
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from raystate.storage import ObjectExistsError, ObjectMissingError, Storage

# Folders and objects never share a name: a file system cannot have both, and raystate never asks for it.
FOLDERS = st.sampled_from(["", "1", "12", "1/x", "1/x/y"])
NAMES = st.builds(lambda folder, leaf: f"{folder}/{leaf}" if folder else leaf, FOLDERS, st.sampled_from(["a.f", "b.f"]))


class StorageModel(RuleBasedStateMachine):
    """One sequence. A subclass says what `empty_storage` is."""

    def empty_storage(self, folder: Path) -> contextlib.AbstractContextManager[Storage]:
        """An empty storage for one sequence, and its end.

        Args:
            folder: an empty folder to use if need be, which is removed afterwards.
        """
        raise NotImplementedError

    @initialize()
    def start(self) -> None:
        self.stack = contextlib.ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.storage = self.stack.enter_context(self.empty_storage(Path(folder)))
        self.model: dict[str, bytes] = {}

    @rule(name=NAMES, data=st.binary(max_size=8), same=st.booleans())
    def create(self, name: str, data: bytes, same: bool) -> None:
        create = self.storage.create_or_same if same else self.storage.create
        if name in self.model and not (same and self.model[name] == data):
            with pytest.raises(ObjectExistsError):
                create(name, data)
        else:
            create(name, data)
            self.model[name] = data

    @rule(name=NAMES)
    def read(self, name: str) -> None:
        if name in self.model:
            assert self.storage.read(name) == self.model[name]
            assert self.storage.stat(name).size == len(self.model[name])
        else:
            with pytest.raises(ObjectMissingError):
                self.storage.read(name)

    @rule(name=NAMES, conditional=st.booleans())
    def delete(self, name: str, conditional: bool) -> None:
        generation = self.storage.stat(name).generation if conditional and name in self.model else None
        assert self.storage.delete(name, generation) == (self.model.pop(name, None) is not None)

    @rule(folder=FOLDERS.filter(bool))
    def delete_tree(self, folder: str) -> None:
        self.storage.delete_tree(folder)
        self.model = {name: data for name, data in self.model.items() if not name.startswith(f"{folder}/")}

    @rule(folder=FOLDERS)
    def list_folder(self, folder: str) -> None:
        below = f"{folder}/" if folder else ""
        expected = sorted(name for name in self.model if name.startswith(below))
        assert [info.name for info in self.storage.list(folder)] == expected
        children = {below + name[len(below) :].partition("/")[0] + "/" * ("/" in name[len(below) :]) for name in expected}
        found = {info.name for info in self.storage.list(folder, recursive=False)}
        # A directory keeps folders that have become empty.
        assert found == children if not self.storage.is_directory else found >= children

    @invariant()
    def holds_the_model(self) -> None:
        if hasattr(self, "model"):
            assert {info.name: info.size for info in self.storage.list()} == {name: len(data) for name, data in self.model.items()}

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()
