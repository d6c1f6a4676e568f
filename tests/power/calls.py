"""What a traced system call does to a directory: its arguments and its result become events of `tests.power.recorder`."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Callable, Sequence
from typing import Any

from tests.power.recorder import MARKS, ROOT, Event, Kind, Recording

Finish = Callable[[int], object]  # takes the call's result

_CURRENT_FOLDER = -100  # AT_FDCWD
_REMOVE_FOLDER = 0x200  # AT_REMOVEDIR
_KEEP_SIZE = 0x01  # FALLOC_FL_KEEP_SIZE
_NO_REPLACE = 0x01  # RENAME_NOREPLACE
_TMPFILE = getattr(os, "O_TMPFILE", 0)

# Where a call has its paths: (argument with the folder's descriptor or None, argument with the text)
_PATHS: dict[str, tuple[tuple[int | None, int], ...]] = {
    "open": ((None, 0),), "openat": ((0, 1),), "openat2": ((0, 1),), "creat": ((None, 0),), "truncate": ((None, 0),),
    "link": ((None, 0), (None, 1)), "linkat": ((0, 1), (2, 3)), "symlink": ((None, 1),), "symlinkat": ((1, 2),),
    "rename": ((None, 0), (None, 1)), "renameat": ((0, 1), (2, 3)), "renameat2": ((0, 1), (2, 3)),
    "unlink": ((None, 0),), "unlinkat": ((0, 1),), "rmdir": ((None, 0),), "mkdir": ((None, 0),), "mkdirat": ((0, 1),),
    "mknod": ((None, 0),), "mknodat": ((0, 1),),
}  # fmt: skip
# (argument with the written file's descriptor, argument with the offset or None: where the file stands, and whether it is a pointer)
_WRITES: dict[str, tuple[int, int | None, bool]] = {
    "write": (0, None, False), "writev": (0, None, False), "pwrite64": (0, 3, False), "pwritev": (0, 3, False),
    "pwritev2": (0, 3, False), "sendfile": (0, None, False), "splice": (2, 3, True), "copy_file_range": (2, 3, True),
}  # fmt: skip


class RefusedError(Exception):
    """The command did something that a recording cannot hold."""


class Process:
    """A stopped thread, seen through /proc."""

    def __init__(self, thread: int):
        self._proc = f"/proc/{thread}"

    def text(self, address: int) -> str:
        """The path at an address."""
        text = b""
        with open(f"{self._proc}/mem", "rb", buffering=0) as memory:
            while b"\0" not in text:
                memory.seek(address + len(text))
                text += memory.read(4096 - (address + len(text)) % 4096)  # the next page may not be there
        return os.fsdecode(text[: text.index(b"\0")])

    def number(self, address: int) -> int:
        """The 64-bit number at an address."""
        with open(f"{self._proc}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return struct.unpack("=q", memory.read(8))[0]

    def path(self, folder: int, address: int) -> str:
        """An absolute path, as the process means it."""
        base = os.readlink(f"{self._proc}/cwd" if folder == _CURRENT_FOLDER else f"{self._proc}/fd/{folder}")
        return os.path.join(base, self.text(address)).rstrip("/")

    def opened(self, descriptor: int) -> str:
        """What a descriptor stands for: a path, or something else such as "pipe:[123]"."""
        return os.readlink(self.file(descriptor)).removesuffix(" (deleted)")

    def file(self, descriptor: int) -> str:
        """A path by which we can open the same file, whatever its name is by now."""
        return f"{self._proc}/fd/{descriptor}"

    def position(self, descriptor: int) -> int:
        with open(f"{self._proc}/fdinfo/{descriptor}") as file:
            return int(file.readline().split()[1])


class Calls:
    """Notes what happens below a directory, beginning with what is there.

    Args:
        root: an existing directory. Nobody but the traced command may change it meanwhile.
    """

    def __init__(self, root: str):
        self._root = os.path.realpath(root)
        # (device, inode number), which may be used again -> our number, which is not. overlayfs shows several devices as one tree.
        self._numbers: dict[tuple[int, int], int] = {}
        self._given = ROOT - 1
        self._new(root)
        self._events: list[Event] = []
        for folder, folders, files in os.walk(self._root):
            for name in sorted([*folders, *files]):
                self._found(os.path.join(folder, name))
        self._events.append(Event(kind="sync"))
        self._start = len(self._events)

    def recording(self) -> Recording:
        """What was noted so far."""
        return Recording(events=tuple(self._events), start=self._start)

    def begin(self, process: Process, name: str, arguments: Sequence[int]) -> Finish | None:
        """Called when a thread stands before a call; nobody else changes the directory until the answer is called.

        Returns:
            to be called with the call's result if it succeeds; None if the call is of no interest.

        Raises:
            RefusedError: the call cannot be followed.
        """
        try:
            return self._begin(process, name, arguments)
        except (FileNotFoundError, NotADirectoryError):  # the call will find the same
            return None

    def _begin(self, process: Process, name: str, arguments: Sequence[int]) -> Finish | None:
        if name in _WRITES:
            return self._write(process, name, arguments)
        if name in _PATHS:
            return self._on_paths(process, name, arguments)
        if name == "sync":
            return lambda _: self._note("sync", "")
        descriptor = _signed(arguments[4 if name == "mmap" else 0])
        path = self._inside(process.opened(descriptor))
        if path is None:
            return None
        match name:
            case "fsync" | "fdatasync":
                inode = self._inode(process.file(descriptor), path)
                return lambda _: self._note("fsync", path, inode=inode)
            case "syncfs":
                return lambda _: self._note("sync", path)
            case "ftruncate":
                return self._resize(process.file(descriptor), path)
            case "fallocate" if arguments[1] == _KEEP_SIZE:
                return None
            case "fallocate" if arguments[1] == 0:
                return self._resize(process.file(descriptor), path)
            case "mmap" if not arguments[2] & 0x2:  # PROT_WRITE
                return None
            case _:
                raise RefusedError(f"{name} of {path} cannot be recorded: its writes are not system calls, or not the file's own")

    # ------------------------------------------------------------ by path

    def _on_paths(self, process: Process, name: str, arguments: Sequence[int]) -> Finish | None:
        found = [
            process.path(_CURRENT_FOLDER if folder is None else _signed(arguments[folder]), arguments[text])
            for folder, text in _PATHS[name]
        ]
        if found[0].startswith(MARKS):
            self._note("mark", found[0].removeprefix(MARKS))
            return None
        if name in ("open", "openat", "openat2", "creat"):
            return self._open(process, found[0], _open_flags(process, name, arguments))
        if name == "truncate":
            real = os.path.realpath(found[0])
            return None if (path := self._inside(real)) is None else self._resize(real, path)
        paths = [self._inside(_canonical(path)) for path in found]
        if all(path is None for path in paths):
            return None
        path, target, real = paths[0], paths[-1], _canonical(found[-1])
        if path is None or target is None:
            raise RefusedError(f"{name} {found[0]} -> {found[-1]} cannot be recorded: one of them is outside of {self._root}")
        match name:
            case "mkdir" | "mkdirat":
                return lambda _: self._note("mkdir", path, inode=self._new(real), folder=self._folder(real))
            case "rmdir" | "unlink" | "unlinkat":
                folder = self._folder(real)
                kind: Kind = "rmdir" if name == "rmdir" or (name == "unlinkat" and arguments[2] & _REMOVE_FOLDER) else "unlink"
                return lambda _: self._note(kind, path, folder=folder)
            case "link" | "linkat":
                return lambda _: self._note("link", target, inode=self._inode(real, target), folder=self._folder(real))
            case "rename" | "renameat" | "renameat2" if name != "renameat2" or not arguments[4] & ~_NO_REPLACE:
                source = self._folder(_canonical(found[0]))
                if os.path.lexists(real) and os.path.samefile(_canonical(found[0]), real):
                    return None  # two names of one file: POSIX lets both stay

                def renamed(_: int) -> None:
                    to = {"target": target, "target_folder": self._folder(real)}
                    self._note("rename", path, inode=self._inode(real, target), folder=source, **to)

                return renamed
            case _:
                raise RefusedError(f"{name} of {path} cannot be recorded: only files and folders, and no exchange of names")

    def _open(self, process: Process, found: str, flags: int) -> Finish | None:
        real = _canonical(found) if flags & os.O_NOFOLLOW else os.path.realpath(found)
        path = self._inside(real)
        if path is None or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            return None
        if _TMPFILE and flags & _TMPFILE == _TMPFILE:
            return lambda descriptor: self._register(os.stat(process.file(descriptor)))  # it has no name yet, and may never get one
        if not os.path.lexists(real):
            return lambda _: self._note("create", path, inode=self._new(real), folder=self._folder(real))
        return self._resize(real, path) if flags & os.O_TRUNC and os.stat(real).st_size else None

    # ------------------------------------------------------------ data

    def _write(self, process: Process, name: str, arguments: Sequence[int]) -> Finish | None:
        which, where, is_pointer = _WRITES[name]
        descriptor = _signed(arguments[which])
        path = self._inside(process.opened(descriptor))
        if path is None:
            return None

        def written(size: int) -> None:
            if where is not None and is_pointer and arguments[where]:
                offset = process.number(arguments[where]) - size
            elif where is not None and not is_pointer and ctypes.c_int64(arguments[where]).value >= 0:
                offset = arguments[where]
            else:
                offset = process.position(descriptor) - size
            # Read back from the file, whose bytes are the same by whatever call they came.
            with open(process.file(descriptor), "rb") as file:
                file.seek(offset)
                data = file.read(size)
            self._note("write", path, inode=self._inode(process.file(descriptor), path), offset=offset, data=data)

        return written

    def _resize(self, real: str, path: str) -> Finish:
        before = os.stat(real).st_size

        def resized(_: int) -> None:
            status = os.stat(real)
            if status.st_size != before:
                self._note("resize", path, inode=self._inode(real, path), size=status.st_size)

        return resized

    # ------------------------------------------------------------ names and numbers

    def _found(self, real: str) -> None:
        """Note what was there before."""
        path, status = self._inside(real) or "", os.lstat(real)
        place = {"path": path, "folder": self._folder(real)}
        if stat.S_ISDIR(status.st_mode):
            self._events.append(Event(kind="mkdir", inode=self._new(real), **place))
        elif not stat.S_ISREG(status.st_mode):
            raise RefusedError(f"{path} cannot be recorded: it is neither a file nor a folder")
        elif (number := self._numbers.get(_key(status))) is not None:
            self._events.append(Event(kind="link", inode=number, **place))
        else:
            inode = self._new(real)
            self._events.append(Event(kind="create", inode=inode, **place))
            with open(real, "rb") as file:
                self._events.append(Event(kind="write", path=path, inode=inode, data=file.read()))

    def _note(self, kind: Kind, path: str, **facts: Any) -> None:
        self._events.append(Event(kind=kind, path=path, **facts))

    def _inside(self, path: str) -> str | None:
        """The path relative to the root, "." for the root itself, None if it is elsewhere."""
        if path == self._root:
            return "."
        return path.removeprefix(f"{self._root}/") if path.startswith(f"{self._root}/") else None

    def _inode(self, real: str, path: str) -> int:
        number = self._numbers.get(_key(os.stat(real)))
        if number is None:
            raise RefusedError(f"{path} was made by somebody else")
        return number

    def _folder(self, real: str) -> int:
        return self._inode(os.path.dirname(real), os.path.dirname(real))

    def _new(self, real: str) -> int:
        return self._register(os.lstat(real))

    def _register(self, status: os.stat_result) -> int:
        self._given += 1
        self._numbers[_key(status)] = self._given
        return self._given


def _key(status: os.stat_result) -> tuple[int, int]:
    return (status.st_dev, status.st_ino)


def _canonical(path: str) -> str:
    """The path of a directory entry: links are followed up to its folder, but not the entry itself."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _signed(argument: int) -> int:
    return ctypes.c_int(argument & 0xFFFFFFFF).value


def _open_flags(process: Process, name: str, arguments: Sequence[int]) -> int:
    match name:
        case "creat":
            return os.O_CREAT | os.O_WRONLY | os.O_TRUNC
        case "openat2":
            return process.number(arguments[2])  # the first member of `struct open_how`
        case _:
            return arguments[1 if name == "open" else 2]
