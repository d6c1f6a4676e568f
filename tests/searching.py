"""The search for a seed that shows a planted bug."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest


def search(name: str, known: int | None, seeds: int, shows: Callable[[int], bool], *, long_search: int) -> None:
    """Fail unless a seed shows the planted bug.

    Args:
        name: of the bug.
        known: tried first; None: nobody has written one down.
        seeds: the others, from 0.
        shows: whether a seed shows it.
        long_search: after more tries than these a warning says which seed to write down: others find it much later each time.
    """
    first = [] if known is None else [known]
    for tries, seed in enumerate([*first, *range(seeds)]):
        if shows(seed):
            if tries > long_search:
                warnings.warn(f"{name}: found by seed {seed} after {tries} tries: write it down as known", stacklevel=2)
            return
    pytest.fail(f"{name}: not found with {seeds} seeds")
