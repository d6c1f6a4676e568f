"""From storage onto GPUs by way of a little memory, which is registered with the driver and used again and again.

Boxes land there batch by batch: TensorStore reads into it and checks their checksums, the driver copies them to the devices.
"""

from __future__ import annotations

import itertools
import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from raystate.arrays.gpus import Filling, Gpus
from raystate.arrays.stagers import ReadInto, Unread
from raystate.core.formats.boxes import Box, Index, in_batches
from raystate.machine.aligned import padded
from raystate.machine.checksum import Bytes
from raystate.machine.cuda import DriverError, Registration, driver

LANDING_BYTES = 512 << 20

_kept: list[tuple[Registration, Bytes]] = []  # and its memory, which a copy may still read


class _Segment(NamedTuple):
    """A part of a box whose bytes lie one after the other in the box, too."""

    leaf: int
    box: Box
    dtype: np.dtype
    at: int  # byte of the whole box
    arrays: list[jax.Array]  # of the whole box

    @property
    def nbytes(self) -> int:
        return self.box.size * self.dtype.itemsize


def land(
    some: Sequence[tuple[Unread, list[jax.Array]]], read: ReadInto, fill: Callable[[Sequence[Filling]], bool], gpus: Gpus
) -> bool:
    """Read boxes into arrays that only the caller has: whether they have the bytes. Raises: what `read` does."""
    parts = [part for unread, arrays in some for part in _parts(unread, arrays)]
    size = min(LANDING_BYTES, sum(padded(part.nbytes) for part in parts))
    memory = np.frombuffer(mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
    memory[:: mmap.PAGESIZE] = 0  # the driver takes ten times as long to make the pages
    registration = Registration(driver(), memory.ctypes.data, memory.size)
    try:
        gpus.stream(*some[0][1][0].devices())  # it registers in the context of a device
        while registration.go_on():
            pass
    except DriverError:
        pass  # copies go through the ring
    try:
        for batch in in_batches(parts, lambda part: padded(part.nbytes), size):
            views = list(_views(batch, memory))
            read([(part.leaf, part.box) for part in batch], views)
            if not fill([(array, part.at, view) for part, view in zip(batch, views, strict=True) for array in part.arrays]):
                return False
        return True
    finally:
        if gpus.is_settled:
            registration.close()
        else:
            _kept.append((registration, memory))


def _views(batch: Sequence[_Segment], memory: np.ndarray) -> Iterator[np.ndarray]:
    begin = 0
    for part in batch:
        yield memory[begin : begin + part.nbytes].view(part.dtype).reshape(part.box.shape)
        begin += padded(part.nbytes)


def _parts(unread: Unread, arrays: list[jax.Array]) -> Iterator[_Segment]:
    at = 0
    for box in rows_of(unread.box, unread.chunk, LANDING_BYTES // unread.dtype.itemsize):
        yield _Segment(unread.leaf, box, unread.dtype, at, arrays)
        at += box.size * unread.dtype.itemsize


def rows_of(box: Box, chunk: Index, most: int) -> Iterator[Box]:
    """The box in parts of at most `most` elements (at least one), each of which lies in one piece in it; in row-major order. Cut between
    chunks, unless a row of them has more: then some are read more than once."""
    if box.size <= max(1, most):
        yield box
        return
    axis = next(axis for axis, length in enumerate(box.shape) if length > 1)
    row = math.prod(box.shape[axis + 1 :])
    rows = most // row // chunk[axis] * chunk[axis] or max(1, most // row)
    begin, end = box.start[axis], box.start[axis] + box.shape[axis]
    edges = [begin, *range((begin // rows + 1) * rows, end, rows), end]
    for low, high in itertools.pairwise(edges):
        part = Box(
            (*box.start[:axis], low, *box.start[axis + 1 :]),
            (*box.shape[:axis], high - low, *box.shape[axis + 1 :]),
        )
        yield from rows_of(part, chunk, most)
