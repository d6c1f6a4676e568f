"""Copying and checking on as many threads as help."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from raystate.in_threads import map_in_threads

W = TypeVar("W")
R = TypeVar("R")

_MAX_THREADS = 8
_BYTES_PER_THREAD = 16 << 20  # less isn't worth a thread


def in_threads(function: Callable[[W], R], work: Sequence[W], nbytes: int, *, cores: int | None = None) -> list[R]:
    """`function` of each, in order; on several threads if `nbytes` in all are worth it. It lets go of Python's lock.

    Args:
        cores: no more threads than so many; None: than this process may use.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return map_in_threads(function, work, threads=min(_MAX_THREADS, cores, nbytes // _BYTES_PER_THREAD), name="raystate-copy")
