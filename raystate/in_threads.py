"""What waits for a disk or a network, several at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

W = TypeVar("W")
R = TypeVar("R")


def map_in_threads(function: Callable[[W], R], work: Sequence[W], *, threads: int, name: str) -> list[R]:
    """`function` of each, in order. A single one is done right here: to start and end a thread takes longer than to read a small file.

    Args:
        threads: at most so many.
        name: what their names begin with.
    """
    if len(work) <= 1:
        return [function(one) for one in work]
    with ThreadPoolExecutor(min(threads, len(work)), thread_name_prefix=name) as pool:
        return list(pool.map(function, work))
