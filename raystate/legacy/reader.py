"""One checkpoint in flax's older forms: a msgpack file, with or without arrays beside it."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.tree import ArraySpec, LeafSpec, PathKey, TreeSpec
from raystate.legacy.byte_file import READ_BYTES, WINDOW_BYTES, ByteFile
from raystate.legacy.msgpack_tree import FileArray, Node, read_structure
from raystate.legacy.names import GDA
from raystate.orbax import kv
from raystate.orbax.array_reads import Request, read_boxes
from raystate.orbax.array_specs import open_arrays
from raystate.orbax.step_reader import ItemKind, StepReader
from raystate.storage import Storage
from raystate.storage.names import MANIFEST

ITEM = "state"
STRUCTURE = "checkpoint"  # Orbax's msgpack file in a folder
_OF_PROCESSES = "//GDAPlaceholder:"  # flax's text in the place of an array that lies beside the file
_OF_ORBAX = "PLACEHOLDER://"


@dataclass(frozen=True, slots=True)
class _Beside:
    """An array that lies beside the file."""

    store: ts.TensorStore


class LegacyReader(StepReader):
    """Reads the structure at once and arrays when they are asked for. Executes nothing; see `msgpack_tree` for its limits.

    Scalars, texts and None are values; a bytes object is an array of uint8, a complex number one of shape ().

    Args:
        storage: the folder that the file lies in.
        name: the file, or a folder with a file `checkpoint` in it, as Orbax's older versions wrote.

    Attributes:
        is_file: it is a file, not a folder.

    Raises:
        CorruptCheckpointError: the file is no checkpoint of flax's, cut short, or an array that it names is not there.
        StorageError: storage failed.
    """

    def __init__(self, storage: Storage, name: str):
        super().__init__(storage, name)
        self.is_file = storage.exists(name)
        self._file_of_tree = ByteFile(storage, name if self.is_file else f"{name}/{STRUCTURE}")
        self.is_replaced = self._file_of_tree.is_replaced
        self._structure = read_structure(self._file_of_tree)
        beside = f"{name}{GDA}/" if self.is_file else f"{name}/"
        self._arrays_folder = kv.below(storage.kvstore(""), beside)
        self._arrays_where = f"{storage.url}/{beside}"
        self._prefix = _OF_PROCESSES if self.is_file else _OF_ORBAX
        self._ocdbt = not self.is_file and storage.exists(f"{name}/{MANIFEST}")
        self._ctx = kv.context()
        self._beside_bytes = 0

    @property
    def paths_beside(self) -> list[tuple[PathKey, ...]]:
        """Of the arrays that the file names and that lie outside of it."""
        return [path for path, node in _leaves(self._structure) if self._name_beside(node) is not None]

    def items(self) -> dict[str, ItemKind]:
        """One tree, the state."""
        return {ITEM: "arrays"}

    def metrics(self) -> dict[str, Any]:
        """None: flax wrote no such thing."""
        return {}

    def custom(self) -> Any:
        """None: flax wrote no such thing."""
        return None

    def times(self) -> tuple[float | None, float | None]:
        """Unknown."""
        return None, None

    def tree(self, item: str = ITEM) -> TreeSpec:
        """See `StepReader.tree`. Lists keep their form where the file has any; flax itself writes them as {'0': …}."""
        return TreeSpec(item=item, leaves=tuple(_leaf(path, node) for path, node in self._all))

    def read(self, item: str, requests: Sequence[Request]) -> list[np.ndarray]:
        """See `StepReader.read`."""
        arrays = self.tree(item).leaves
        nodes = self._all
        stored = [place for place, (leaf, _, _) in enumerate(requests) if isinstance(nodes[leaf][1], _Beside)]
        parts = read_boxes(
            {requests[place][0]: (arrays[requests[place][0]], nodes[requests[place][0]][1].store) for place in stored},
            [requests[place] for place in stored],
            what=lambda leaf: f"reading array {arrays[leaf].name!r} in {self._arrays_where}",
            facts=lambda leaf: {"path": arrays[leaf].name},
            on_bytes=self._count,
        )
        if stored:
            self._file_of_tree.refuse_replaced()  # arrays beside the file are replaced with it
        beside = dict(zip(stored, parts, strict=True))
        answer = [
            beside[place] if place in beside else self._box(nodes[leaf][1], start, shape)
            for place, (leaf, start, shape) in enumerate(requests)
        ]
        self.bytes_read = self._file_of_tree.bytes_read + self._beside_bytes
        return answer

    def _count(self, nbytes: int) -> None:
        self._beside_bytes += nbytes

    def state_dict(self, beside: Mapping[tuple[PathKey, ...], Any]) -> Any:
        """The whole tree as flax restores it: nested dicts, numpy arrays and scalars, Python's own values.

        Args:
            beside: path -> value, of all `paths_beside`.
        """
        return self._as_flax(self._structure, (), beside)

    def has_checksums(self, item: str, name: str) -> bool:
        """False: these files have none."""
        del item, name
        return False

    # ------------------------------------------------------------ inside

    def _as_flax(self, node: Node, path: tuple[PathKey, ...], beside: Mapping[tuple[PathKey, ...], Any]) -> Any:
        if path in beside:
            return beside[path]
        if isinstance(node, dict):
            return {key: self._as_flax(value, (*path, key), beside) for key, value in node.items()}
        if isinstance(node, list):
            return [self._as_flax(value, (*path, index), beside) for index, value in enumerate(node)]
        if isinstance(node, FileArray):
            array = read_box(self._file_of_tree, node, (0,) * len(node.shape), node.shape)
            return array[()] if node.scalar else array
        return node

    @functools.cached_property
    def _all(self) -> list[tuple[tuple[PathKey, ...], Any]]:
        """(path, node) of all leaves, with the arrays beside the file open."""
        found = list(_leaves(self._structure))
        names = {place: name for place, (_, node) in enumerate(found) if (name := self._name_beside(node)) is not None}
        if names:
            kv.refuse_special(self._arrays_folder, f"the arrays of {self._file_of_tree.where}")
        stores = open_arrays(
            {name: self._spec_beside(name) for name in names.values()},
            numbers=(),
            named=lambda name: kv.named_errors(f"opening array {name!r} in {self._arrays_where}", damage=True, path=name),
            context=self._ctx,
        )
        for place, name in names.items():
            found[place] = (found[place][0], _Beside(stores[name]))
        return found

    def _name_beside(self, node: Node) -> str | None:
        return node.removeprefix(self._prefix) if isinstance(node, str) and node.startswith(self._prefix) else None

    def _spec_beside(self, name: str) -> dict[str, Any]:
        parts = name.split("/") if name else []  # a tree that is one array has no name
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            text = f"{self._file_of_tree.where}: array {name[:60]!r} is no name inside the checkpoint"
            raise CorruptCheckpointError(text, path=name)
        folder, below = self._arrays_folder, f"{name}/" if name else ""
        return {  # chunks of zeros were not written then: a missing one is zeros
            "driver": "zarr",
            "kvstore": kv.ocdbt(folder, below) if self._ocdbt else kv.below(folder, below),
            "open": True,
            "recheck_cached_data": False,
            "recheck_cached_metadata": False,
        }

    def _box(self, node: Any, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        if isinstance(node, FileArray):
            return read_box(self._file_of_tree, node, start, shape)
        box = tuple(slice(begin, begin + length) for begin, length in zip(start, shape, strict=True))
        return np.array(_small_array(node)[box])


def _leaves(node: Node, path: tuple[PathKey, ...] = ()) -> Iterator[tuple[tuple[PathKey, ...], Node]]:
    if isinstance(node, dict | list) and node:
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(child, (*path, key))
    else:
        yield path, node


def _leaf(path: tuple[PathKey, ...], node: Any) -> LeafSpec:
    match node:
        case FileArray(shape=shape, dtype=dtype):
            return LeafSpec(path=path, kind="array", array=_spec(shape, dtype.name, shape))
        case _Beside(store=store):
            return LeafSpec(
                path=path, kind="array", array=_spec(store.shape, store.dtype.name, store.chunk_layout.read_chunk.shape or ())
            )
        case bytes() | complex():
            array = _small_array(node)
            return LeafSpec(path=path, kind="array", array=_spec(array.shape, array.dtype.name, array.shape))
        case None:
            return LeafSpec(path=path, kind="none")
        case dict():
            return LeafSpec(path=path, kind="dict")
        case list():
            return LeafSpec(path=path, kind="list")
        case str():
            return LeafSpec(path=path, kind="string", value=node)
        case _:
            return LeafSpec(path=path, kind="scalar", value=node)


def _small_array(node: bytes | complex) -> np.ndarray:
    return np.frombuffer(node, np.uint8) if isinstance(node, bytes) else np.asarray(node)


def _spec(shape: Sequence[int], dtype: str, chunk: Sequence[int | None]) -> ArraySpec:
    return ArraySpec(shape=tuple(shape), dtype=dtype, chunk=tuple(max(1, size or 1) for size in chunk), typestr="np.ndarray")


# ---------------------------------------------------------------- boxes of arrays that lie row-major in a file, in pieces

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
