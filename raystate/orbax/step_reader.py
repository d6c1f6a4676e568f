"""Reads a step: one written by raystate or by stock Orbax (v0 or v1), without jax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from raystate.core.tree import TreeSpec

Request = tuple[int, tuple[int, ...], tuple[int, ...]]  # leaf index, start, shape (elements of the global array)


class StepStorage(Protocol):
    """The part of raystate.storage.Storage that is used."""

    def read(self, name: str) -> bytes: ...
    def exists(self, name: str) -> bool: ...
    def list(self, prefix: str, recursive: bool = ...) -> Any: ...
    def kvstore(self, prefix: str) -> dict[str, Any]: ...


class StepReader:
    """Context manager not needed; holds no open files. Thread-safe."""

    bytes_read: int  # array bytes (decoded chunks) that read() has asked storage for

    def __init__(self, storage: StepStorage, step_prefix: str, *, bytes_in_flight: int = 1 << 30, io_concurrency: int = 32): ...
    def items(self) -> dict[str, str]: ...  # name -> "arrays" | "json" | "iterator" | "other"
    def state_item(self) -> str: ...  # "state", else "default"
    def tree(self, item: str) -> TreeSpec: ...
    def read(self, item: str, requests: Sequence[Request]) -> list[np.ndarray]: ...
    def json(self, item: str) -> Any: ...
    def iterator_states(self, item: str) -> tuple[dict[int, bytes], int]: ...  # states by process, and the process count
    def metrics(self) -> dict[str, float]: ...
    def custom(self) -> Any: ...
