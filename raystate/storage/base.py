"""What every storage backend can do, and the errors it raises.

Names are relative to the storage's URL, with "/" between components. An object is immutable once created: there is no overwrite.
The one primitive that decides anything is `create` (create-once).
"""

from __future__ import annotations

import abc
import dataclasses
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from raystate.core.formats.errors import StorageError
from raystate.machine.checksum import crc32c
from raystate.machine.threads import map_in_threads

READERS = 4  # objects that are read through at a time

TEMPORARY_PREFIX = ".raystate-tmp-"  # of files that a directory backend is still writing; never listed


class ObjectExistsError(StorageError):
    """The name is taken. It may have been taken by this very call if its answer was lost: read it back to know."""


class ObjectMissingError(StorageError):
    """There is no object (or, for `rename_tree`, no folder) of that name."""


class ObjectChangedError(StorageError):
    """The object is not of the generation that the caller looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object, or a folder (its name ends in "/", size 0). `generation` is opaque: equal means the same object."""

    name: str
    size: int  # bytes
    generation: str = ""
    crc32c: int | None = None  # of its bytes, where the storage told it
    digest: str = ""  # see core.formats.tree.DataObject; empty where the storage did not tell it

    @property
    def is_folder(self) -> bool:
        return self.name.endswith("/")


Listing: TypeAlias = list[ObjectInfo]


def check_name(name: str) -> str:
    """Return `name` if it is a relative, normalized name that stays inside the storage.

    Raises:
        StorageError: it is empty, absolute, contains "", "." or ".." as a component, a NUL, or is reserved for temporary files.
    """
    parts = name.split("/")
    if any(part in ("", ".", "..") or part.startswith(TEMPORARY_PREFIX) for part in parts) or "\0" in name:
        raise StorageError(f"not a valid object name: {name!r}", operation="name", path=name)
    return name


class Storage(abc.ABC):
    """Objects under one URL. Every method raises StorageError (naming `operation` and `path`) when it fails for good.

    Wrappers (fault injection, counting) subclass `raystate.storage.wrapping.StorageWrapper`.
    """

    url: str  # canonical
    is_directory: bool  # True: folders can be renamed, and files must be fsynced; False: an object store

    @abc.abstractmethod
    def create(self, name: str, data: bytes) -> None:
        """Create-once: the object appears whole and durable, or not at all.

        Raises:
            ObjectExistsError: the name is taken (perhaps by this call, see there).
            StorageError: unknown outcome; it may even appear later.
        """

    def create_or_same(self, name: str, data: bytes) -> bool:
        """Like `create`, but an object of equal bytes is success: the answer to a lost acknowledgement and to a second publisher.

        Returns:
            Whether this call has made it; False where that may have been another one's.

        Raises:
            ObjectExistsError: the name is taken by other bytes.
        """
        try:
            self.create(name, data)
        except StorageError as error:
            try:
                found = self.read(name)
            except StorageError as unread:  # then nothing says what has the name
                told = isinstance(error, ObjectExistsError) and not isinstance(unread, ObjectMissingError)
                raise (unread if told else error) from None
            if found != data:
                raise ObjectExistsError(
                    f"{self.url}/{name} exists with other bytes ({len(found)} bytes, expected {len(data)})",
                    operation="create", path=name, expected=len(data), got=len(found),
                ) from error  # fmt: skip
            self.fsync_tree(name)  # it is there; that it stays is what may have failed, or its writer died before
            return False
        return True

    @abc.abstractmethod
    def read(self, name: str) -> bytes:
        """The object's bytes. Raises ObjectMissingError."""

    @abc.abstractmethod
    def exists(self, name: str) -> bool:
        """Whether there is an object (not a folder) of that name."""

    @abc.abstractmethod
    def stat(self, name: str) -> ObjectInfo:
        """Raises ObjectMissingError."""

    def find(self, name: str) -> bytes | None:
        """The object's bytes; None if there is none."""
        try:
            return self.read(name)
        except ObjectMissingError:
            return None

    def size(self, name: str) -> int | None:
        """How many bytes the object has; None if there is none."""
        try:
            return self.stat(name).size
        except ObjectMissingError:
            return None

    def generation(self, name: str) -> str | None:
        """What tells the object from another one that is put in its place; None if there is none."""
        try:
            return self.stat(name).generation
        except ObjectMissingError:
            return None

    @abc.abstractmethod
    def list(self, prefix: str = "", recursive: bool = True) -> Listing:
        """What lies in the folder `prefix` ("" is the root), sorted by name; empty if there is no such folder.

        Args:
            prefix: a folder, not a string prefix: "12" does not list "1200/…".
            recursive: True: all objects below it, no folders. False: its objects and its folders.
        """

    def checksum(self, name: str) -> int:
        """crc32c of the object's bytes, read now. Raises ObjectMissingError."""
        return self.checksums(name)[0]

    def checksums(self, name: str) -> tuple[int, str]:
        """(crc32c, digest) of the object's bytes, read now. Raises ObjectMissingError."""
        data = self.read(name)
        return crc32c(data), f"crc32:{zlib.crc32(data):08x}"

    def inventory(self, prefix: str) -> Listing:
        """All objects below a folder, as `list` gives them, each with the checksums of the bytes that are stored now.

        A bucket keeps these checksums; a directory is read through.
        """
        infos = self.list(check_name(prefix))
        return map_in_threads(self.with_checksums, infos, threads=READERS, name="raystate-read-back")

    def with_checksums(self, info: ObjectInfo) -> ObjectInfo:
        """The same with its checksums; read through if the storage did not tell them. Raises ObjectMissingError."""
        if info.crc32c is not None:
            return info
        crc, digest = self.checksums(info.name)
        return dataclasses.replace(info, crc32c=crc, digest=digest)

    @abc.abstractmethod
    def delete(self, name: str, generation: str | None = None) -> bool:
        """Delete one object; False if it is absent.

        Raises:
            ObjectChangedError: `generation` is given and the object is of another one.
        """

    def delete_all(self, infos: Sequence[ObjectInfo]) -> None:
        """Delete objects, each if it is still of its generation; absent is fine. What fails doesn't keep the others.

        Raises:
            StorageError: names the first that could not be deleted, is of its class, and says how many more.
        """
        failed: list[StorageError] = []
        for info in infos:
            try:
                self.delete(info.name, info.generation or None)
            except StorageError as error:
                failed.append(error)
        if failed:
            more = f" ({len(failed) - 1} more of {len(infos)} failed)" if len(failed) > 1 else ""
            raise type(failed[0])(f"{failed[0].message}{more}", **failed[0].details) from failed[0]

    @abc.abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Delete the folder and everything in it, in no particular order; absent is fine."""

    @abc.abstractmethod
    def copy(self, source: str, target: str) -> None:
        """Copy one object; a target that exists is taken for an earlier copy. Raises ObjectMissingError."""

    @abc.abstractmethod
    def kvstore(self, prefix: str) -> dict[str, Any]:
        """The TensorStore kvstore spec of a folder, its path ending in "/"."""

    # Directories only: an object store raises StorageError (local_path, rename_tree) or has nothing to do (fsync_tree, sweep).

    @abc.abstractmethod
    def local_path(self, name: str) -> Path:
        """The absolute path of a name ("" is the root)."""

    @abc.abstractmethod
    def fsync_tree(self, prefix: str) -> None:
        """Make the folder durable: its files, then its directories bottom-up, then the directories above it up to the root.

        An absent folder is fine: then its absence becomes durable.
        """

    @abc.abstractmethod
    def rename_tree(self, source: str, target: str) -> None:
        """Rename a folder atomically and durably.

        Raises:
            ObjectMissingError: there is no `source`.
            ObjectExistsError: there is a `target`, and it is not an empty folder.
        """

    @abc.abstractmethod
    def sweep(self, prefix: str) -> int:
        """Remove the temporary files below a folder that dead writers left. A live writer notices and writes its file again.

        Returns:
            the number of files removed.
        """

    @abc.abstractmethod
    def self_test(self) -> None:
        """Prove below `.raystate` that this storage has what the commit protocol stands on, and leave nothing that a run has not.

        Raises:
            StorageError: it has not; names the operation, the path and what to do.
            ConfigError: a file stands where its directory, or one above it, has to be.
        """
