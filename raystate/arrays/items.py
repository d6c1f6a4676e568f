"""SIGNATURES FIRST (implementation follows within minutes)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedItems:
    trees: dict[str, Any]  # name -> pytree with arrays: describe({"state": state, **packed.trees})
    iterators: dict[str, bytes]  # name -> this process's state (every process)
    json_items: dict[str, Any]  # name -> value; empty on processes other than 0


def pack_items(items: Mapping[str, Any] | None, *, process_index: int) -> PackedItems:
    raise NotImplementedError


def is_iterator(value: Any) -> bool:
    raise NotImplementedError


def set_iterators(
    items: Mapping[str, Any], states: Mapping[str, Mapping[int, bytes]], *, old_world: int, world: int, process_index: int
) -> None:
    """Set each iterator of `items` in place. states: item -> (old process index -> bytes). ItemTopologyError if undealable."""
    raise NotImplementedError
