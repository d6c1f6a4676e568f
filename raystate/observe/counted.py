"""Counts of this process, TensorStore's too. Cheap to import: a HostActor does."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from raystate.machine.counts import FAILURES, REQUESTS, RETRIES, counts

MEMORY_USED, MEMORY_CAP = "memory_used_bytes", "memory_cap_bytes"  # in a HostActor's counts, and no counts
_NAMES = {RETRIES: "retries", FAILURES: "failures"}


def process_counts() -> tuple[tuple[str, float], ...]:
    """All sums since this process began, by name."""
    found = dict(counts.sums())
    if "tensorstore" in sys.modules:
        from raystate.orbax.kv import transferred

        for name, value in transferred().items():
            found[name] = found.get(name, 0) + value
    return tuple(sorted(found.items()))


def requests_in(counted: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Requests to storage of what a process has counted: "read", "write", "list", "delete", "retries", "failures". 0 is left out."""
    return {
        _NAMES.get(name, name.removeprefix(f"{REQUESTS}/")): value
        for name, value in counted
        if value and (name in _NAMES or name.startswith(f"{REQUESTS}/"))
    }
