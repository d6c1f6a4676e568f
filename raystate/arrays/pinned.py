"""The way of TPUs, and of whatever else has none of its own: copies by JAX, into pinned host memory where the device has that.

JAX keeps the pinned memory and uses it again. It takes as much as the states in it, and is slow to
make. The next step that donates the arrays waits for the copies on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from raystate.arrays.stagers import Keeping, ToKeep, nothing_to_do
from raystate.arrays.tree import Plan
from raystate.machine.checksum import Bytes


class Pinned:
    """See `stagers.Stager`. It has no memory of its own."""

    def takes(self, array: jax.Array) -> bool:  # noqa: ARG002 - as all stagers
        """All that no other takes."""
        return True

    def hold(self, plan: Plan, wanted: Sequence[ToKeep], parts: list[Any], into: Callable[[], Bytes] | None) -> Keeping:  # noqa: ARG002
        """Queues copies of whole arrays, which costs less than copies of their shards."""
        arrays: list[jax.Array] = []
        places: list[list[tuple[int, int]]] = []  # per array: (shard, addressable position in it)
        for number, leaf, array in wanted:
            if leaf.whole:
                arrays.append(array)
                places.append([(number + i, shard.position) for i, shard in enumerate(leaf.shards)])
                continue
            for i, shard in enumerate(leaf.shards):  # replicas: copy each box once
                arrays.append(array.addressable_data(shard.position))
                places.append([(number + i, 0)])
        copies = jax.device_put(arrays, [_copy_target(array) for array in arrays], may_alias=False)
        for copied, where in zip(copies, places, strict=True):
            for shard, position in where:
                parts[shard] = (copied, position)
        return self

    def foresee(self, plan: Plan, wanted: Sequence[ToKeep]) -> None:
        """Nothing to do."""

    def restore(self, boxes: Sequence[np.ndarray], targets: Sequence[Any]) -> list[jax.Array | None]:  # noqa: ARG002
        """JAX does."""
        return [None] * len(boxes)

    def attach(self, memory: Sequence[Bytes]) -> Callable[[], None]:  # noqa: ARG002 - JAX copies through memory of its own
        """Nothing to do."""
        return nothing_to_do

    def prepare(self) -> None:
        """Nothing to do."""

    def copy(self, data: Bytes) -> dict[int, list[int]]:  # noqa: ARG002 - as `Keeping.copy`
        """All lies in `parts`."""
        return {}

    def release(self, *, reuse: bool = False) -> None:
        """Nothing to do."""


def _copy_target(array: jax.Array) -> Any:
    sharding = array.sharding
    device = next(iter(sharding.device_set))
    if device.platform == "cpu" or not _has_pinned_host(device.device_kind, device):
        return sharding
    return sharding.with_memory_kind("pinned_host")


_has: dict[str, bool] = {}  # by device kind


def _has_pinned_host(kind: str, device: Any) -> bool:
    if kind not in _has:
        _has[kind] = any(memory.kind == "pinned_host" for memory in device.addressable_memories())
    return _has[kind]
