"""Everything in which a reference and a checkpoint differ, as one error that stays readable with 10,000 leaves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from raystate.arrays.paths import Path, shown
from raystate.core.formats.errors import ReferenceMismatchError

_SHOWN_LINES = 20
_SHOWN_NAMES = 10

MISSING = "is not in the checkpoint"
_CAST = "cast=True converts to the reference's dtypes, where these can hold the values."
_FRACTIONS = (
    "Give the reference the checkpoint's dtype where that has fractions: no integer can hold them, and cast=True cuts nothing off."
)


def way_to_cast(have: Any, wanted: Any) -> str:
    """What to do where the reference has another dtype than the checkpoint."""
    cuts = jax.numpy.issubdtype(have, np.inexact) and not jax.numpy.issubdtype(wanted, np.inexact)
    return _FRACTIONS if cuts else _CAST


class DifferenceError(Exception):
    """Why one leaf of a reference can't be had.

    Args:
        text: follows the leaf's path.
        way_out: what the caller can do about it, said once for all leaves.
    """

    def __init__(self, text: str, way_out: str = ""):
        super().__init__(text)
        self.way_out = way_out


class Differences:
    """Collects what does not fit, to raise it together."""

    def __init__(self) -> None:
        self._found: list[tuple[Path, str]] = []
        self._ways_out: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, path: Path, what: str, way_out: str = "") -> None:
        self._found.append((path, what))
        if way_out:
            self._ways_out[way_out] = None

    def refuse(self, path: Path, why: DifferenceError) -> None:
        self.add(path, str(why), why.way_out)

    @property
    def any_missing(self) -> bool:
        return any(what == MISSING for _, what in self._found)

    def error(self, item: str, unused: Sequence[Path] = ()) -> ReferenceMismatchError:
        """All of them; `unused`: paths of the checkpoint that nothing in the reference asks for."""
        missing = [path for path, what in self._found if what == MISSING]
        lines = [f"{shown(path)}: {what}" for path, what in self._found if what != MISSING]
        count = len(self._found)
        text = f"item {item!r}: the reference and the checkpoint differ in {count} place{'s' * (count > 1)}:"
        text += "".join(f"\n  {line}" for line in lines[:_SHOWN_LINES])
        if len(lines) > _SHOWN_LINES:
            text += f"\n  … and {len(lines) - _SHOWN_LINES:,} more"
        if len(missing) == 1:
            text += f"\n  {shown(missing[0])}: {MISSING}"
        elif missing:
            text += f"\n  not in the checkpoint ({len(missing):,}): {_named(missing)}"
        if unused:
            text += f"\nOnly in the checkpoint ({len(unused):,}): {_named(unused)}"
        text += "".join(f"\n{way_out}" for way_out in self._ways_out)
        facts: dict[str, Any] = {
            "differences": [(shown(path), what) for path, what in self._found],
            "unused": [shown(path) for path in unused],
        }
        return ReferenceMismatchError(text, item=item, **facts)


def _named(paths: Sequence[Path]) -> str:
    more = len(paths) - _SHOWN_NAMES
    return ", ".join(map(shown, paths[:_SHOWN_NAMES])) + (f" and {more:,} more" if more > 0 else "")
