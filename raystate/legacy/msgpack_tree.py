"""The structure of a msgpack file as flax writes it, without the bytes of its arrays.

A file that somebody made up must neither run anything nor take the memory. So nothing here believes a count: a container has at least
one byte for each entry, an array's shape must give its bytes, and levels, entries and texts have limits. The msgpack library checks
none of this before it makes room, and it can't leave an array's bytes where they are.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "int4", "float8_…"
import numpy as np

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.legacy.byte_file import ByteFile

MOST_LEVELS = 100
MOST_ENTRIES = 1 << 18
MOST_KEY_BYTES = 60_000
MOST_TEXT_BYTES = 16 << 20  # of all texts, keys and bytes of a file together
MOST_DIMENSIONS = 64  # numpy's

_CHUNKED = "__msgpack_chunked_array__"
_NDARRAY, _COMPLEX, _NUMPY_SCALAR = 1, 2, 3  # flax's extension types
_NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
# First byte -> (kind, bytes of the length field).
_SIZED = {
    0xC4: ("bin", 1), 0xC5: ("bin", 2), 0xC6: ("bin", 4), 0xC7: ("ext", 1), 0xC8: ("ext", 2), 0xC9: ("ext", 4),
    0xD9: ("str", 1), 0xDA: ("str", 2), 0xDB: ("str", 4), 0xDC: ("list", 2), 0xDD: ("list", 4), 0xDE: ("map", 2), 0xDF: ("map", 4),
}  # fmt: skip
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EMPTY_MAP = 0x80
_MAPS_AND_EXTENSIONS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF, 0xC7, 0xC8, 0xC9, *_FIXED_EXT))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileArray:
    """An array in the file. `extents`: (offset, bytes) of its row-major bytes; a large one has several."""

    shape: tuple[int, ...]
    dtype: np.dtype
    extents: tuple[tuple[int, int], ...]
    scalar: bool = False  # it was a numpy scalar


Node = Any  # dict[str, Node] | list[Node] | FileArray | complex | bytes | int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class _Head:
    """What the first bytes of a value say. `length`: entries of a container, bytes of a payload; `value`: of a number or constant."""

    kind: Literal["value", "str", "bin", "list", "map", "ext"]
    start: int  # of the payload
    length: int = 0
    value: Any = None
    code: int = 0  # of an extension


def begins_as_tree(file: ByteFile) -> bool:
    """Whether the file may be one of flax's, by its content: it begins with a map or an array. Text
    begins with neither.

    Nothing follows an empty map: a file that begins so and goes on is a pickle, for example.
    """
    first = file.read(0, 1)[0] if file.size > 0 else None
    return first in _MAPS_AND_EXTENSIONS and not (first == _EMPTY_MAP and file.size > 1)


def read_structure(file: ByteFile) -> Node:
    """The tree in a file; its arrays as `FileArray`, chunked ones put together.

    Raises:
        CorruptCheckpointError: it is no msgpack, cut short, or of another making than flax's; names the file and the byte.
        StorageError: storage failed.
    """
    scanner = _Scanner(file)
    tree, end = scanner.value(0, 0, file.size)
    if end != file.size:
        raise scanner.error(end, f"{file.size - end} bytes follow the end of the tree")
    return tree


class _Scanner:
    def __init__(self, file: ByteFile):
        self._file = file
        self._entries = 0
        self._text_bytes = 0

    def error(self, at: int, why: str) -> CorruptCheckpointError:
        text = f"{self._file.where} is no checkpoint that flax wrote: {why} (at byte {at} of {self._file.size})"
        return CorruptCheckpointError(text, path=self._file.where)

    def value(self, at: int, level: int, end: int) -> tuple[Node, int]:
        """The value at a byte, and where it ends. All of it lies before `end`."""
        head = self._head(at, end)
        match head.kind:
            case "value":
                return head.value, head.start
            case "str":
                return self._text(head), head.start + head.length
            case "bin":
                return self._bytes(head), head.start + head.length
            case "ext":
                return self._extension(head), head.start + head.length
            case _:
                return self._container(head, at, level, end)

    def _container(self, head: _Head, at: int, level: int, end: int) -> tuple[Node, int]:
        if level >= MOST_LEVELS:
            raise self.error(at, f"it is nested more than {MOST_LEVELS} levels deep")
        self._entries += head.length
        if self._entries > MOST_ENTRIES:
            raise self.error(at, f"it has more than {MOST_ENTRIES} entries")
        at = head.start
        if head.kind == "list":
            items: list[Node] = []
            for _ in range(head.length):
                item, at = self.value(at, level + 1, end)
                items.append(item)
            return items, at
        tree: dict[str, Node] = {}
        for _ in range(head.length):
            key, at = self._key(at, end)
            if key in tree:
                raise self.error(at, f"the key {key[:60]!r} is there twice")
            tree[key], at = self.value(at, level + 1, end)
        return (self._joined(tree, at) if _CHUNKED in tree else _as_named(tree)), at

    def _key(self, at: int, end: int) -> tuple[str, int]:
        head = self._head(at, end)
        if head.kind in ("str", "bin") and head.length <= MOST_KEY_BYTES:
            return self._text(head), head.start + head.length
        if head.kind == "value" and type(head.value) is int:
            return str(head.value), head.start
        raise self.error(at, "a key is neither a text nor an integer, or too long")

    # ------------------------------------------------------------ arrays

    def _extension(self, head: _Head) -> Node:
        end = head.start + head.length
        if head.code == _COMPLEX:
            parts, after = self.value(head.start, MOST_LEVELS - 1, end)
            if after != end or not isinstance(parts, list) or len(parts) != 2 or not all(type(x) is float for x in parts):
                raise self.error(head.start, "a complex number is not made of two floats")
            return complex(*parts)
        if head.code not in (_NDARRAY, _NUMPY_SCALAR):
            raise self.error(head.start, f"extension type {head.code} is none of flax's")
        outer = self._head(head.start, end)
        if (outer.kind, outer.length) != ("list", 3):
            raise self.error(head.start, "an array is not made of shape, dtype and bytes")
        shape, at = self.value(outer.start, MOST_LEVELS - 1, end)
        dtype, at = self._key(at, end)
        data = self._head(at, end)
        if data.kind not in ("bin", "str") or data.start + data.length != end:
            raise self.error(at, "an array's bytes do not end where it ends")
        array = FileArray(
            shape=self._shape(shape, head.start),
            dtype=self._dtype(dtype, head.start),
            extents=((data.start, data.length),) if data.length else (),
            scalar=head.code == _NUMPY_SCALAR,
        )
        self._check_bytes(array, head.start)
        return array

    def _joined(self, tree: dict[str, Node], at: int) -> FileArray:
        """An array of more than a gigabyte: flax cuts it into flat ones."""
        shape, chunks = tree.get("shape"), tree.get("chunks")
        if not isinstance(shape, dict) or not isinstance(chunks, dict) or not chunks:
            raise self.error(at, "a chunked array has no shape or no chunks")
        parts = [chunks.get(str(index)) for index in range(len(chunks))]
        sizes = [shape.get(str(index)) for index in range(len(shape))]
        arrays = [part for part in parts if isinstance(part, FileArray) and len(part.shape) == 1]
        if len(arrays) != len(parts) or len({part.dtype for part in arrays}) != 1:
            raise self.error(at, "the chunks of an array are not flat arrays of one dtype, numbered from 0")
        extents = tuple(extent for part in arrays for extent in part.extents)
        array = FileArray(shape=self._shape(sizes, at), dtype=arrays[0].dtype, extents=extents)
        self._check_bytes(array, at)
        return array

    def _shape(self, shape: Node, at: int) -> tuple[int, ...]:
        if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
            raise self.error(at, "an array's shape is no list of sizes")
        if math.prod(size for size in shape if size) > 2**58:  # numpy takes no more than 2**63 bytes, and passes over a size of 0
            raise self.error(at, f"an array has the shape {tuple(shape)}")
        return tuple(shape)

    def _dtype(self, name: str, at: int) -> np.dtype:
        try:
            dtype = np.dtype(name) if name.isascii() and name.replace("_", "").isalnum() else None
        except TypeError:
            dtype = None
        # By its name alone: what else numpy makes a dtype of (structures, objects) has no place here.
        if dtype is None or dtype.hasobject or dtype.names is not None or dtype.name != name or not dtype.itemsize:
            raise self.error(at, f"an array has the dtype {name[:60]!r}")
        return dtype

    def _check_bytes(self, array: FileArray, at: int) -> None:
        have, want = sum(length for _, length in array.extents), math.prod(array.shape) * array.dtype.itemsize
        if have != want:
            raise self.error(at, f"an array of shape {array.shape} and {array.dtype} needs {want} bytes and has {have}")

    # ------------------------------------------------------------ bytes

    def _text(self, head: _Head) -> str:
        try:
            return self._bytes(head).decode()
        except UnicodeDecodeError:
            raise self.error(head.start, "a text is not UTF-8") from None

    def _bytes(self, head: _Head) -> bytes:
        self._text_bytes += head.length
        if self._text_bytes > MOST_TEXT_BYTES:
            raise self.error(head.start, f"its texts take more than {MOST_TEXT_BYTES} bytes")
        return self._file.peek(head.start, head.length) if head.length else b""

    def _head(self, at: int, end: int) -> _Head:
        first = self._take(at, 1, end)[0]
        at += 1
        if first < 0x80 or first >= 0xE0:
            return _Head("value", at, value=first if first < 0x80 else first - 0x100)
        if first in _CONSTANTS:
            return _Head("value", at, value=_CONSTANTS[first])
        if first in _NUMBERS:
            form = _NUMBERS[first]
            size = struct.calcsize(form)
            return _Head("value", at + size, value=struct.unpack(form, self._take(at, size, end))[0])
        code = 0
        if first < 0xC0:
            kind: Any = "map" if first < 0x90 else "list" if first < 0xA0 else "str"
            length = first & (0x1F if kind == "str" else 0x0F)
        elif first in _FIXED_EXT:
            kind, length = "ext", _FIXED_EXT[first]
        elif first in _SIZED:
            kind, size = _SIZED[first]
            length = int.from_bytes(self._take(at, size, end))
            at += size
        else:
            raise self.error(at - 1, f"no value begins with {first:#04x}")
        if kind == "ext":
            code = self._take(at, 1, end)[0]
            at += 1
        if at + length * (2 if kind == "map" else 1) > end:
            raise self._file.truncated(at, length) if end == self._file.size else self.error(at, "a value ends after its container")
        return _Head(kind, at, length=length, code=code)

    def _take(self, at: int, length: int, end: int) -> bytes:
        if at + length > end:
            raise self._file.truncated(at, length) if end == self._file.size else self.error(at, "a value ends after its container")
        return self._file.peek(at, length)


def _as_named(tree: dict[str, Node]) -> Node:
    """Flax once wrote a NamedTuple as three dicts; now it is one of field names, as everything else."""
    if set(tree) != {"name", "fields", "values"} or not isinstance(tree["fields"], dict) or not isinstance(tree["values"], dict):
        return tree
    fields, values = tree["fields"], tree["values"]
    if set(fields) != set(values) or not all(isinstance(name, str) for name in fields.values()):
        return tree
    return {name: values[index] for index, name in fields.items()}
