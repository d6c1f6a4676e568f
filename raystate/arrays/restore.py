"""SIGNATURES FIRST (implementation follows within minutes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from raystate.core.tree import TreeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    leaf: int  # index into the TreeSpec's leaves
    start: tuple[int, ...]
    shape: tuple[int, ...]


class PieceSource(Protocol):
    """Of one tree (item)."""

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]: ...


def restore_tree(
    reference: Any,
    spec: TreeSpec,
    source: PieceSource,
    *,
    partial: bool = False,
    cast: bool = False,
    shapes: Literal["match", "checkpoint"] = "match",
) -> Any:
    """`spec`'s scalar leaves must have their values (TreeSpec.with_values)."""
    raise NotImplementedError
