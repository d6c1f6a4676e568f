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
import weakref
from pathlib import Path

from raystate.waits import ABANDONED_S

logger = logging.getLogger("raystate")

FORMAT = b"raystate-program-2\n"
DIGEST_BYTES = 16
HEAD_BYTES = len(FORMAT) + DIGEST_BYTES
SUFFIX = ".program"
MIN_FREE_SHARE = 0.05  # of the disk; with less, nothing is added: Ray stops placing objects on a disk that is 95% full
LOOK_EVERY_BYTES = 64 << 20  # added by this process between two looks at the folder's size
LOOK_EVERY_FILES = 128

_NOT_OURS = -1  # as a folder's descriptor: each call with it fails
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class ProgramStore:
    """Programs by key.

    Args:
        folder: only this user's; see `node_folder`. It is held, so that no other one of its name is
            taken for it later.
        cap_bytes: the least recently used programs go when all together are larger. Checked now and then: the folder may be larger by
            `LOOK_EVERY_BYTES` for each process that writes.
    """

    def __init__(self, folder: Path, cap_bytes: int):
        self.folder = folder
        self._at = _held(folder)
        if self._at != _NOT_OURS:
            weakref.finalize(self, os.close, self._at)
        self._cap_bytes = cap_bytes
        self._files_left = self._bytes_left = 0  # until the next look
        self._given: set[str] = set()  # names of programs that this process was given
        self._told = False

    def get(self, key: str) -> bytes | None:
        """The program; None if there is none, or a damaged one, which is removed."""
        name = program_name(key)
        if (held := self.read(name)) is None:
            return None
        with contextlib.suppress(OSError):
            os.utime(_file(name), dir_fd=self._at)  # the order in which programs go
        self._given.add(name)
        return held[HEAD_BYTES:]

    def put(self, key: str, value: bytes) -> bool:
        """Keep it; whether it is there now. One that this process was given before can't have been of use: it is replaced."""
        name = program_name(key)
        if name not in self._given and self.has(name):
            return True
        self._given.discard(name)
        return self.add(name, FORMAT + _digest(name, value), value)

    def read(self, name: str) -> bytes | None:
        """A program's file, for another store; None as in `get`."""
        try:
            with open(os.open(_file(name), _READ, dir_fd=self._at), "rb") as file:
                held = file.read() if _is_ours(os.fstat(file.fileno()), stat.S_IFREG) else b""
        except OSError:
            return None
        if seal_of(name, held) is None:
            logger.warning("a compiled program in %s is damaged: it is removed, and compiled again", self.folder)
            self._remove(_file(name))
            return None
        return held

    def has(self, name: str) -> bool:
        """Whether a file is there."""
        try:
            os.stat(_file(name), dir_fd=self._at, follow_symlinks=False)
        except OSError:
            return False
        return True

    def was_given(self, name: str) -> bool:
        """Whether `get` has given it to this process."""
        return name in self._given

    def add(self, name: str, *parts: bytes) -> bool:
        """Keep a program's file, which is whole; whether it is there now.

        Args:
            parts: its bytes, as `read` gives them.
        """
        temporary, nbytes = f".{secrets.token_hex(8)}", sum(map(len, parts))
        try:
            disk = shutil.disk_usage(self._at)
            if disk.free - nbytes < MIN_FREE_SHARE * disk.total:
                return self._not_kept("the disk is nearly full")
            with open(os.open(temporary, _CREATE, 0o600, dir_fd=self._at), "wb") as file:
                file.writelines(parts)
            os.replace(temporary, _file(name), src_dir_fd=self._at, dst_dir_fd=self._at)
        except OSError as error:
            self._remove(temporary)
            return self._not_kept(error.strerror or str(error))
        self._files_left -= 1
        self._bytes_left -= nbytes
        if self._files_left < 0 or self._bytes_left < 0:
            self._files_left, self._bytes_left = LOOK_EVERY_FILES, LOOK_EVERY_BYTES
            self.trim()
        return True

    def trim(self) -> None:
        """Remove what is too much, and what a killed process had half written. Other processes may do the same at once."""
        if self._at == _NOT_OURS:
            return
        found: list[tuple[float, int, str]] = []
        # On GPUs XLA keeps files of its own below it, which count (test_store.test_what_xla_keeps_there_counts_and_goes).
        # Files and folders that go meanwhile are passed over.
        for folder, _, names, descriptor in os.fwalk(".", dir_fd=self._at):
            for name in names:
                with contextlib.suppress(OSError):
                    facts = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
                    if name.startswith(".") and facts.st_mtime < time.time() - ABANDONED_S:
                        os.unlink(name, dir_fd=descriptor)
                        continue
                    found.append((facts.st_mtime, facts.st_size, os.path.join(folder, name)))
        excess = sum(size for _, size, _ in found) - self._cap_bytes
        for _, size, name in sorted(found):
            if excess <= 0:
                return
            if self._remove(name):
                excess -= size

    def _remove(self, name: str) -> bool:
        try:
            os.unlink(name, dir_fd=self._at)
        except OSError:
            return False
        return True

    def _not_kept(self, reason: str) -> bool:
        if not self._told:
            logger.warning("compiled programs are not kept in %s (%s): a restart compiles them again", self.folder, reason)
        self._told = True
        return False


def program_name(key: str) -> str:
    """What a program of this key is called wherever it is kept. A key begins with the user's function, which may be longer than a name."""
    return hashlib.sha256(key.encode()).hexdigest()


def seal_of(name: str, held: bytes) -> str | None:
    """The digest in a program's file, over its name and all its bytes; None: it is damaged, or another's."""
    seal = held[len(FORMAT) : HEAD_BYTES]
    return seal.hex() if held[:HEAD_BYTES] == FORMAT + _digest(name, memoryview(held)[HEAD_BYTES:]) else None


def _digest(name: str, value: bytes | memoryview) -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=DIGEST_BYTES)
    digest.update(value)
    return digest.digest()


def _file(name: str) -> str:
    return f"{name}{SUFFIX}"


def node_folder(*parents: Path) -> Path | None:
    """This user's folder of compiled programs on this node, made if it is not there.

    A process that can write there, or put another folder in its place, can run code in the
    trainers: None if no parent rules that out, or it isn't this user's alone, or can't be made.

    Args:
        parents: folders of this node that outlive the trainers; the first is taken in which only
            this user can move or remove a folder of this user's. Nodes that share it get folders of
            their own if their CPUs differ.
    """
    safe = [real for parent in parents if os.access(real := parent.resolve(), os.W_OK) and _stays_ours(real)]
    if not safe:
        shown = " and ".join(map(str, parents))
        logger.warning("compiled programs are not kept: other users could put theirs in the place of a folder in %s", shown)
        return None
    path = safe[0] / f"raystate-programs-{os.getuid()}-{cpu()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        logger.warning("compiled programs are not kept: %s: %s", path, error.strerror)
        return None
    if not _is_ours(facts, stat.S_IFDIR) or facts.st_mode & 0o077:
        logger.warning("compiled programs are not kept: %s is not a directory of this user's alone", path)
        return None
    return path


def anybody_can_write(folder: Path) -> bool:
    """Whether a user of this machine, beside this one and those of a folder's group, can put something in the place of a folder.

    Args:
        folder: need not be there yet.
    """
    while not folder.exists():
        folder = folder.parent
    return not _stays_ours(folder.resolve(), writers=stat.S_IWOTH)


def _stays_ours(folder: Path, *, writers: int = stat.S_IWGRP | stat.S_IWOTH) -> bool:
    """Whether a name of this user's in the folder stays what it is: no other user may rename there, or in a folder above.

    Ray's own folders are open to all, without the sticky bit that /tmp has.
    """
    for above in (folder, *folder.parents):
        facts = above.stat()
        if facts.st_uid not in (0, os.getuid()) or (facts.st_mode & writers and not facts.st_mode & stat.S_ISVTX):
            return False
    return True


def _is_ours(facts: os.stat_result, kind: int) -> bool:
    """Whether it is of that kind, and no other user can have written to it."""
    return stat.S_IFMT(facts.st_mode) == kind and facts.st_uid == os.getuid() and not facts.st_mode & 0o022


def _held(folder: Path) -> int:
    """A descriptor of the folder; `_NOT_OURS`: others can write there, or it isn't there. Then no file is found in it."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return _NOT_OURS
    if _is_ours(os.fstat(held), stat.S_IFDIR):
        return held
    os.close(held)
    return _NOT_OURS


def cpu() -> str:
    """A short text, different for machines whose CPUs have different instructions."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(errors="replace")
        first = text.split("\n\n", 1)[0]
        lines = [line for line in first.splitlines() if line.partition("\t")[0] in ("flags", "Features", "model name", "CPU part")]
    return hashlib.blake2b("\n".join([platform.machine(), *lines]).encode(), digest_size=4).hexdigest()
