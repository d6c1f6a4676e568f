"""Memory as XLA's CPU client wants it: what begins at a multiple of 64 bytes becomes a jax.Array without a copy."""

from __future__ import annotations

import math

import numpy as np

ALIGNMENT_BYTES = 64
SMALL_BYTES = 64 << 10  # up to it an array isn't worth memory of its own: it is copied


def aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array, not initialized."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT_BYTES, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[offset : offset + nbytes].view(dtype).reshape(shape)


def padded(nbytes: int) -> int:
    """What an array of so many bytes takes where others lie behind it."""
    return -(-max(1, nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def is_aligned(array: np.ndarray) -> bool:
    """Whether it lies as `aligned` gives it: contiguous, in row-major order."""
    return array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0
