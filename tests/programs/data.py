"""Batches that are a function of their position, so that an iterator's whole state is a number."""

from __future__ import annotations

from typing import Any

import numpy as np


class Batches:
    """Endless random batches, float32 of `shape`; targets are a fixed function of them.

    Args:
        shape: of a batch of inputs.
        stream: which of many sequences; as a process's rank.
    """

    def __init__(self, *shape: int, stream: int = 0):
        self._shape, self._stream = shape, stream
        self._given = 0

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> tuple[Any, Any]:
        x = np.random.default_rng((self._stream, self._given)).standard_normal(self._shape, np.float32)
        self._given += 1
        return x, np.sin(x.sum(-1, keepdims=True))

    def get_state(self) -> dict[str, int]:
        return {"given": self._given}

    def set_state(self, state: dict[str, int]) -> None:
        self._given = state["given"]


def tokens(position: int, rows: int, length: int, vocabulary: int, *, stream: int = 0) -> Any:
    """int32 (rows, length): texts in which each token follows from the one before, with some noise."""
    rng = np.random.default_rng((stream, position))
    first = rng.integers(vocabulary, size=(rows, 1))
    steps = 1 + (rng.random((rows, length)) < 0.2)
    return ((first + np.cumsum(steps, 1)) % vocabulary).astype(np.int32)
