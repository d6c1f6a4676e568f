"""What a directory storage does with files: durable, create-once, and calm when somebody else was faster."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import stat
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from raystate.machine.checksum import crc32c
from raystate.storage.base import TEMPORARY_PREFIX, ObjectInfo
from raystate.storage.names import STATE

ABSENT = (FileNotFoundError, NotADirectoryError)  # a file in the place of a folder: what lies "below" it is absent, too
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux's
_BUFFER_BYTES = 1 << 20  # stays in a core's cache between reading and checksumming


def link_once(path: str, data: bytes) -> None:
    """Create a file with this content durably, or raise FileExistsError: the name never shows a part of it."""
    folder = os.path.dirname(path)
    temporary = f"{folder}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            os.fsync(descriptor)
            written = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        try:
            os.link(temporary, path)
        except FileExistsError:
            # NFS repeats a link() whose answer was lost and then reports its own success as EEXIST.
            if not _is_same_file(path, written):
                raise
        fsync(folder)
    finally:
        unlink_quietly(temporary)


def open_regular(path: str) -> int:
    """A descriptor to read a file with. A pipe in its place is no object, and would be waited for without end.

    Raises:
        FileNotFoundError: also for an entry that is neither a file nor a folder.
        OSError: as the system raises it, such as IsADirectoryError.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not is_file(status):
            raise FileNotFoundError(errno.ENOENT, "it is no regular file", path)
        return descriptor
    except BaseException:
        os.close(descriptor)
        raise


def checksums(path: str) -> tuple[int, str]:
    """Those of a file, read into one small buffer: fresh memory of the file's size would cost the most."""
    buffer = np.empty(_BUFFER_BYTES, np.uint8)
    crc = other = 0
    with open(open_regular(path), "rb", buffering=0) as file:
        while got := file.readinto(buffer.data):
            crc, other = crc32c(buffer[:got], crc), zlib.crc32(buffer[:got].data, other)
    return crc, f"crc32:{other:08x}"


def identity(folder: str) -> tuple[str, int, int] | None:
    """What tells a folder from another one that takes its name later; None: it is not there."""
    try:
        status = os.stat(folder)
    except FileNotFoundError:
        return None
    return (folder, status.st_dev, status.st_ino)


def fsync(path: str) -> None:
    """Make a file, or the entries of a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe is refused, not waited for
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def absent_folders(path: str) -> list[str]:
    """A folder and those above it, as far as they are not there; the innermost first."""
    absent: list[str] = []
    while path != "/" and not os.path.isdir(path):
        absent.append(path)
        path = os.path.dirname(path)
    return absent


def exchange(one: str, other: str) -> None:
    """Exchange the names of two files or folders, atomically. Raises OSError: also where the file system or the C library can't."""
    libc = ctypes.CDLL(None, use_errno=True)  # Python has no function for it
    try:
        failed = libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    except AttributeError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), one)


def fsync_above(path: str, root: str) -> None:
    """Make the folders from that of `path` up to `root` durable, as far as they are there."""
    while path not in (root, "/"):
        path = os.path.dirname(path)
        if os.path.isdir(path):
            fsync(path)


def scan(path: str, below: str, recursive: bool, *, followed: tuple[str, ...] = ()) -> Iterator[ObjectInfo]:
    """The objects in a folder, and its folders unless `recursive`; `below` goes before each name.

    Links are followed, but not one that leads to nothing, to itself, or to a folder that it lies in.
    In the run's own folder none is: there a link is an object itself.

    Args:
        followed: the real paths of the links that led here.
    """
    try:
        entries = list(os.scandir(path))
    except ABSENT:
        return
    for entry in entries:
        if entry.name.startswith(TEMPORARY_PREFIX):
            continue
        name = below + entry.name
        # A step that somebody replaced by a symbolic link to elsewhere still lists as a folder.
        follow = STATE not in name.split("/")
        try:
            is_folder = entry.is_dir(follow_symlinks=follow)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            continue
        if is_folder:
            if recursive:
                target = (os.path.realpath(entry.path),) if entry.is_symlink() else ()
                if not target or not _leads_back(target[0], path, followed):
                    yield from scan(entry.path, f"{name}/", recursive, followed=followed + target)
            else:
                yield ObjectInfo(name=f"{name}/", size=0)
            continue
        try:
            status = entry.stat(follow_symlinks=follow)
        except FileNotFoundError:  # deleted since, or a dangling link
            continue
        yield ObjectInfo(name=name, size=status.st_size, generation=generation(status))


def _leads_back(target: str, path: str, followed: tuple[str, ...]) -> bool:
    return any(place == target or place.startswith(f"{target}/") for place in (os.path.realpath(path), *followed))


def remove_tree(path: str) -> None:
    """Remove a folder with all in it, a link to one, or a file that lies where a folder should."""
    if os.path.islink(path) or os.path.isfile(path):  # of a link only our name goes, never what it points to
        unlink_quietly(path)
    elif os.path.lexists(path):
        shutil.rmtree(path, onerror=_unless_absent)
    else:
        return
    fsync(os.path.dirname(path))


def unless_missing(error: OSError) -> None:
    """For os.walk: an entry that is gone by now is no error."""
    if not isinstance(error, ABSENT):
        raise error


def _unless_absent(_function: Any, _path: str, info: Any) -> None:
    if not isinstance(info[1], FileNotFoundError):  # another remover was faster
        raise info[1]


def unlink_quietly(path: str) -> bool:
    """Whether the file was there and is removed."""
    try:
        os.unlink(path)
    except OSError:
        return False
    return True


def is_file(status: os.stat_result) -> bool:
    """Whether it is an ordinary file."""
    return stat.S_ISREG(status.st_mode)


def _is_same_file(path: str, written: os.stat_result) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (written.st_dev, written.st_ino)


def generation(status: os.stat_result) -> str:
    """What tells an object from another one of its name."""
    # Objects are never modified in place: another object of the same name has another inode or, if that was reused, another time.
    return f"{status.st_ino}.{status.st_mtime_ns}"
