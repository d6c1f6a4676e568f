"""Storages that fail on purpose: each wraps another one (`raystate.storage.StorageWrapper`) and passes on what it doesn't disturb.

An operation is named after the method of `Storage` that runs: "create", "read", "exists", "stat", "list", "checksum", "delete",
"delete_tree", "copy", "fsync_tree", "rename_tree", "sweep", "self_test". To disturb in a way of your own, subclass `StorageWrapper`
and override `before` (raising there: nothing has happened) or `after` (raising there: it has happened, but its answer is lost).
"""

from __future__ import annotations

from raystate.core.formats.errors import StorageError
from raystate.storage import Storage, StorageWrapper


class DiedError(BaseException):
    """The process is gone: not an Exception, so that no `except Exception` goes on after its own death."""


class Recording(StorageWrapper):
    """Notes every operation.

    Attributes:
        operations: (operation, name), oldest first.
    """

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.operations: list[tuple[str, str]] = []

    def before(self, operation: str, name: str) -> None:
        self.operations.append((operation, name))

    def count(self, operation: str) -> int:
        """How many operations of that kind have begun."""
        return sum(one == operation for one, _ in self.operations)


class DyingAt(StorageWrapper):
    """The process dies, with `DiedError`, before or right after one operation; each later operation
    dies too.

    Args:
        inner: the storage, which lives on.
        nth: how many operations pass undisturbed.
        after: True: the operation takes place, and then the process dies; False: it dies before.
    """

    def __init__(self, inner: Storage, nth: int, *, after: bool):
        super().__init__(inner)
        self.left = nth
        self.late = after

    def before(self, operation: str, name: str) -> None:
        if self.left < 0 or (self.left == 0 and not self.late):
            self.left = -1
            raise DiedError(f"before {operation} {name}")

    def after(self, operation: str, name: str) -> None:
        if self.left == 0:
            self.left = -1
            raise DiedError(f"after {operation} {name}")
        self.left -= 1


class LosingAnswers(StorageWrapper):
    """Operations take place and look failed.

    Args:
        inner: the storage.
        operation: which kind.
        times: how many of them, the first ones; the attribute of that name counts down.
        only: a part of the names that it happens to; "": all.
    """

    def __init__(self, inner: Storage, operation: str = "create", times: int = 1, only: str = ""):
        super().__init__(inner)
        self.operation, self.times, self.only = operation, times, only

    def after(self, operation: str, name: str) -> None:
        if operation == self.operation and self.times > 0 and self.only in name:
            self.times -= 1
            raise StorageError(f"{operation} {name} failed: connection reset", operation=operation, path=name)


class Failing(StorageWrapper):
    """Operations of the given kinds fail without taking place, for as long as `on` is True.

    Args:
        inner: the storage.
        *operations: which kinds.
    """

    def __init__(self, inner: Storage, *operations: str):
        super().__init__(inner)
        self.operations, self.on = operations, True

    def before(self, operation: str, name: str) -> None:
        if self.on and operation in self.operations:
            raise StorageError(f"{operation} {name} failed: out of service", operation=operation, path=name)
