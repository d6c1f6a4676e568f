"""An object store: names instead of folders, exclusive create instead of link, a marker instead of a rename. Through fsspec."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from raystate.core.formats.errors import StorageError
from raystate.machine.memory import MOST_READ_BYTES, TooLargeError
from raystate.storage.attempts import attempt
from raystate.storage.base import (
    Listing,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    Storage,
    check_name,
)
from raystate.storage.names import GUARD, GUARD_TEXT, STATE, log_name

Result = TypeVar("Result")

# fsspec's memory file system looks for a name and then stores it; the lock makes these one operation, as a real store's create is.
_memory_lock = threading.Lock()


class ObjectStorage(Storage):
    """Objects behind any fsspec file system whose `mode="create"` is exclusive (`self_test` proves it).

    Args:
        url: canonical, with a scheme that fsspec knows.
        timeout_s: see `open_storage`.
    """

    is_directory = False

    def __init__(self, url: str, *, timeout_s: float = 60.0):
        self.url = url
        self._scheme, _, rest = url.partition("://")
        # fsspec spells a path of the memory file system with a leading slash and a bucket's without.
        self._root = f"/{rest}" if self._scheme == "memory" else rest
        self._timeout_s = timeout_s
        self._opened: Any = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "timeout_s": self._timeout_s}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name)

        def create() -> None:
            if self._scheme == "memory":
                with _memory_lock:
                    self._fs.pipe_file(path, data, mode="create")
            else:
                self._fs.pipe_file(path, data, mode="create")

        try:
            self._call("create", name, create)
        except FileExistsError as error:
            # Some file systems also say so when a folder, or an object in the place of a folder, is in the way.
            if not self.exists(name):
                raise StorageError(
                    f"create {self.url}/{name} failed: refused as existing, but it is absent", operation="create", path=name
                ) from error
            raise ObjectExistsError(f"create {self.url}/{name} failed: it exists", operation="create", path=name) from error

    def read(self, name: str) -> bytes:
        path = self._path(name)
        # One byte more than may be read shows that there is too much, without a request that asks for the size.
        data = self._call("read", name, lambda: bytes(self._fs.cat_file(path, start=0, end=MOST_READ_BYTES + 1)))
        if len(data) > MOST_READ_BYTES:
            raise self._too_large(name)
        return data

    def exists(self, name: str) -> bool:
        # Not fs.exists() or isfile(): they take any failure for "no".
        try:
            self.stat(name)
        except ObjectMissingError:
            return False
        return True

    def stat(self, name: str) -> ObjectInfo:
        path = self._path(name)
        found = self._call("stat", name, lambda: self._fs.info(path))
        if found["type"] != "file":
            raise ObjectMissingError(f"{self.url}/{name} is not an object", operation="stat", path=name)
        return self._info(name, found)

    def list(self, prefix: str = "", recursive: bool = True) -> Listing:
        path = self._path(prefix) if prefix else self._root
        # Not "/" + path: the root of the listing decides where the relative names start.
        offset = len(path) + 1

        def listed() -> Listing:
            try:
                found = list(self._fs.find(path, detail=True).values()) if recursive else self._fs.ls(path, detail=True)
            except FileNotFoundError:
                return []
            infos: Listing = []
            for raw in found:
                relative = raw["name"].rstrip("/")[offset:]
                if not relative:  # an object of the very name, or a folder's placeholder
                    continue
                name = f"{prefix}/{relative}" if prefix else relative
                infos.append(ObjectInfo(name=f"{name}/", size=0) if raw["type"] == "directory" else self._info(name, raw))
            return sorted(infos, key=lambda info: info.name)

        return self._call("list", prefix, listed)

    def delete(self, name: str, generation: str | None = None) -> bool:
        path = self._path(name)

        def delete() -> bool:
            try:
                if generation is not None:
                    self._check_generation(name, generation)  # look, then delete: fsspec knows no condition
                self._fs.rm_file(path)
            except (FileNotFoundError, ObjectMissingError):
                return False
            return True

        return self._call("delete", name, delete)

    def delete_tree(self, prefix: str) -> None:
        self.delete_all(self.list(check_name(prefix)))  # "" would be everything

    def copy(self, source: str, target: str) -> None:
        paths = self._path(source), self._path(target)
        self._call("copy", source, lambda: self._fs.cp_file(*paths))

    def kvstore(self, prefix: str) -> dict[str, Any]:
        raise self._not_here("kvstore", prefix, f"TensorStore has no driver for {self._scheme}:// that fsspec shares")

    def local_path(self, name: str) -> Path:
        raise self._not_here("local_path", name, "an object store has no local paths")

    def fsync_tree(self, prefix: str) -> None:
        check_name(prefix)  # an object is durable when its create has returned

    def rename_tree(self, source: str, target: str) -> None:
        raise self._not_here("rename", f"{source} -> {target}", "an object store renames nothing atomically")

    def sweep(self, prefix: str) -> int:
        del prefix
        return 0  # no temporary files: an object appears whole

    def self_test(self) -> None:
        # With an object that every run has: a bucket takes one change of a name in a second, so a probe could not be deleted at once.
        is_mine = self.create_or_same(GUARD, GUARD_TEXT)
        try:
            self._self_test()
        except StorageError:
            with contextlib.suppress(StorageError):
                if is_mine and not self.exists(log_name(1)):  # a refused run leaves nothing there
                    self.delete(GUARD)
            raise

    # ------------------------------------------------------------ inside

    def _self_test(self) -> None:
        try:
            self.create(GUARD, b"a second create of one name")
        except ObjectExistsError:
            pass
        else:
            raise self._unfit("create", GUARD, "a second exclusive create of one name succeeded")
        if (got := self.read(GUARD)) != GUARD_TEXT:
            raise self._unfit("read", GUARD, f"it was created as {GUARD_TEXT!r} and reads as {got!r}")
        if GUARD not in [info.name for info in self.list(STATE, recursive=False)]:
            raise self._unfit("list", GUARD, "a created object is not listed")

    @property
    def _fs(self) -> Any:
        if self._opened is None:
            import fsspec  # pyright: ignore[reportMissingTypeStubs]

            # A cached listing would show a step that is gone, or hide one.
            self._opened = fsspec.filesystem(self._scheme, use_listings_cache=False)  # pyright: ignore[reportUnknownMemberType]
        return self._opened

    def _check_generation(self, name: str, generation: str | None) -> None:
        """Raise if there is another object, or none. None: any will do."""
        got = self.stat(name).generation
        if generation is not None and not self._is_of(got, generation):
            raise ObjectChangedError(
                f"delete {self.url}/{name} refused: it is another object now", operation="delete", path=name,
                expected=generation, got=got,
            )  # fmt: skip

    def _is_of(self, got: str, generation: str) -> bool:
        """Whether an object of the generation `got` may be deleted as one of `generation`."""
        return got == generation

    def _info(self, name: str, raw: dict[str, Any]) -> ObjectInfo:
        return ObjectInfo(name=name, size=int(raw["size"]), generation=self._version(raw))

    def _version(self, raw: dict[str, Any]) -> str:
        """An object's generation, of what fsspec tells of it."""
        # What a store calls its version of an object, the most exact first; the memory file system only knows when it was created,
        # as a datetime from info() and as seconds from find().
        version = next((raw[key] for key in ("generation", "etag", "ETag", "created", "mtime") if raw.get(key) is not None), "")
        seconds = getattr(version, "timestamp", None)
        return str(seconds() if seconds else version)

    def _unfit(self, operation: str, name: str, why: str) -> StorageError:
        return StorageError(
            f"{self.url} cannot hold a run: {operation} {name}: {why}. Use a bucket with strong consistency and preconditions",
            operation=operation, path=name,
        )  # fmt: skip

    def _too_large(self, name: str) -> StorageError:
        path = f"{self.url}/{name}"
        return TooLargeError(
            f"read {path} failed: it is too large; an object that is read whole has at most {MOST_READ_BYTES:,} bytes",
            operation="read", path=path, expected=MOST_READ_BYTES,
        )  # fmt: skip

    def _not_here(self, operation: str, name: str, why: str) -> StorageError:
        return StorageError(f"{operation} {self.url}/{name} is not possible: {why}", operation=operation, path=name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _call(self, operation: str, name: str, call: Callable[[], Result]) -> Result:
        def mapped() -> Result:
            try:
                return call()
            except (FileNotFoundError, IsADirectoryError) as error:
                raise ObjectMissingError(
                    f"{operation} {self.url}/{name} failed: there is no such object", operation=operation, path=name
                ) from error

        return attempt(operation, f"{self.url}/{name}", mapped, timeout_s=self._timeout_s, let_through=(FileExistsError,))


class BucketStorage(ObjectStorage):
    """Objects in a bucket, below a prefix: of a back end with requests of its own.

    Args:
        url: canonical, "scheme://bucket/prefix"; the prefix may be empty.
        timeout_s: see `open_storage`.
    """

    def __init__(self, url: str, *, timeout_s: float = 60.0):
        super().__init__(url, timeout_s=timeout_s)
        self._bucket_name, _, self._prefix = self._root.partition("/")

    def _key(self, name: str) -> str:
        check_name(name)
        return f"{self._prefix}/{name}" if self._prefix else name

    def _folder(self, name: str) -> str:
        """What begins the keys of all that lies in a folder; "" is the root."""
        path = self._key(name) if name else self._prefix
        return f"{path}/" if path else ""
