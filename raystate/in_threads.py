"""The same of many, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

W = TypeVar("W")
R = TypeVar("R")


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
