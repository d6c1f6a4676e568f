"""Copying and checking on as many threads as help."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

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
    threads = min(_MAX_THREADS, cores, len(work), nbytes // _BYTES_PER_THREAD)
    if threads <= 1:
        return list(map(function, work))
    with ThreadPoolExecutor(threads, thread_name_prefix="raystate-copy") as pool:
        return list(pool.map(function, work))
