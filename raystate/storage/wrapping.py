"""A storage around another one, with a hook before and after every operation: for counting, delaying and failing in tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from raystate.storage.base import Listing, ObjectInfo, Storage

Result = TypeVar("Result")


class StorageWrapper(Storage):
    """Passes everything on. Subclasses override `before` and `after`; `create_or_same` goes through `create` and `read`."""

    def __init__(self, inner: Storage):
        self.inner = inner
        self.url = inner.url
        self.is_directory = inner.is_directory

    def before(self, operation: str, name: str) -> None:
        """Called before the operation touches storage. Raising here means that nothing happened."""

    def after(self, operation: str, name: str) -> None:
        """Called after the operation succeeded. Raising here is a lost acknowledgement."""

    def _run(self, operation: str, name: str, call: Callable[[], Result]) -> Result:
        self.before(operation, name)
        result = call()
        self.after(operation, name)
        return result

    def create(self, name: str, data: bytes) -> None:
        self._run("create", name, lambda: self.inner.create(name, data))

    def read(self, name: str) -> bytes:
        return self._run("read", name, lambda: self.inner.read(name))

    def exists(self, name: str) -> bool:
        return self._run("exists", name, lambda: self.inner.exists(name))

    def stat(self, name: str) -> ObjectInfo:
        return self._run("stat", name, lambda: self.inner.stat(name))

    def list(self, prefix: str = "", recursive: bool = True) -> Listing:
        return self._run("list", prefix, lambda: self.inner.list(prefix, recursive))

    def checksums(self, name: str) -> tuple[int, str]:
        return self._run("checksum", name, lambda: self.inner.checksums(name))

    def delete(self, name: str, generation: str | None = None) -> bool:
        return self._run("delete", name, lambda: self.inner.delete(name, generation))

    def delete_tree(self, prefix: str) -> None:
        self._run("delete_tree", prefix, lambda: self.inner.delete_tree(prefix))

    def copy(self, source: str, target: str) -> None:
        self._run("copy", source, lambda: self.inner.copy(source, target))

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return self.inner.kvstore(prefix)

    def local_path(self, name: str) -> Path:
        return self.inner.local_path(name)

    def fsync_tree(self, prefix: str) -> None:
        self._run("fsync_tree", prefix, lambda: self.inner.fsync_tree(prefix))

    def rename_tree(self, source: str, target: str) -> None:
        self._run("rename_tree", source, lambda: self.inner.rename_tree(source, target))

    def sweep(self, prefix: str) -> int:
        return self._run("sweep", prefix, lambda: self.inner.sweep(prefix))

    def self_test(self) -> None:
        self._run("self_test", "", self.inner.self_test)
