"""Planted bugs, and the search for a seed that shows one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

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


@contextlib.contextmanager
def planted(*patches: tuple[Any, str, Any], shells: Iterable[str] = ()) -> Iterator[frozenset[str]]:
    """A bug: (owner, name, other value) of each thing that is replaced; and the bugs of the simulator's shells, by name."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield frozenset(shells)
