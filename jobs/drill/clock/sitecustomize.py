"""Python imports this at its start where its folder is in PYTHONPATH: a simulated node's wall clock, which the drill can set.

The file that RAYSTATE_DRILL_CLOCK names holds one double, the seconds by which `time.time` and `time.time_ns` are ahead. C++ programs, the
kernel's file times and `datetime.now` keep the machine's own time; nothing of raystate that decides reads these.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pkgutil
import struct
import time
from collections.abc import Callable
from typing import Any


class _Clock:
    """A function of `time`, ahead by what the file says."""

    def __init__(self, name: str, ahead: mmap.mmap, unit: Callable[[float], Any]):
        self._name, self._ahead, self._unit = name, ahead, unit
        self._own: Callable[[], Any] = getattr(time, name)
        self._read = struct.Struct("d").unpack_from

    def __call__(self) -> Any:
        return self._own() + self._unit(self._read(self._ahead)[0])

    def __reduce__(self) -> Any:
        return pkgutil.resolve_name, (f"time:{self._name}",)  # Ray pickles functions that have it as a default


def _shift(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        ahead = mmap.mmap(file, 8, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    replaced: Any = time
    replaced.time = _Clock("time", ahead, float)
    replaced.time_ns = _Clock("time_ns", ahead, lambda ahead_s: int(ahead_s * 1e9))


if path := os.environ.get("RAYSTATE_DRILL_CLOCK"):
    with contextlib.suppress(OSError, ValueError):  # the drill has ended, and what is left of its cluster is about to
        _shift(path)
