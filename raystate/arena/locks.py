"""Whole-file locks that end with their process, also if it is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import weakref
from pathlib import Path

from raystate.arena.files import open_regular
from raystate.core.formats.errors import RaystateError
from raystate.machine.own_time import own_time
from raystate.waits import FILE_S

# A forked child shares its parent's open files and so would keep the parent's locks alive after the parent's death.
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


class FileLock:
    """A `flock` on a file, held until `release()`, or until this object or the process is gone."""

    def __init__(self, fd: int, path: Path):
        self._fd = fd
        self.path = path
        _held.add(self)

    @classmethod
    def take(
        cls, path: Path, *, shared: bool, create: bool = False, directory: bool = False, timeout_s: float = 0.0
    ) -> FileLock | None:
        """Take the lock, or return None when somebody else still holds it after `timeout_s` seconds.

        A lock on a file that was removed or replaced meanwhile guards nothing; it is taken anew on what is there now.

        Args:
            directory: `path` is one, whose entries the lock guards.

        Raises:
            FileNotFoundError: there is no such file and `create` is False, or its directory is gone.
            RaystateError: the entry of that name is neither a file nor, as asked for, a directory.
        """
        deadline_s = own_time() + timeout_s
        while True:
            fd = _open_directory(path) if directory else open_regular(path, os.O_RDWR | (os.O_CREAT if create else 0))
            lock = cls(fd, path)
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
                if _is_file(fd, path):
                    return lock
            except BlockingIOError:
                lock.release()
                if own_time() >= deadline_s:
                    return None
                time.sleep(0.01)
                continue
            except BaseException:
                lock.release()
                raise
            lock.release()
            if own_time() >= deadline_s + FILE_S:
                return None  # somebody does nothing else

    @property
    def held(self) -> bool:
        return self._fd >= 0

    @property
    def is_there(self) -> bool:
        """Whether it is held, and on the file that lies at its path now."""
        return self.held and _is_file(self._fd, self.path)

    def write(self, data: bytes) -> None:
        """Leave a note for those who find the lock taken, or find it free and ask who had it."""
        os.pwrite(self._fd, data, 0)  # first: where there is no room, one of the same length still has its place
        os.ftruncate(self._fd, len(data))

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _held.discard(self)
            os.close(fd)

    def __del__(self) -> None:  # its taker was interrupted before it could keep it
        with contextlib.suppress(Exception):
            self.release()

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except NotADirectoryError:
        raise RaystateError(f"{path} is not a directory; remove it or set another arena_dir", path=str(path)) from None


def _is_file(fd: int, path: Path) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    here = os.fstat(fd)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def _drop_in_child() -> None:
    for lock in list(_held):
        lock.release()  # closes the child's copy only: the parent's stays locked


os.register_at_fork(after_in_child=_drop_in_child)
