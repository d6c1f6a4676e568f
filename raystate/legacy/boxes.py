"""Boxes of arrays that lie row-major in a file, in one piece or several."""

from __future__ import annotations

import math

import numpy as np

from raystate.legacy.byte_file import READ_BYTES, WINDOW_BYTES, ByteFile
from raystate.legacy.msgpack_tree import FileArray

Index = tuple[int, ...]


def read_box(file: ByteFile, array: FileArray, start: Index, shape: Index) -> np.ndarray:
    """A box of an array. Beside the box itself at most `READ_BYTES` are held.

    Args:
        file: where its bytes are.
        array: of which shape and dtype.
        start, shape: the box, in elements.
    """
    box = np.empty(shape, array.dtype)
    if box.size:
        _fill(file, array, box, 0, array.shape, start)
    return box


def _fill(file: ByteFile, array: FileArray, box: np.ndarray, offset: int, shape: Index, start: Index) -> None:
    """Fill a box of the subarray of this shape, whose bytes begin at `offset` of the array's."""
    itemsize = array.dtype.itemsize
    if not shape:
        box[()] = np.frombuffer(_flat(file, array, offset, itemsize), array.dtype)[0]
        return
    row_bytes = math.prod(shape[1:]) * itemsize
    inner = tuple(slice(begin, begin + length) for begin, length in zip(start[1:], box.shape[1:], strict=True))
    if row_bytes > READ_BYTES:
        for row in range(box.shape[0]):
            _fill(file, array, box[row, ...], offset + (start[0] + row) * row_bytes, shape[1:], start[1:])
        return
    rows_at_once = max(1, READ_BYTES // row_bytes)
    for row in range(0, box.shape[0], rows_at_once):
        rows = min(rows_at_once, box.shape[0] - row)
        data = _flat(file, array, offset + (start[0] + row) * row_bytes, rows * row_bytes)
        box[row : row + rows] = np.frombuffer(data, array.dtype).reshape(rows, *shape[1:])[(slice(None), *inner)]


def _flat(file: ByteFile, array: FileArray, offset: int, length: int) -> bytes:
    """These of the array's bytes, wherever its pieces lie."""
    parts: list[bytes] = []
    for begin, size in array.extents:
        if offset < size and length:
            taken = min(length, size - offset)
            # Small arrays lie one after the other: one request brings many.
            read = file.peek if taken * 2 < WINDOW_BYTES else file.read
            parts.append(read(begin + offset, taken))
            offset, length = 0, length - taken
        else:
            offset -= min(offset, size)
    return parts[0] if len(parts) == 1 else b"".join(parts)
