"""The suites that are shipped for storage back ends find what is wrong with one, and importing them asks for nothing."""

from __future__ import annotations

import contextlib
import inspect
import secrets
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, Verbosity, settings
from hypothesis.stateful import run_state_machine_as_test

from raystate.core.formats.errors import StorageError
from raystate.storage import ObjectExistsError, ObjectInfo, Storage, StorageWrapper, open_storage
from raystate.testing.storage import StorageContract, StorageModel
from tests.processes import run_python


class Overwrites(StorageWrapper):
    def create(self, name: str, data: bytes) -> None:
        if self.inner.exists(name):
            self.inner.delete(name)
        super().create(name, data)


class LooksFirst(StorageWrapper):
    """Create-once in two steps: of several creators at once, each can find the name free."""

    def create(self, name: str, data: bytes) -> None:
        if self.inner.exists(name):
            raise ObjectExistsError(f"create {name}", operation="create", path=name)
        with contextlib.suppress(ObjectExistsError):
            super().create(name, data)


class TellsAnyError(StorageWrapper):
    def read(self, name: str) -> bytes:
        try:
            return super().read(name)
        except StorageError as error:
            raise StorageError(error.message, operation="read", path=name) from None


class IgnoresGenerations(StorageWrapper):
    def delete(self, name: str, generation: str | None = None) -> bool:
        return super().delete(name)


class ListsByText(StorageWrapper):
    """An object store's own idea of a prefix: "12" lists "1200/…"."""

    def list(self, prefix: str = "", recursive: bool = True) -> list[ObjectInfo]:
        if prefix and recursive:
            return [info for info in self.inner.list() if info.name.startswith(prefix)]
        return super().list(prefix, recursive)


class DeletesHalf(StorageWrapper):
    def delete_tree(self, prefix: str) -> None:
        found = self.inner.list(prefix)
        self.inner.delete_all(found[: (len(found) + 1) // 2])


PLANTED = (Overwrites, LooksFirst, TellsAnyError, IgnoresGenerations, ListsByText, DeletesHalf)
TESTS = {name: test for name, test in inspect.getmembers(StorageContract, inspect.isfunction) if name.startswith("test_")}
WITHOUT_MORE_ARGUMENTS = [name for name, test in TESTS.items() if list(inspect.signature(test).parameters) == ["self", "storage"]]


def failures(fresh: Callable[[], Storage]) -> list[str]:
    """The names of the contract's tests that fail."""
    failed: list[str] = []
    for name in WITHOUT_MORE_ARGUMENTS:
        try:
            TESTS[name](StorageContract(), fresh())
        except (Exception, pytest.fail.Exception):
            failed.append(name)
    return failed


def directory(folder: Path) -> Storage:
    return open_storage(folder / secrets.token_hex(4), timeout_s=2.0)


def test_a_sound_storage_passes(tmp_path: Path):
    assert len(WITHOUT_MORE_ARGUMENTS) >= 15
    assert failures(lambda: StorageWrapper(directory(tmp_path))) == []


@pytest.mark.parametrize("planted", PLANTED)
def test_the_contract_finds_a_planted_fault(planted: type[StorageWrapper], tmp_path: Path):
    assert failures(lambda: planted(directory(tmp_path)))


@pytest.mark.parametrize("planted", [Overwrites, TellsAnyError, DeletesHalf])
def test_the_model_finds_a_planted_fault(planted: type[StorageWrapper]):
    class Model(StorageModel):
        def empty_storage(self, folder: Path) -> contextlib.AbstractContextManager[Storage]:
            return contextlib.nullcontext(planted(directory(folder)))

    phases = (Phase.explicit, Phase.generate)  # the smallest example is of no interest here
    checks = settings(max_examples=200, stateful_step_count=25, database=None, phases=phases, verbosity=Verbosity.quiet)
    with pytest.raises((AssertionError, StorageError, pytest.fail.Exception, ExceptionGroup)):
        run_state_machine_as_test(Model, settings=checks)


def test_the_wrappers_need_no_test_library():
    program = "import sys, raystate.testing.storage; assert not {'pytest', 'hypothesis'} & set(sys.modules)"
    run_python("-c", program)
