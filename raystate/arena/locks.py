"""Whole-file locks that end with their process, whatever ended it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

# A forked child shares its parent's open files and so would keep the parent's locks alive after the parent's death.
_held: set[FileLock] = set()


class FileLock:
    """A `flock` on a file, held from construction to `release()` or to the end of the process."""

    def __init__(self, fd: int, path: Path):
        self._fd = fd
        self.path = path
        _held.add(self)

    @classmethod
    def take(cls, path: Path, *, shared: bool, create: bool = False, timeout_s: float = 0.0) -> FileLock | None:
        """Take the lock, or return None when somebody else still holds it after `timeout_s` seconds.

        A lock on a file that was removed or replaced meanwhile guards nothing; it is taken anew on what is there now.

        Raises:
            FileNotFoundError: there is no such file and `create` is False, or its directory is gone.
        """
        deadline_s = time.monotonic() + timeout_s
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        while True:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC if path.is_dir() else flags, 0o600)
            try:
                fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                if time.monotonic() >= deadline_s:
                    return None
                time.sleep(0.01)
                continue
            if _is_file(fd, path):
                return cls(fd, path)
            os.close(fd)

    @property
    def held(self) -> bool:
        return self._fd >= 0

    def write(self, data: bytes) -> None:
        """Leave a note for those who find the lock taken, or find it free and ask who had it."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, data, 0)

    def release(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            _held.discard(self)
            os.close(fd)

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def is_free(path: Path) -> bool:
    """Whether nobody holds any lock on the file. Takes it exclusively for a moment, so that holders retry for a little while."""
    try:
        lock = FileLock.take(path, shared=False)
    except FileNotFoundError:
        return True
    if lock is None:
        return False
    lock.release()
    return True


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
