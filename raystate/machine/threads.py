"""The same of many, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

W = TypeVar("W")
R = TypeVar("R")

_MAX_THREADS = 8
_BYTES_PER_THREAD = 16 << 20  # less isn't worth a thread


def map_in_threads(function: Callable[[W], R], work: Sequence[W], *, threads: int, name: str) -> list[R]:
    """`function` of each, in order. With one thread all is done right here: to start and end it
    takes longer than to read a small file.

    Args:
        threads: at most so many.
        name: what their names begin with.
    """
    threads = min(threads, len(work))
    if threads <= 1:
        return [function(one) for one in work]
    with ThreadPoolExecutor(threads, thread_name_prefix=name) as pool:
        return list(pool.map(function, work))


def in_threads(function: Callable[[W], R], work: Sequence[W], nbytes: int, *, cores: int | None = None) -> list[R]:
    """`function` of each, in order; on several threads if `nbytes` in all are worth it. It lets go of Python's lock.

    Args:
        cores: no more threads than so many; None: than this process may use.
    """
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    return map_in_threads(function, work, threads=min(_MAX_THREADS, cores, nbytes // _BYTES_PER_THREAD), name="raystate-copy")
