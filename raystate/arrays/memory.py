"""SIGNATURES FIRST (implementation follows within minutes)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raystate.arrays.restore import ReadRequest
from raystate.core.tree import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one trainer's slot holds."""

    layout: Layout
    data: np.ndarray  # uint8
    crc32c: tuple[int, ...]  # per piece of layout
    holder: str = ""  # for error messages: "rank 3 on host …"


class UncoveredError(Exception): ...


class MemorySource:
    def __init__(self, holdings: Sequence[Holding], item: str): ...

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        raise NotImplementedError
