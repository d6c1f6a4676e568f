"""A directory on a local or shared POSIX file system.

Create-once is `link()` of a finished, fsynced temporary file to the name: atomic on local file systems and on NFS, and it says
EEXIST instead of replacing. Mounts without it are refused by `self_test`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from raystate.core.formats.errors import ConfigError, StorageError
from raystate.machine.memory import MOST_READ_BYTES, TooLargeError
from raystate.storage import posix
from raystate.storage.attempts import attempt, describe, in_the_way
from raystate.storage.base import (
    TEMPORARY_PREFIX,
    Listing,
    ObjectChangedError,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    Storage,
    check_name,
)
from raystate.storage.names import SELF_TEST, STATE

Result = TypeVar("Result")

_FOREIGN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL)  # what fsync of other people's directories may say
_SELF_TESTS = 3
_UNFIT = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL)  # what mounts say that lack it
_CREATE_TRIES = 5  # a sweep or a removal of the folder can take the temporary file away; it will not do so again and again


class DirectoryStorage(Storage):
    """Storage in a directory, which is created by the first write.

    Args:
        url: canonical, "file:///…".
        timeout_s: see `open_storage`.
    """

    is_directory = True

    def __init__(self, url: str, *, timeout_s: float = 60.0):
        self.url = url
        self._root = url.removeprefix("file://")
        self._timeout_s = timeout_s
        self._durable_folders: set[tuple[str, int, int]] = set()  # (path, device, inode)

    def __repr__(self) -> str:
        return f"DirectoryStorage({self.url!r})"

    # ------------------------------------------------------------ objects

    def create(self, name: str, data: bytes) -> None:
        path = self._path(name, "change")

        def create() -> None:
            self._make_parents(path)
            posix.link_once(path, data)

        for tries_left in reversed(range(_CREATE_TRIES)):
            try:
                return self._call("create", path, create)
            except ObjectMissingError:
                if not tries_left:
                    raise

    def read(self, name: str) -> bytes:
        path = self._path(name)

        def read() -> bytes:
            with open(posix.open_regular(path), "rb") as file:
                if (size := os.fstat(file.fileno()).st_size) > MOST_READ_BYTES:
                    raise TooLargeError(
                        f"read {path} failed: it has {size:,} bytes; a file that is read whole has at most {MOST_READ_BYTES:,}",
                        operation="read", path=path, expected=MOST_READ_BYTES, got=size,
                    )  # fmt: skip
                return file.read()

        return self._call("read", path, read)

    def exists(self, name: str) -> bool:
        try:
            return not self.stat(name).is_folder
        except ObjectMissingError:
            return False

    def stat(self, name: str) -> ObjectInfo:
        path = self._path(name)
        status = self._call("stat", path, lambda: os.stat(path))
        if not posix.is_file(status):
            raise ObjectMissingError(f"{path} is not an object", operation="stat", path=path)
        return ObjectInfo(name=name, size=status.st_size, generation=posix.generation(status))

    def list(self, prefix: str = "", recursive: bool = True) -> Listing:
        path = self._path(prefix) if prefix else self._root
        below = f"{prefix}/" if prefix else ""
        return self._call("list", path, lambda: sorted(posix.scan(path, below, recursive), key=lambda info: info.name))

    def checksums(self, name: str) -> tuple[int, str]:
        path = self._path(name)
        return self._call("read", path, lambda: posix.checksums(path))

    def delete(self, name: str, generation: str | None = None) -> bool:
        path = self._path(name, "remove")

        def delete() -> bool:
            try:
                if generation is not None:
                    got = posix.generation(os.stat(path, follow_symlinks=STATE not in name.split("/")))
                    if got != generation:
                        raise ObjectChangedError(
                            f"delete {path} refused: it is another object now", operation="delete", path=path,
                            expected=generation, got=got,
                        )  # fmt: skip
                os.unlink(path)
            except (*posix.ABSENT, IsADirectoryError):  # a folder is no object
                return False
            posix.fsync(os.path.dirname(path))
            return True

        return self._call("delete", path, delete)

    def delete_tree(self, prefix: str) -> None:
        path = self._path(prefix, "remove")
        self._call("delete_tree", path, lambda: posix.remove_tree(path))

    def copy(self, source: str, target: str) -> None:
        self.create_or_same(target, self.read(source))

    def kvstore(self, prefix: str) -> dict[str, Any]:
        return {"driver": "file", "path": f"{self._path(prefix) if prefix else self._root}/"}

    # ------------------------------------------------------------ folders

    def local_path(self, name: str) -> Path:
        return Path(self._path(name) if name else self._root)

    def fsync_tree(self, prefix: str) -> None:
        path = self._path(prefix)

        def fsync() -> None:
            # Bottom-up, so that no directory entry is durable before what it names.
            for folder, _, files in os.walk(path, topdown=False, onerror=posix.unless_missing):
                for file in files:
                    posix.fsync(os.path.join(folder, file))
                posix.fsync(folder)
            posix.fsync_above(path, self._root)

        self._call("fsync", path, fsync)

    def rename_tree(self, source: str, target: str) -> None:
        source_path, target_path = self._path(source, "change"), self._path(target, "change")

        def rename() -> None:
            if not os.path.lexists(source_path):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source_path)
            # rename() replaces a folder only if that is empty: so one that another program has made
            # there is no obstacle.
            if os.path.lexists(target_path) and (os.path.islink(target_path) or not os.path.isdir(target_path)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target_path)
            self._make_parents(target_path)
            os.rename(source_path, target_path)
            posix.fsync(os.path.dirname(target_path))
            posix.fsync(os.path.dirname(source_path))

        self._call("rename", f"{source_path} -> {target_path}", rename)

    def sweep(self, prefix: str) -> int:
        path = self._path(prefix, "change") if prefix else self._root

        def sweep() -> int:
            removed = 0
            for folder, _, files in os.walk(path):
                for file in files:
                    if file.startswith(TEMPORARY_PREFIX):
                        removed += posix.unlink_quietly(os.path.join(folder, file))
            return removed

        return self._call("sweep", path, sweep)

    def self_test(self) -> None:
        if why := in_the_way(self._path(STATE)):
            raise ConfigError(f"storage: {self.url} can be no folder: {why}", field="storage", got=self.url)
        for info in self.list(STATE, recursive=False):  # a link there is said now, not at the first retirement
            self._path(info.name.rstrip("/"))
        absent = posix.absent_folders(self._path(STATE))
        try:
            self._self_tests()
        except StorageError:
            for folder in absent:  # a refused run leaves nothing there
                with contextlib.suppress(OSError):
                    os.rmdir(folder)
            raise

    # ------------------------------------------------------------ inside

    def _self_tests(self) -> None:
        for tries_left in reversed(range(_SELF_TESTS)):
            scratch = f"{STATE}/{SELF_TEST}{secrets.token_hex(4)}"
            try:
                return self._self_test(scratch)
            except StorageError as error:
                # A gc beside it took the folder for one that a dead start has left; it will not do so again and again.
                taken = not any(os.path.lexists(self._path(f"{scratch}/{name}")) for name in ("once", "renamed"))
                if taken and tries_left:
                    continue
                if not os.path.isdir(self._path(scratch)):  # nothing can be made there at all
                    raise StorageError(f"{self.url} can't be written to: {error.message}", **error.details) from error
                if error.errno in _UNFIT or isinstance(error, ObjectMissingError):  # the second: no folder can be made there
                    raise self._unfit(str(error.operation), str(error.path), error.message) from error
                raise
            finally:
                try:
                    self.delete_tree(scratch)
                except StorageError:  # the failure that is already on its way says more
                    pass

    def _make_parents(self, path: str) -> None:
        """Create the directories above `path`, durably; those known to be durable cost one stat.

        One that is there need not be durable: its maker may have died before its fsync. So each is
        fsynced once, up to "/".
        """
        unsure: list[tuple[str, bool]] = []
        folder = os.path.dirname(path)
        while folder != "/" and (identity := posix.identity(folder)) not in self._durable_folders:
            unsure.append((folder, identity is not None))
            folder = os.path.dirname(folder)
        for folder, is_there in reversed(unsure):
            if not is_there:
                try:
                    os.mkdir(folder)
                except FileExistsError:  # another writer was faster
                    pass
            if not os.path.isdir(folder):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), folder)
            try:
                posix.fsync(os.path.dirname(folder))
            except OSError as error:
                # Somebody else's directory above the run's, which we may only pass through.
                if not is_there or folder.startswith(f"{self._root}/") or error.errno not in _FOREIGN:
                    raise
            if (identity := posix.identity(folder)) is not None:
                self._durable_folders.add(identity)

    def _self_test(self, scratch: str) -> None:
        # Probed only after a create made the folder, so that an unwritable root is reported as what it is.
        self.create(f"{scratch}/once/first", b"1")
        try:
            self.create(f"{scratch}/once/first", b"2")
        except ObjectExistsError:
            pass
        else:
            raise self._unfit("link", f"{scratch}/once/first", "a second link() to a taken name succeeded")
        if (got := self.read(f"{scratch}/once/first")) != b"1":
            raise self._unfit("read", f"{scratch}/once/first", f"it was created as b'1' and reads as {got!r}")
        self.create(f"{scratch}/full/first", b"1")
        self._refuses_rename(f"{scratch}/once", f"{scratch}/full")
        self.fsync_tree(scratch)
        self.rename_tree(f"{scratch}/once", f"{scratch}/renamed")
        if self.exists(f"{scratch}/once/first") or not self.exists(f"{scratch}/renamed/first"):
            raise self._unfit("rename", f"{scratch}/once", "a renamed folder is not where it should be")

    def _refuses_rename(self, source: str, target: str) -> None:
        source_path, target_path = self._path(source), self._path(target)
        try:
            os.rename(source_path, target_path)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return
            raise self._unfit("rename", target_path, describe(error)) from error
        raise self._unfit("rename", target_path, "a folder that is not empty was replaced")

    def _unfit(self, operation: str, path: str, why: str) -> StorageError:
        return StorageError(
            f"{self.url} cannot hold a run: {operation} {path}: {why}. Mounts without create-once, exclusive renames and fsync"
            " would lose steps silently; use a local or NFS file system, or gs://",
            operation=operation, path=path,
        )  # fmt: skip

    def _path(self, name: str, access: Literal["read", "change", "remove"] = "read") -> str:
        """The path of a name, asked for by everything that is done to one. The root may be a link;
        below it none is followed to change something, and in the run's own folder none at all.

        Args:
            name: relative to the root.
            access: "remove": what has the name may be a link, which goes.

        Raises:
            StorageError: a link is there; names it. (test_links.test_nothing_outside_the_run_is_touched)
        """
        parts = check_name(name).split("/")
        is_own = STATE in parts
        first = 0 if access != "read" else parts.index(STATE) if is_own else len(parts)
        last = len(parts) if is_own and access != "remove" else len(parts) - 1
        for end in range(first, last):
            if os.path.islink(link := "/".join((self._root, *parts[: end + 1]))):
                raise StorageError(
                    f"{access} {self._root}/{name} refused: {link} is a symbolic link, and none is followed there: put what it points "
                    "to in its place, or remove it. To move a run to another disk, move and link its whole folder",
                    operation=access, path=link,
                )  # fmt: skip
        return f"{self._root}/{name}"

    def _call(self, operation: str, path: str, call: Callable[[], Result]) -> Result:
        def mapped() -> Result:
            try:
                return call()
            except posix.ABSENT as error:
                if operation in ("create", "rename") and error.errno == errno.ENOTDIR:
                    raise  # not absent: a file stands where a folder is needed
                raise ObjectMissingError(
                    f"{operation} {path} failed: {describe(error)}", operation=operation, path=path, errno=error.errno
                ) from error
            except IsADirectoryError as error:
                kind = ObjectMissingError if operation == "read" else StorageError
                raise kind(f"{operation} {path} failed: it is a folder", operation=operation, path=path) from error
            except OSError as error:
                if operation in ("create", "rename") and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise ObjectExistsError(f"{operation} {path} failed: it exists", operation=operation, path=path) from error
                raise

        return attempt(operation, path, mapped, timeout_s=self._timeout_s)
