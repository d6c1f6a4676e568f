"""Boxes that go from storage straight onto devices, where a device has a way for that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from raystate.arrays.placing import assembled, targets_of
from raystate.arrays.reference import Device, Want
from raystate.arrays.stagers import Unread
from raystate.arrays.ways import of_restores
from raystate.core.formats.boxes import Box
from raystate.core.formats.tree import TreeSpec


@runtime_checkable
class ReadsInto(Protocol):
    """A PieceSource that can read into memory that it is given."""

    def read_into(self, boxes: Sequence[tuple[int, Box]], into: Sequence[np.ndarray]) -> None:
        """Boxes by leaf, in elements of the global array, into C-contiguous arrays of their shapes and dtypes."""
        ...


def read_onto(wants: Mapping[int, Want], spec: TreeSpec, source: ReadsInto) -> dict[int, jax.Array]:
    """Those of what is wanted that can take this way, by position. Not what has to be converted. Raises: what the source does."""
    if not of_restores().receives:
        return {}
    unread: list[Unread] = []
    asked: list[tuple[int, Device, dict[Box, int]]] = []  # (position, want, box -> which of `unread`)
    for position, want in wants.items():
        if not isinstance(want, Device) or want.sharding is None:
            continue
        array = spec.leaves[want.leaf].array
        if array is None or (dtype := np.dtype(array.dtype)) != want.dtype:
            continue
        numbers: dict[Box, int] = {}
        for target, box in targets_of(want.sharding, want.shape):
            if box not in numbers:
                numbers[box] = len(unread)
                unread.append(Unread(want.leaf, box, array.chunk, dtype, []))
            unread[numbers[box]].targets.append(target)
        asked.append((position, want, numbers))
    received = of_restores().receive(unread, source.read_into)
    found: dict[int, jax.Array] = {}
    for position, want, numbers in asked:
        assert want.sharding is not None
        copies = {box: received[number] for box, number in numbers.items()}
        if copies and all(copies.values()):
            left = {box: iter(arrays or ()) for box, arrays in copies.items()}
            found[position] = assembled(want, [next(left[box]) for _, box in targets_of(want.sharding, want.shape)])
    return found
