"""Which stagers this process has: the one place that knows all of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from raystate.arrays.gpu import GpuStager, is_cuda
from raystate.arrays.pinned import Pinned
from raystate.arrays.spare import Spare
from raystate.arrays.stage import HeldState, foresee, hold
from raystate.arrays.stagers import ReadInto, Stager, Unread
from raystate.arrays.tree import Described
from raystate.machine.checksum import Bytes
from raystate.machine.cuda import DriverError, driver

logger = logging.getLogger("raystate")


class Ways:
    """The stagers of one trainer. Each array is for the first that takes it."""

    def __init__(self) -> None:
        self._stagers: list[Stager] = [Spare()]
        self._is_foreseen = False
        self._gpu: GpuStager | None = None
        if any(map(is_cuda, jax.local_devices())):
            try:
                driver()
                self._stagers.append(gpu := GpuStager())
                self._gpu = gpu
            except DriverError as error:
                logger.warning(
                    "NVIDIA's driver library is not to be had (%s): JAX copies snapshots, through memory of its own", error
                )
        self._stagers.append(Pinned())

    def hold(self, described: Described, into: Callable[[], Bytes] | None = None) -> HeldState:
        """See `stage.hold`."""
        return hold(described, *self._stagers, into=into)

    def spread(self, seconds: float) -> None:
        """The copy of what is held next is to take so long; 0.0: as short as it can. See `GpuStager.spread`."""
        if self._gpu is not None:
            self._gpu.spread(seconds)

    def hurry(self) -> None:
        """Somebody waits for the copies that are under way."""
        if self._gpu is not None:
            self._gpu.hurry()

    def foresee(self, described: Described) -> None:
        """States like this are going to be held."""
        foresee(described, *self._stagers)
        self._is_foreseen = True

    def prepare(self, held: bool) -> None:
        """Compile what the next `hold` can use, after one or before the first; not on the training thread. Quick when all is there."""
        if not held and not self._is_foreseen:
            return
        self._is_foreseen = False
        for stager in self._stagers:
            stager.prepare()

    def restore(self, boxes: Sequence[np.ndarray], targets: Sequence[Any]) -> list[jax.Array | None]:
        """See `Stager.restore`."""
        placed: list[jax.Array | None] = [None] * len(boxes)
        for stager in self._stagers:
            placed = [other if one is None else one for one, other in zip(placed, stager.restore(boxes, targets), strict=True)]
        return placed

    @property
    def receives(self) -> bool:
        """Whether there are devices that `receive` is for."""
        return self._gpu is not None

    def receive(self, unread: Sequence[Unread], read: ReadInto) -> list[list[jax.Array] | None]:
        """See `GpuStager.receive`: other devices have no use for it."""
        return [None] * len(unread) if self._gpu is None else self._gpu.receive(unread, read)

    def attach(self, memory: Sequence[Bytes]) -> list[Callable[[], None]]:
        """Slots that will be written; what is returned is called before they are unmapped."""
        return [stager.attach(memory) for stager in self._stagers]

    def release(self) -> None:
        """Keep no memory any more."""
        for stager in self._stagers:
            stager.release()


@functools.lru_cache(maxsize=1)
def of_restores() -> Ways:
    """For all that this process restores."""
    return Ways()
