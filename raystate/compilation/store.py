"""A folder of compiled programs, for all processes of one user on one node.

A program's file is complete or absent: it appears by a rename, and carries a digest, because loading a damaged executable can end the
process. Nothing is raised here: after any failure a program is compiled once more.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import secrets
import shutil
import stat
import time
from pathlib import Path

from raystate.waits import ABANDONED_S

logger = logging.getLogger("raystate")

FORMAT = b"raystate-program-1\n"
DIGEST_BYTES = 16
SUFFIX = ".program"
MIN_FREE_SHARE = 0.05  # of the disk; with less, nothing is added: Ray stops placing objects on a disk that is 95% full
LOOK_EVERY_BYTES = 64 << 20  # added by this process between two looks at the folder's size
LOOK_EVERY_FILES = 128


class ProgramStore:
    """Programs by key.

    Args:
        folder: only this user's; see `node_folder`.
        cap_bytes: the least recently used programs go when all together are larger. Checked now and then: the folder may be larger by
            `LOOK_EVERY_BYTES` for each process that writes.
    """

    def __init__(self, folder: Path, cap_bytes: int):
        self.folder = folder
        self._cap_bytes = cap_bytes
        self._files_left = self._bytes_left = 0  # until the next look
        self._given: set[str] = set()  # keys of programs that this process was given
        self._told = False

    def get(self, key: str) -> bytes | None:
        """The program; None if there is none, or a damaged one, which is removed."""
        path = self._path(key)
        try:
            held = path.read_bytes()
        except OSError:
            return None
        head = len(FORMAT) + DIGEST_BYTES
        value = held[head:]
        if held[:head] != FORMAT + _digest(key, value):
            logger.warning("a compiled program in %s is damaged: it is removed, and compiled again", self.folder)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the order in which programs go
        self._given.add(key)
        return value

    def put(self, key: str, value: bytes) -> bool:
        """Keep it; whether it is there now. One that this process was given before can't have been of use: it is replaced."""
        path = self._path(key)
        if os.path.exists(path) and key not in self._given:  # Path.exists raises some errors
            return True
        self._given.discard(key)
        temporary = self.folder / f".{secrets.token_hex(8)}"
        try:
            disk = shutil.disk_usage(self.folder)
            if disk.free - len(value) < MIN_FREE_SHARE * disk.total:
                return self._not_kept("the disk is nearly full")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                file.write(FORMAT + _digest(key, value))
                file.write(value)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return self._not_kept(error.strerror or str(error))
        self._files_left -= 1
        self._bytes_left -= len(value)
        if self._files_left < 0 or self._bytes_left < 0:
            self._files_left, self._bytes_left = LOOK_EVERY_FILES, LOOK_EVERY_BYTES
            self.trim()
        return True

    def trim(self) -> None:
        """Remove what is too much, and what a killed process had half written. Other processes may do the same at once."""
        found: list[tuple[float, int, Path]] = []
        # XLA keeps files of its own below it, on GPUs. Files that go meanwhile are passed over:
        # rglob would raise.
        for folder, _, names in os.walk(self.folder):
            for path in (Path(folder, name) for name in names):
                with contextlib.suppress(OSError):
                    facts = path.lstat()
                    if path.name.startswith(".") and facts.st_mtime < time.time() - ABANDONED_S:
                        path.unlink()
                        continue
                    found.append((facts.st_mtime, facts.st_size, path))
        excess = sum(size for _, size, _ in found) - self._cap_bytes
        for _, size, path in sorted(found):
            if excess <= 0:
                return
            with contextlib.suppress(OSError):
                path.unlink()
                excess -= size

    def _path(self, key: str) -> Path:
        # The key's first part is the name of the user's function, which may be longer than a file's name can be.
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}{SUFFIX}"

    def _not_kept(self, reason: str) -> bool:
        if not self._told:
            logger.warning("compiled programs are not kept in %s (%s): a restart compiles them again", self.folder, reason)
        self._told = True
        return False


def _digest(key: str, value: bytes) -> bytes:
    digest = hashlib.blake2b(key.encode(), digest_size=DIGEST_BYTES)
    digest.update(value)
    return digest.digest()


def node_folder(parent: Path) -> Path | None:
    """This user's folder of compiled programs on this node, made if it is not there.

    A process that can write there can run code in the trainers: None if it isn't this user's alone,
    or can't be made.

    Args:
        parent: a folder of this node that outlives the trainers. Nodes that share it get folders of their own if their CPUs differ.
    """
    path = parent / f"raystate-programs-{os.getuid()}-{_cpu()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        logger.warning("compiled programs are not kept: %s: %s", path, error.strerror)
        return None
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        logger.warning("compiled programs are not kept: %s is not a directory of this user's alone", path)
        return None
    return path


def _cpu() -> str:
    """Short, and different for machines whose CPUs have different instructions."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        first = text.split("\n\n", 1)[0]
        lines = [line for line in first.splitlines() if line.partition("\t")[0] in ("flags", "Features", "model name", "CPU part")]
    return hashlib.blake2b("\n".join([platform.machine(), *lines]).encode(), digest_size=4).hexdigest()
