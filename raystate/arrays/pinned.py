"""The way of TPUs, and of whatever else has none of its own: copies by JAX, into pinned host memory where the device has that.

JAX keeps the pinned memory and uses it again. It takes as much as the states in it, and is slow to
make: about a second for each GiB. So it is made before the first save, beside the training's start.
The next step that donates the arrays waits for the copies on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from raystate.arrays.stagers import Keeping, ToKeep, nothing_to_do
from raystate.arrays.tree import Plan
from raystate.machine.checksum import Bytes

logger = logging.getLogger("raystate")

PIECE_BYTES = 256 << 20  # made at once: JAX's pool holds up the training's own transfers while it grows


class Pinned:
    """See `stagers.Stager`. It has no memory of its own."""

    def __init__(self) -> None:
        self._foreseen: dict[Any, int] = {}  # device -> bytes of the first copies off it
        self._has_held = False

    def takes(self, array: jax.Array) -> bool:  # noqa: ARG002 - as all stagers
        """All that no other takes."""
        return True

    def hold(self, plan: Plan, wanted: Sequence[ToKeep], parts: list[Any], into: Callable[[], Bytes] | None) -> Keeping:  # noqa: ARG002
        """Queues copies of whole arrays, which costs less than copies of their shards."""
        self._has_held = True
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
        copies = _put(arrays, [_copy_target(array) for array in arrays])
        for copied, where in zip(copies, places, strict=True):
            for shard, position in where:
                parts[shard] = (copied, position)
        return self

    def foresee(self, plan: Plan, wanted: Sequence[ToKeep]) -> None:  # noqa: ARG002
        """See `Stager.foresee`."""
        self._foreseen = {}
        for _, leaf, array in wanted:
            shards = array.addressable_shards
            for shard in shards if leaf.whole else [shards[one.position] for one in leaf.shards]:
                if _is_pinned(shard.device):
                    self._foreseen[shard.device] = self._foreseen.get(shard.device, 0) + shard.data.nbytes

    def restore(self, boxes: Sequence[np.ndarray], targets: Sequence[Any]) -> list[jax.Array | None]:  # noqa: ARG002
        """JAX does."""
        return [None] * len(boxes)

    def attach(self, memory: Sequence[Bytes]) -> Callable[[], None]:  # noqa: ARG002 - JAX copies through memory of its own
        """Nothing to do."""
        return nothing_to_do

    def prepare(self) -> None:
        """Has JAX make the memory, all of it before any is given back, unless a save is faster."""
        foreseen, self._foreseen = self._foreseen, {}
        zeros = np.zeros(min(PIECE_BYTES, max(foreseen.values(), default=0)), np.uint8)
        made: list[jax.Array] = []
        for device, nbytes in foreseen.items():
            target = SingleDeviceSharding(device, memory_kind="pinned_host")
            for begin in range(0, nbytes, PIECE_BYTES):
                if self._has_held:
                    return
                try:
                    made += jax.block_until_ready(_put([zeros[: nbytes - begin]], [target]))
                except jax.errors.JaxRuntimeError as error:  # the save itself would say so
                    logger.debug("no pinned memory ahead of the first save: %s", error)
                    return

    def copy(self, data: Bytes) -> dict[int, list[int]]:  # noqa: ARG002 - as `Keeping.copy`
        """All lies in `parts`."""
        return {}

    def release(self, *, reuse: bool = False) -> None:
        """Nothing to do."""


def _put(values: Sequence[Any], targets: Sequence[Any]) -> list[jax.Array]:
    return jax.device_put(values, targets, may_alias=False)


def _copy_target(array: jax.Array) -> Any:
    sharding = array.sharding
    return sharding.with_memory_kind("pinned_host") if _is_pinned(next(iter(sharding.device_set))) else sharding


def _is_pinned(device: Any) -> bool:
    """Whether copies off it go to pinned memory."""
    return device.platform != "cpu" and _has_pinned_host(device.device_kind, device)


_has: dict[str, bool] = {}  # by device kind


def _has_pinned_host(kind: str, device: Any) -> bool:
    if kind not in _has:
        _has[kind] = any(memory.kind == "pinned_host" for memory in device.addressable_memories())
    return _has[kind]
