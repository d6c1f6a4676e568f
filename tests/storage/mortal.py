"""A process's way to storage that fails at one chosen operation: before it, after it, halfway, or only its answer is lost."""

from __future__ import annotations

import dataclasses
import errno
import os
import secrets
from collections.abc import Callable, Sequence
from typing import TypeVar

from raystate.core.formats.errors import StorageError
from raystate.storage import Storage, StorageWrapper
from raystate.storage.base import TEMPORARY_PREFIX, Listing, ObjectInfo
from raystate.storage.names import GUARD, GUARD_TEXT, STATE
from raystate.testing.storage import DiedError

Result = TypeVar("Result")

LOOKS = ("read", "exists", "stat", "list", "checksum", "fsync_tree")  # change nothing that another process could see


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of an undisturbed process. `halves`: in how many ways it can be done in part."""

    kind: str
    name: str
    halves: int

    @property
    def looks(self) -> bool:
        return self.kind in LOOKS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens at the nth operation.

    `how`: "before" and "after": the process dies there. "half 0", "half 1", …: it dies and has done a part. "lost": the operation
    took place and its caller gets an error. "beside": just before it, `Mortal.meanwhile` does something.
    """

    nth: int
    how: str

    @property
    def deadly(self) -> bool:
        return self.how not in ("lost", "beside")


class Mortal(StorageWrapper):
    """Counts the operations of one process; once it is dead, every further one raises DiedError.

    Args:
        inner: the storage.
        fault: what goes wrong.
        meanwhile: what another process does at a fault "beside".
    """

    def __init__(self, inner: Storage, fault: Fault | None = None, meanwhile: Callable[[], None] = lambda: None):
        super().__init__(inner)
        self.fault = fault
        self.meanwhile = meanwhile
        self.operations: list[Operation] = []
        self.dead = False
        self.found: Exception | None = None  # what was wrong `meanwhile`

    def _run(self, operation: str, name: str, call: Callable[[], Result], halves: Sequence[Callable[[], object]] = ()) -> Result:
        if self.dead:
            raise DiedError(f"dead before {operation} {name}")
        self.before(operation, name)
        nth = len(self.operations)
        self.operations.append(Operation(kind=operation, name=name, halves=len(halves)))
        if self.fault is None or self.fault.nth != nth:
            result = call()
            self.after(operation, name)
            return result
        how = self.fault.how
        if how == "beside":
            self._let_others_go_on()
            return call()
        if how == "lost":
            call()
            raise StorageError(f"{operation} {name} failed: connection reset", operation=operation, path=name)
        if how == "after":
            call()
        elif how.startswith("half"):
            halves[int(how.split()[1])]()
        self.dead = True
        raise DiedError(f"{how} {operation} {name}")

    def _let_others_go_on(self) -> None:
        """What they find is no error of this operation: to its caller the process has died, and the test asks for it."""
        try:
            self.meanwhile()
        except Exception as error:
            self.found, self.dead = error, True
            raise DiedError("something is wrong beside it") from error

    # ---------------------------------------------------------------- what can be done in part

    def create(self, name: str, data: bytes) -> None:
        self._run("create", name, lambda: self.inner.create(name, data), self._halves_of_create(name, data))

    def copy(self, source: str, target: str) -> None:
        self._run("copy", source, lambda: self.inner.copy(source, target), self._halves_of_create(target, b"copy")[:1])

    def delete_tree(self, prefix: str) -> None:
        # In no particular order: the first half of the names stands for any part of them.
        self._run(
            "delete_tree", prefix, lambda: self.inner.delete_tree(prefix), [lambda: self._delete_half(self.inner.list(prefix))]
        )

    def delete_all(self, infos: Sequence[ObjectInfo]) -> None:
        if infos:  # else nothing is asked of the storage
            name = infos[0].name
            halves = [lambda: self._delete_half(infos)] if len(infos) > 1 else []
            self._run("delete_all", name, lambda: self.inner.delete_all(infos), halves)

    def rename_tree(self, source: str, target: str) -> None:
        half = [lambda: os.makedirs(self.inner.local_path(target).parent, exist_ok=True)] if self.is_directory else []
        self._run("rename_tree", source, lambda: self.inner.rename_tree(source, target), half)

    def self_test(self) -> None:
        def half() -> None:
            if self.is_directory:
                self.inner.create(f"{STATE}/selftest.{secrets.token_hex(4)}/once/first", b"1")
            else:
                self.inner.create_or_same(GUARD, GUARD_TEXT)

        self._run("self_test", "", self.inner.self_test, [half])

    def inventory(self, prefix: str) -> Listing:
        # One after the other, so that the nth operation is the same one every time.
        return [self.with_checksums(info) for info in self.list(prefix)]

    def _halves_of_create(self, name: str, data: bytes) -> list[Callable[[], object]]:
        if not self.is_directory:
            return []  # an object appears whole
        path = self.inner.local_path(name)
        temporary = path.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"

        def unfinished() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data[: len(data) // 2])

        def linked() -> None:
            unfinished()
            temporary.write_bytes(data)
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno != errno.EEXIST:
                    raise

        return [unfinished, linked]

    def _delete_half(self, infos: Sequence[ObjectInfo]) -> None:
        for info in infos[: (len(infos) + 1) // 2]:
            self.inner.delete(info.name)
