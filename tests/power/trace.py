"""Runs a command and stops it at each system call that changes files; `tests.power.calls` says what these did.

    python -m tests.power.trace RECORDING ROOT COMMAND ARGUMENT…

Tracing sees what the kernel sees: C++ libraries as well as Python, all threads, all child processes. A seccomp filter stops a thread
at the calls of `CALLS` only (`seccomp(2)`, SECCOMP_RET_TRACE), everything else runs at full speed. It needs Linux 5.3
(PTRACE_GET_SYSCALL_INFO) and the permission to trace one's own children, but no privileges, no package and no compiler. Calls that
change the recorded directory are carried out one at a time, so their order is certain.

This is a process of its own because only the thread that traces may wait for the traced, and its waiting would take the exit
statuses of all other children of a test run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import platform
import signal
import struct
import sys
from collections import deque
from collections.abc import Sequence

from tests.power.calls import Calls, Finish, Process, RefusedError
from tests.power.recorder import REFUSED_STATUS, UNAVAILABLE_STATUS

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column below, AUDIT_ARCH_…
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | (getattr(os, "O_TMPFILE", 0) & ~os.O_DIRECTORY)
_BITS, _EQUAL = 0x45, 0x15  # BPF: JSET, JEQ
_FICLONE, _FICLONERANGE, _MAP_SHARED = 0x40049409, 0x4020940D, 0x01

Condition = tuple[int, int, int] | None  # (argument, _BITS or _EQUAL, value); None: always
# name: (number on x86_64, number on aarch64, which of these calls matter); None: there is no such call
CALLS: dict[str, tuple[int | None, int | None, Condition]] = {
    "write": (1, 64, None), "writev": (20, 66, None), "pwrite64": (18, 68, None), "pwritev": (296, 70, None),
    "pwritev2": (328, 287, None), "sendfile": (40, 71, None), "splice": (275, 76, None), "copy_file_range": (326, 285, None),
    "open": (2, None, (1, _BITS, _WRITING)), "openat": (257, 56, (2, _BITS, _WRITING)), "openat2": (437, 437, None),
    "creat": (85, None, None), "truncate": (76, 45, None), "ftruncate": (77, 46, None), "fallocate": (285, 47, None),
    "link": (86, None, None), "linkat": (265, 37, None), "rename": (82, None, None), "renameat": (264, 38, None),
    "renameat2": (316, 276, None), "unlink": (87, None, None), "unlinkat": (263, 35, None), "rmdir": (84, None, None),
    "mkdir": (83, None, None), "mkdirat": (258, 34, None), "fsync": (74, 82, None), "fdatasync": (75, 83, None),
    "sync": (162, 81, None), "syncfs": (306, 267, None), "symlink": (88, None, None), "symlinkat": (266, 36, None),
    "mknod": (133, None, None), "mknodat": (259, 33, None), "mmap": (9, 222, (3, _BITS, _MAP_SHARED)),
    "ioctl": (16, 29, (1, _EQUAL, _FICLONE)), "ioctl-range": (16, 29, (1, _EQUAL, _FICLONERANGE)),
}  # fmt: skip
_DENIED = {"io_uring_setup": (425, 425), "io_setup": (206, 0)}  # writes that bypass us; libraries do without where there is none
_TRACE, _ALLOW, _KILL, _NO_SUCH_CALL = 0x7FF00000, 0x7FFF0000, 0x80000000, 0x00050000 | 38  # SECCOMP_RET_…; ERRNO: ENOSYS
_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER_MODE = 38, 22, 2  # prctl

_CONT, _SYSCALL, _SEIZE, _SYSCALL_INFO = 7, 24, 0x4206, 0x420E  # ptrace
_OPTIONS = 0x1 | 0x2 | 0x4 | 0x8 | 0x10 | 0x80 | 0x100000  # SYSGOOD, FORK, VFORK, CLONE, EXEC, SECCOMP, EXITKILL
_SECCOMP_EVENT, _SYSCALL_STOP, _WALL = 7, signal.SIGTRAP | 0x80, 0x40000000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)


class UnavailableError(Exception):
    """This machine does not let us trace; the message says why."""


class Tracer:
    """Follows one command and everything that it starts. Single use.

    Args:
        calls: says what a call does; None for a call that changes nothing of interest.
    """

    def __init__(self, calls: Calls):
        if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
            raise UnavailableError(f"recording needs Linux on {' or '.join(_ARCHITECTURES)}; this is {platform.platform()}")
        column, self._architecture = _ARCHITECTURES[platform.machine()]
        self._table = {name: (number, call[2]) for name, call in CALLS.items() if (number := call[column]) is not None}
        self._denied = [numbers[column] for numbers in _DENIED.values()]
        self._names = {number: name.partition("-")[0] for name, (number, _) in self._table.items()}
        self._calls = calls
        self._busy: int | None = None  # the thread whose call is being carried out
        self._finish: Finish | None = None
        self._waiting: deque[int] = deque()  # threads that stand before a call meanwhile

    def run(self, command: Sequence[str]) -> int:
        """The command's exit status; negative: the signal that ended it."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.read(reading, 1)  # until we are traced
                self._install_filter()
                os.execvp(command[0], list(command))
            except BaseException as error:
                print(error, file=sys.stderr)  # noqa: T201
                os._exit(UNAVAILABLE_STATUS if isinstance(error, UnavailableError) else 127)
        try:
            _ptrace(_SEIZE, child, 0, _OPTIONS)
        except OSError as error:
            os.kill(child, signal.SIGKILL)
            raise UnavailableError(f"a process may not trace its own child here: {error}") from error
        os.write(writing, b"1")
        return self._follow(child)

    def _install_filter(self) -> None:
        program = ctypes.create_string_buffer(self._filter())

        class Header(ctypes.Structure):
            _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

        header = Header(len(program) // 8, ctypes.cast(program, ctypes.c_void_p))
        if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or _libc.prctl(_SET_SECCOMP, _FILTER_MODE, ctypes.byref(header), 0, 0):
            raise UnavailableError(f"seccomp filters are forbidden here: {os.strerror(ctypes.get_errno())}")

    def _filter(self) -> bytes:
        """A BPF program over `struct seccomp_data`. Jumps are relative, so each test returns on the spot."""
        load, ret = 0x20, 0x06
        program = [(load, 0, 0, 4), (_EQUAL, 1, 0, self._architecture), (ret, 0, 0, _KILL), (load, 0, 0, 0)]
        for number in self._denied:
            program += [(_EQUAL, 0, 1, number), (ret, 0, 0, _NO_SUCH_CALL)]
        for number, condition in self._table.values():
            if condition is None:
                program += [(_EQUAL, 0, 1, number), (ret, 0, 0, _TRACE)]
            else:
                argument, test, value = condition
                program += [(_EQUAL, 0, 4, number), (load, 0, 0, 16 + 8 * argument), (test, 0, 1, value), (ret, 0, 0, _TRACE)]
                program += [(load, 0, 0, 0)]  # the call's number again
        return b"".join(struct.pack("=HBBI", *one) for one in (*program, (ret, 0, 0, _ALLOW)))

    def _follow(self, child: int) -> int:
        exit_status = 0
        while True:
            try:
                thread, status = os.waitpid(-1, _WALL)
            except ChildProcessError:
                return exit_status
            if os.WIFSTOPPED(status):
                with contextlib.suppress(ProcessLookupError):  # killed while it was stopped: its end is reported next
                    self._stopped(thread, os.WSTOPSIG(status), status >> 16)
                continue
            if thread == child:
                exit_status = os.waitstatus_to_exitcode(status)
            if thread in self._waiting:
                self._waiting.remove(thread)
            if thread == self._busy:
                self._busy = None
                self._start_next()

    def _stopped(self, thread: int, number: int, event: int) -> None:
        if event == _SECCOMP_EVENT:
            self._waiting.append(thread)
        elif number == _SYSCALL_STOP:
            if thread == self._busy and self._finish is not None:
                (result,) = struct.unpack_from("=q", _syscall_info(thread), 24)
                if result >= 0:
                    self._finish(result)
                self._busy = None
            _ptrace(_CONT, thread)
        else:  # a new thread or program, or a signal on its way
            _ptrace(_CONT, thread, 0, 0 if event else number)
        self._start_next()

    def _start_next(self) -> None:
        while self._busy is None and self._waiting:
            thread = self._waiting.popleft()
            with contextlib.suppress(ProcessLookupError):
                number, *arguments = struct.unpack_from("=7Q", _syscall_info(thread), 24)
                self._finish = self._calls.begin(Process(thread), self._names[number], arguments)
                self._busy = None if self._finish is None else thread
                _ptrace(_CONT if self._finish is None else _SYSCALL, thread)  # _SYSCALL: to the exit from this call


def _ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> None:
    if _libc.ptrace(request, thread, address, data) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _syscall_info(thread: int) -> bytes:
    """`struct ptrace_syscall_info`, the same on all architectures: from offset 24 number and arguments, or the result."""
    buffer = ctypes.create_string_buffer(88)
    try:
        _ptrace(_SYSCALL_INFO, thread, len(buffer), ctypes.addressof(buffer))
    except ProcessLookupError:
        raise
    except OSError as error:
        raise UnavailableError(f"this kernel does not describe system calls to a tracer, Linux 5.3 does: {error}") from error
    return buffer.raw


def main(recording: str, root: str, *command: str) -> int:
    """Exit status: the command's, or one of those in `power` that tell why there is no recording."""
    calls = Calls(root)
    try:
        status = Tracer(calls).run(command)
    except UnavailableError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return UNAVAILABLE_STATUS
    except RefusedError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return REFUSED_STATUS
    with open(recording, "wb") as file:
        pickle.dump(calls.recording(), file)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
