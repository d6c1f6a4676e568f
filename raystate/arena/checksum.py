"""crc32c of big arrays, and copies that compute it on the way, without keeping Python's other threads waiting.

Checksumming a block right after copying it, while it is in the cache, is a third faster than two passes; but each call that lets
other threads run has to wait for its turn again, up to Python's switch interval (5 ms), whenever another thread runs Python code.
So blocks are small while that costs nothing and grow as soon as it does.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import google_crc32c
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SMALL_BYTES = 256 * 1024  # source and destination of a block fit a core's cache
_SLOW_S = 0.002  # more than this above the block's own time: other threads were run in between
_PLAIN_BYTES_PER_S = 1e9  # any machine copies touched memory faster


def _find_extend() -> Callable[[int, int, int], int] | None:
    """The C function under google_crc32c, (crc, address, length) -> crc, which needs no Python lock; None if it is not exported."""
    try:
        from google_crc32c import _crc32c  # pyright: ignore[reportAttributeAccessIssue] # a C module

        extend = ctypes.CDLL(_crc32c.__file__).crc32c_extend
        extend.restype, extend.argtypes = ctypes.c_uint32, (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_size_t)
        known = ctypes.create_string_buffer(b"123456789", 9)
        return extend if extend(0, ctypes.addressof(known), 9) == 0xE3069283 else None
    except (ImportError, OSError, AttributeError, TypeError):
        return None


_extend = _find_extend()
# Without the C function the checksum itself holds Python's lock: about 1.3 ms for 16 MiB.
_BIG_BYTES = (64 if _extend else 16) * 1024 * 1024


class _Pace:
    """Block size for the next call; shared by all threads, and any value is right, so updates need no lock."""

    def __init__(self) -> None:
        self.block_bytes = _SMALL_BYTES

    def note(self, done_bytes: int, elapsed_s: float) -> None:
        if elapsed_s > done_bytes / _PLAIN_BYTES_PER_S + _SLOW_S:
            self.block_bytes = min(self.block_bytes * 4, _BIG_BYTES)
        elif self.block_bytes > _SMALL_BYTES:
            self.block_bytes = max(self.block_bytes // 2, _SMALL_BYTES)


_pace = _Pace()


def crc32c(array: Bytes | bytes, crc: int = 0) -> int:
    """crc32c of bytes.

    Args:
        array: uint8, contiguous, any shape; or a bytes object.
        crc: checksum of what came before it.
    """
    flat = _flat(array)
    for start in range(0, flat.size, _BIG_BYTES):
        crc = _extend_by(crc, flat[start : start + _BIG_BYTES])
    return crc


def copy_with_crc(dst: Bytes, src: Bytes) -> int:
    """Copy `src` to `dst` and return its crc32c.

    Args:
        dst, src: uint8, contiguous, of the same number of bytes, not overlapping. Several threads may call this at once.
    """
    to, source = _flat(dst), _flat(src)
    if to.size != source.size:
        raise ValueError(f"copy of {source.size} bytes into {to.size}")
    crc = start = 0
    while start < source.size:
        began_s = time.perf_counter()
        stop = min(start + _pace.block_bytes, source.size)
        block = source[start:stop]
        np.copyto(to[start:stop], block)
        crc = _extend_by(crc, block)
        _pace.note(stop - start, time.perf_counter() - began_s)
        start = stop
    return crc


def _extend_by(crc: int, block: Bytes) -> int:
    if _extend is None or block.size < 4096:
        return google_crc32c.extend(crc, block)
    return _extend(crc, block.ctypes.data, block.size)


def _flat(array: Bytes | bytes) -> Bytes:
    if isinstance(array, bytes):
        return np.frombuffer(array, np.uint8)
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise ValueError(f"expected contiguous uint8, got {array.dtype} with strides {array.strides}")
    return array.reshape(-1)
