"""crc32c of arrays, and copies that come with it, without keeping Python's other threads waiting. Needs nothing of raystate.

On an idle machine with one thread it is a fifth faster to checksum each block of 1 MiB right after
its copy, while it is in the cache. But every call that lets other threads run waits for its turn
again. That takes up to Python's switch interval (5 ms) if another thread runs Python code, as a
trainer's main thread does. Beside such a thread, blocks gave 0.1 to 0.2 GB/s a thread and two long
passes 4.5. So it makes two long passes. Small arrays are copied and checksummed with the lock held,
in less time than asking for it again would take.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import google_crc32c
import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_SMALL_BYTES = 256 * 1024  # copied and checksummed with Python's lock held: 0.06 ms
_LOCKED_BYTES = 8 * 1024 * 1024  # per call that holds Python's lock where there is no C function: 0.7 ms


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


def crc32c(array: Bytes | bytes, crc: int = 0) -> int:
    """crc32c of bytes.

    Args:
        array: uint8, contiguous, any shape; or a bytes object.
        crc: checksum of what came before it.
    """
    flat = _flat(array)
    if flat.size <= _SMALL_BYTES:
        return google_crc32c.extend(crc, flat)
    if _extend is not None:
        return _extend(crc, flat.ctypes.data, flat.size)
    for start in range(0, flat.size, _LOCKED_BYTES):
        crc = google_crc32c.extend(crc, flat[start : start + _LOCKED_BYTES])
    return crc


def copy(dst: Bytes, src: Bytes) -> None:
    """Copy `src` to `dst`: uint8, contiguous, of the same number of bytes, not overlapping."""
    to, source = _flat(dst), _flat(src)
    if to.size != source.size:
        raise ValueError(f"copy of {source.size} bytes into {to.size}")
    if to.size <= _SMALL_BYTES:
        to.data[:] = source.data  # numpy lets go of the lock for as little as 500 elements
    else:
        np.copyto(to, source)


def _flat(array: Bytes | bytes) -> Bytes:
    if isinstance(array, bytes):
        return np.frombuffer(array, np.uint8)
    if array.dtype != np.uint8 or not array.flags.c_contiguous:
        raise ValueError(f"expected contiguous uint8, got {array.dtype} with strides {array.strides}")
    return array.reshape(-1)
