"""A trainer's process, from outside: where its Python is, and its end. The process offers its stacks, a signal of its HostActor takes them.

Python's faulthandler writes the stacks in its signal handler, also while the main thread sits in a collective.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

from raystate.waits import AGAIN_S, AT_ONCE_S, SOON_S

logger = logging.getLogger("raystate")

SIGNAL = signal.SIGUSR2
_PREFIX = "stacks-"
MOST_CHARS = 4000  # of a stack that is told
_OTHERS = ("site-packages", "lib/python", "<frozen")  # in the paths of files that are not the user's

_offering = threading.Lock()
_is_offered = False  # in this process: a signal has one handler, which writes to one file


def offer(folder: Path) -> Callable[[], None]:
    """From now on SIGUSR2 has this process write its stacks to a file there.

    A program that uses the signal keeps it. Of several managers in one process only the first
    offers its stacks.

    Returns:
        What takes it back.
    """
    global _is_offered
    path = _path(folder, os.getpid())
    with _offering:
        if _is_offered or _is_used_by_the_program() or _is_caught():
            logger.debug("%s is in use in this process already: its stacks will not be written to %s", SIGNAL.name, folder)
            return lambda: None
        try:
            file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - the handler writes to it until it is taken back
        except OSError as error:
            logger.debug("stacks cannot be written to %s: %s", path, error)
            return lambda: None
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        _is_offered = True

    def take_back() -> None:
        global _is_offered
        with _offering:
            if file.closed:
                return
            path.unlink(missing_ok=True)  # first: without the file no process sends the signal
            if not _is_used_by_the_program():  # else the end of ours would be the end of its handler, too
                faulthandler.unregister(SIGNAL)
            file.close()
            _is_offered = False

    return take_back


def _is_used_by_the_program() -> bool:
    return signal.getsignal(SIGNAL) not in (signal.SIG_DFL, None)


def _is_caught() -> bool:
    """Whether this process has a handler of any kind, such as faulthandler's, of which Python doesn't tell; False where no Linux does."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (SIGNAL - 1) & 1)


def take(folder: Path, pid: int, *, timeout_s: float = AT_ONCE_S) -> str:
    """The stacks of a process that has offered them, most recent call first; "" if it has not, or writes none in time."""
    path = _path(folder, pid)
    try:
        size = path.stat().st_size
        os.kill(pid, SIGNAL)
    except OSError:
        return ""
    text, end_s, quiet_s = "", time.monotonic() + timeout_s, float("inf")
    with contextlib.suppress(OSError):
        while time.monotonic() < min(end_s, quiet_s):
            found = path.read_bytes()[size:].decode(errors="replace")
            if found != text:
                text, quiet_s = found, time.monotonic() + AGAIN_S
            time.sleep(SOON_S)
    return _own_first(text)


def kill(pid: int, rank: int) -> None:  # noqa: ARG001 - the model of the public API wants to know the rank
    """End a trainer's process at once."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def sweep(folder: Path) -> None:
    """Remove what killed processes left: no process asks for their stacks any more."""
    for path in folder.glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX)
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            path.unlink(missing_ok=True)


def _path(folder: Path, pid: int) -> Path:
    return folder / f"{_PREFIX}{pid}"


def _own_first(text: str) -> str:
    """First the threads that run the user's code, of these the oldest: faulthandler writes the newest thread first."""
    oldest_first = [part for part in text.strip().split("\n\n") if part][::-1]
    return "\n\n".join(sorted(oldest_first, key=lambda thread: not _is_own(thread)))[:MOST_CHARS]


def _is_own(thread: str) -> bool:
    files = (line for line in thread.splitlines() if line.lstrip().startswith("File "))
    return any(not any(mark in file for mark in _OTHERS) for file in files)
