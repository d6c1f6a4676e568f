"""Where an export goes: files that are all there in the end, or none of them as far as the place allows.

A local place gets its files under a temporary name and then renamed. An object store shows an object when it is complete; there the
files of a failed export are removed again, the one that readers look for first being written last. An archive is written under a
temporary name, where the file that it is lies on a local disk.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import logging
import os
import secrets
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raystate.core.formats.errors import ConfigError, StorageError
from raystate.machine.checksum import crc32c
from raystate.storage import posix
from raystate.transfer.urls import CHAIN, local_path, open_files, refuse_existing, split, storage_errors

logger = logging.getLogger("raystate")

PART_BYTES = 16 << 20  # read back at a time
TEMPORARY = ".raystate-export-"  # begins the name of a folder that an export still writes

Chunk = bytes | np.ndarray  # an array is uint8 and contiguous


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file of an export. `name` is relative to the place."""

    name: str
    size: int
    crc32c: int


class ExportPlace(abc.ABC):
    """A folder at some URL. As a context manager: its files are discarded unless `commit` has been
    called.

    Args:
        url: of the folder.
        tops: what the export will create in it, files or folders.
    """

    def __init__(self, url: str, tops: Iterable[str]):
        self.url = url
        self.tops = list(tops)
        self.files: list[WrittenFile] = []
        self._committed = False

    def __enter__(self) -> ExportPlace:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._committed:
            self._discard()

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        """Write one file. Raises StorageError."""
        crc = size = 0
        with storage_errors("write", f"{self.url}/{name}"), self._create(name) as file:
            for chunk in chunks:
                file.write(chunk if isinstance(chunk, bytes) else chunk.data)
                crc, size = crc32c(chunk, crc), size + len(chunk)
        self.files.append(WrittenFile(name=name, size=size, crc32c=crc))

    def complete(self, *, verify: bool, on_bytes: Callable[[int], None]) -> None:
        """Finish what was written, read it back if wanted, and put it in its place.

        Args:
            verify: read every file back and compare.
            on_bytes: called with the bytes of each part that was read back.

        Raises:
            StorageError: the bytes there differ from those written; or storage failed.
            ConfigError: somebody else has put something in the place meanwhile.
        """
        with storage_errors("finish", self.url):
            self._close()
        if verify:
            for file in self.files:
                self._verify(file, on_bytes)
        with storage_errors("finish", self.url):
            self._commit()
        self._committed = True

    def _verify(self, file: WrittenFile, on_bytes: Callable[[int], None]) -> None:
        path, crc, size = f"{self.url}/{file.name}", 0, 0
        with storage_errors("read back", path), self._open(file.name) as opened:
            while part := opened.read(PART_BYTES):
                crc, size = crc32c(part, crc), size + len(part)
                on_bytes(len(part))
        if (size, crc) != (file.size, file.crc32c):
            what = f"{size} bytes with crc32c {crc:08x} instead of {file.size} with {file.crc32c:08x}"
            raise StorageError(f"{path} was read back as {what}; nothing was left there", operation="verify", path=path)

    @abc.abstractmethod
    def _create(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A file to write to; what it holds counts only if the block ends without an error."""

    @abc.abstractmethod
    def _open(self, name: str) -> Any:
        """A written file, to read."""

    def _close(self) -> None:  # noqa: B027 - most have nothing to do
        """Everything is written."""

    @abc.abstractmethod
    def _commit(self) -> None:
        """Put everything in its place."""

    @abc.abstractmethod
    def _discard(self) -> None:
        """Remove everything. Raises nothing."""


def open_place(folder_url: str, tops: Iterable[str]) -> ExportPlace:
    """The folder at a URL, as a place for an export.

    Raises:
        ConfigError: one of `tops` exists there already, or the URL can't be opened.
        StorageError: it can't be reached.
    """
    path = local_path(folder_url)
    if path is not None:
        return LocalPlace(path, tops)
    return ArchivePlace(folder_url, tops) if CHAIN in folder_url else RemotePlace(folder_url, tops)


class LocalPlace(ExportPlace):
    """A directory of this machine. Everything lies in a temporary folder of it until the end."""

    def __init__(self, folder: Path, tops: Iterable[str]):
        super().__init__(str(folder), tops)
        self._folder = folder
        if os.path.lexists(folder) and not folder.is_dir():
            raise refuse_existing(str(folder.parent), folder.name)
        for top in self.tops:
            if os.path.lexists(folder / top):
                raise refuse_existing(self.url, top)
        self.staging = folder / f"{TEMPORARY}{secrets.token_hex(4)}"
        self._made = posix.absent_folders(str(self.staging))
        with storage_errors("create", str(self.staging)):
            try:
                self.staging.mkdir(parents=True)
            except BaseException:
                self._discard()
                raise

    def _create(self, name: str) -> contextlib.AbstractContextManager[Any]:
        return self._created(self.staging / name)

    @contextlib.contextmanager
    def _created(self, path: Path) -> Iterator[Any]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())

    def _open(self, name: str) -> Any:
        return (self.staging / name).open("rb")

    def _commit(self) -> None:
        moved: list[Path] = []
        try:
            for folder, _, _ in os.walk(self.staging, topdown=False):
                posix.fsync(folder)
            for top in self.tops:
                self._move(top)
                moved.append(self._folder / top)
            posix.fsync(str(self._folder))
        except BaseException:
            for path in moved:
                _remove(path)
            raise
        _remove(self.staging)

    def _move(self, top: str) -> None:
        source, target = self.staging / top, self._folder / top
        try:
            if source.is_dir():
                os.rename(source, target)  # an empty folder gives way, anything else does not
            else:
                os.link(source, target)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
                raise refuse_existing(self.url, top) from error
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            os.rename(source, target)  # no hard links here

    def _discard(self) -> None:
        _remove(self.staging)
        for folder in self._made:
            with contextlib.suppress(OSError):  # somebody else has put something there
                os.rmdir(folder)


class RemotePlace(ExportPlace):
    """A folder of any file system that fsspec knows. Files are written under their own names, in order."""

    def __init__(self, url: str, tops: Iterable[str]):
        super().__init__(url.rstrip("/"), tops)
        self._fs, root = open_files(url, field="dst")
        self._root = root.rstrip("/")
        self._begun: list[str] = []
        for top in self.tops:
            with storage_errors("look for", f"{self.url}/{top}"):
                taken = self._fs.exists(self._path(top))
            if taken:
                raise refuse_existing(self.url, top)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    @contextlib.contextmanager
    def _create(self, name: str) -> Iterator[Any]:
        path = self._path(name)
        if "/" in path:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._begun.append(path)
        file = self._fs.open(path, "wb")
        try:
            yield file
        except BaseException:
            _abandon(file)
            raise
        file.close()

    def _open(self, name: str) -> Any:
        return self._fs.open(self._path(name), "rb")

    def _commit(self) -> None:
        pass

    def _discard(self) -> None:
        found: dict[str, Any] = {}
        for top in self.tops:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                found |= self._fs.find(self._path(top), withdirs=True, detail=True)
        folders = {path for path, info in found.items() if info["type"] == "directory"}
        # Of another export to this place the files have the same names: it goes on, or is complete.
        if found.keys() - folders - {self._fs._strip_protocol(path) for path in self._begun}:
            logger.warning("left-overs of an unfinished export stay in %s, where somebody else writes, too", self.url)
            return
        for path in reversed(self._begun):
            with contextlib.suppress(Exception):  # it may never have appeared
                self._fs.rm_file(path)
        for folder in sorted({*folders, *map(self._path, self.tops)}, reverse=True):
            with contextlib.suppress(Exception):
                self._fs.rmdir(folder)


class ArchivePlace(ExportPlace):
    """Inside a new archive: zip://folder::<URL of the file>. The file is the one that is written at its own place."""

    def __init__(self, url: str, tops: Iterable[str]):
        super().__init__(url, tops)
        first, _, outer = url.partition(CHAIN)
        scheme, _, folder = first.partition("://")
        if scheme != "zip":
            text = f"dst: nothing can be written into a {scheme}:// archive; zip://…::… can"
            raise ConfigError(text, field="dst", got=url)
        if CHAIN in outer:
            raise ConfigError(f"dst: {url!r}: an archive in an archive can't be written", field="dst", got=url)
        above, self._name = split(outer)
        if not self._name:
            raise ConfigError(f"dst: {url!r} names no file for the archive; such as zip://::runs.zip", field="dst", got=url)
        self._begin = f"{folder.strip('/')}/".lstrip("/")  # of the names in it
        self._outer = open_place(above, [self._name])  # refuses one that exists
        self._writing = contextlib.ExitStack()
        self._archive: zipfile.ZipFile | None = None

    def _create(self, name: str) -> contextlib.AbstractContextManager[Any]:
        if self._archive is None:
            file = self._writing.enter_context(self._outer._create(self._name))
            self._archive = self._writing.enter_context(zipfile.ZipFile(file, "w"))
        return self._archive.open(self._begin + name, "w", force_zip64=True)

    def _open(self, name: str) -> Any:
        if self._archive is None:
            self._archive = zipfile.ZipFile(self._outer._open(self._name))
        return self._archive.open(self._begin + name)

    def _close(self) -> None:
        self._writing.close()
        self._archive = None

    def _commit(self) -> None:
        if self._archive is not None and self._archive.fp is not None:
            self._archive.fp.close()
        self._outer._commit()
        self._outer._committed = True

    def _discard(self) -> None:
        given_up = StorageError("given up", operation="write", path=self.url)
        with contextlib.suppress(Exception):
            self._writing.__exit__(StorageError, given_up, None)
        self._outer._discard()


def _abandon(file: Any) -> None:
    """Give up a file that is being written: closing it as usual would show what it has."""
    with contextlib.suppress(Exception):
        if hasattr(file, "discard"):
            file.discard()
            file.closed = True
        else:
            file.close()


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        posix.remove_tree(str(path))
