"""How bytes leave a kind of device and come back: one way for each, chosen once per process.

A way is a `Stager`. CPU devices have `spare.Spare`, NVIDIA's GPUs `gpu.GpuStager`, all else
`pinned.Pinned`. docs/extend.md says how to add one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from raystate.arrays.tree import ArrayLeaf, Plan
from raystate.core.formats.boxes import Box, Index
from raystate.machine.checksum import Bytes


class ToKeep(NamedTuple):
    """An array whose bytes are to be kept."""

    number: int  # of its first shard in the plan's order: see `Plan.pieces_of`
    leaf: ArrayLeaf
    array: jax.Array  # of typed PRNG keys the data


class Unread(NamedTuple):
    """A box of a stored array, and where it goes."""

    leaf: int  # index into the TreeSpec's leaves
    box: Box
    chunk: Index
    dtype: np.dtype
    targets: list[Any]  # a SingleDeviceSharding per copy

    @property
    def nbytes(self) -> int:
        return self.box.size * self.dtype.itemsize


ReadInto = Callable[[Sequence[tuple[int, Box]], Sequence[np.ndarray]], None]  # boxes by leaf, and the arrays to read them into


class Keeping(Protocol):
    """What a stager has kept of one step."""

    def copy(self, data: Bytes) -> dict[int, list[int]]:
        """Bring shards into a slot. For a background thread: waits for the computation.

        Args:
            data: of the slot, writable.

        Returns:
            Shard -> the crc32c of each of its pieces; without those that lie in `parts`, which the caller copies.
        """
        ...

    def release(self, *, reuse: bool) -> None:
        """Let the bytes go. `reuse`: they aren't read again, so the next step may lie there."""
        ...


class Stager(Protocol):
    """The way of one kind of device, for one trainer. `hold` is for one thread at a time, the training's or the stager's."""

    def takes(self, array: jax.Array) -> bool:
        """Whether the array is on such devices."""
        ...

    def hold(self, plan: Plan, wanted: Sequence[ToKeep], parts: list[Any], into: Callable[[], Bytes] | None) -> Keeping:
        """Keep these bytes although the next step may donate them.

        Args:
            plan: the same object as long as number, shapes, dtypes and devices of the arrays stay the same.
            parts: per shard of the plan. What is put there, a jax.Array on one device, (array, position of its shard), or bytes, is
                copied by the caller.
            into: begins to write the slot, if there is one already; only for a stager that has to copy at once, and so to wait.
        """
        ...

    def foresee(self, plan: Plan, wanted: Sequence[ToKeep]) -> None:
        """Such arrays are going to be held. `prepare` comes next, on another thread."""
        ...

    def restore(self, boxes: Sequence[np.ndarray], targets: Sequence[Any]) -> list[jax.Array | None]:
        """Put boxes of host memory on such devices.

        Args:
            targets: per box a SingleDeviceSharding; None: where JAX likes.

        Returns:
            Per box its array, ready, which shares no memory with it; None: JAX is to place it.
        """
        ...

    def attach(self, memory: Sequence[Bytes]) -> Callable[[], None]:
        """Slots that copies will go into; what is returned is called before they are unmapped. Returns at once."""
        ...

    def prepare(self) -> None:
        """Compile what the next `hold` can use. Quick when all is there."""
        ...

    def release(self) -> None:
        """Keep no memory any more: the trainer leaves."""
        ...


def nothing_to_do() -> None:
    """For a stager that has nothing to do when slots go."""
