"""safetensors as a step: names and arrays in, a described tree out."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.core.formats.tree import LeafSpec, TreeSpec
from raystate.orbax.array_reads import Request
from raystate.restored import STATE
from raystate.transfer import safetensors_format
from raystate.transfer.description import (
    KEY,
    MOST_DESCRIPTION_BYTES,
    DescribedTree,
    KeptAs,
    is_description,
    leaf_name,
    parse_description,
    tree_of_names,
)
from raystate.transfer.incoming import IncomingStep
from raystate.transfer.safetensors_format import INDEX_SUFFIX, SUFFIX, Tensor, parse_header, parse_index
from raystate.transfer.urls import storage_errors

_BLOCK_BYTES = 16 << 20  # that a remote file is read ahead by

ReadStored = Callable[[str, tuple[int, ...], tuple[int, ...]], np.ndarray]
"""name, start, shape -> a box, with the dtype that it has in the file."""


def safetensors_step(fs: Any, folder: str, names: Sequence[str], *, step: int | None, flat: bool, what: str) -> IncomingStep:
    """One or more safetensors files of a folder as a step; see `flat_step`.

    Args:
        names: of the files; or one index.
    """
    description: str | None = None
    expected: dict[str, str] | None = None
    if len(names) == 1 and names[0].endswith(INDEX_SUFFIX):
        with storage_errors("read", f"{folder}/{names[0]}"), _open(fs, f"{folder}/{names[0]}" if folder else names[0]) as file:
            data = file.read(MOST_DESCRIPTION_BYTES + 1)
        if len(data) > MOST_DESCRIPTION_BYTES:
            raise CorruptCheckpointError(f"{what} has more than {MOST_DESCRIPTION_BYTES} bytes, too many for an index", path=what)
        expected, described = parse_index(data, what)
        description = json.dumps(described) if described is not None else None
        names = sorted(set(expected.values()))
    files: dict[str, _TensorFile] = {}
    for name in names:
        file = _TensorFile(fs, f"{folder}/{name}" if folder else name, f"{what}: {name}" if len(names) > 1 else what)
        for tensor in file.tensors:
            if tensor in files:
                raise CorruptCheckpointError(f"{what}: array {tensor!r} is in several files", path=tensor)
            files[tensor] = file
        if expected is None and len(names) == 1:
            description = file.metadata.get(KEY)
    if expected is not None and set(expected) != set(files):
        unlike = sorted(set(expected) ^ set(files))[:5]
        raise CorruptCheckpointError(f"{what}: the index and the files don't agree, such as on {unlike}", path=what)
    if description is not None and not is_description(description):
        description = None
    found = {name: file.tensors[name].stored for name, file in files.items()}

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        return files[name].read(name, start, shape)

    return flat_step(found, read, safetensors_format.DTYPES, description, step=step, flat=flat, what=what)


def flat_step(
    found: Mapping[str, KeptAs],
    read_stored: ReadStored,
    has: frozenset[str],
    description: str | bytes | None,
    *,
    step: int | None,
    flat: bool,
    what: str,
) -> IncomingStep:
    """A step whose state is made of named arrays.

    Args:
        found: name -> how the array lies there.
        read_stored: reads a box.
        has: the dtypes that the format has.
        description: ours, None if there is none.
        step: the number it gets; None: the one that the description says.
        flat: see `tree_of_names`.
        what: begins an error's message.

    Raises:
        ConfigError: no number is given, or a name or dtype can't be kept. CorruptCheckpointError.
    """
    if description is not None and not flat:
        described = parse_description(description, found, has, what)
    else:
        described = tree_of_names(found, flat=flat, what=what)
    number = step if step is not None else described.step
    if number is None:
        raise ConfigError(f"{what} doesn't say which step it is; --step N gives it a number", field="step")
    tree = _with_values(described, read_stored)

    def read(_item: str, requests: Sequence[Request]) -> list[np.ndarray]:
        return [_read_leaf(tree.leaves[leaf], start, shape, found, read_stored) for leaf, start, shape in requests]

    return IncomingStep(step=number, trees={STATE: dataclasses.replace(tree, item=STATE)}, read=read)


def _with_values(described: DescribedTree, read_stored: ReadStored) -> TreeSpec:
    leaves = [
        dataclasses.replace(leaf, value=read_stored(leaf_name(leaf), (), ()).item()) if leaf.kind == "scalar" else leaf
        for leaf in described.tree.leaves
    ]
    return dataclasses.replace(described.tree, leaves=tuple(leaves))


def _read_leaf(
    leaf: LeafSpec, start: tuple[int, ...], shape: tuple[int, ...], found: Mapping[str, KeptAs], read_stored: ReadStored
) -> np.ndarray:
    assert leaf.array is not None
    name, dtype = leaf_name(leaf), np.dtype(leaf.array.dtype)
    if len(found[name].shape) > len(shape):  # complex128 as two float64
        box = read_stored(name, (*start, 0), (*shape, 2))
        return np.ascontiguousarray(box).view(dtype).reshape(shape)
    box = read_stored(name, start, shape)
    return box if box.dtype == dtype else np.ascontiguousarray(box).reshape(shape).view(dtype)


class _TensorFile:
    """A safetensors file of any file system."""

    def __init__(self, fs: Any, path: str, what: str):
        self._what = what
        self._lock = threading.Lock()
        self._fs = fs  # an archive stays open as long as its file system is referred to
        with storage_errors("open", path):
            self._file = _open(fs, path)
            size = self._file.seek(0, 2)
        self._path = path
        header = parse_header(self._bytes, size, what)
        self.tensors: Mapping[str, Tensor] = header.tensors
        self.metadata = header.metadata

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        """A box whose elements follow one another in row-major order."""
        tensor = self.tensors[name]
        dtype = np.dtype(tensor.stored.dtype)
        count = int(np.prod(shape, dtype=np.int64))
        if count == 0:
            return np.empty(shape, dtype)
        at = tensor.begin + (int(np.ravel_multi_index(start, tensor.stored.shape)) if start else 0) * dtype.itemsize
        return np.frombuffer(self._bytes(at, at + count * dtype.itemsize), np.uint8).view(dtype).reshape(shape)

    def _bytes(self, begin: int, end: int) -> bytes:
        with storage_errors("read", self._path), self._lock:
            self._file.seek(begin)
            data = self._file.read(end - begin)
            while len(data) < end - begin and (more := self._file.read(end - begin - len(data))):
                data += more
        if len(data) != end - begin:
            raise CorruptCheckpointError(f"{self._what} ends before byte {end}", path=self._what)
        return data


def is_tensor_name(name: str) -> bool:
    """Whether a file's name is that of a safetensors file or index."""
    return name.endswith((SUFFIX, INDEX_SUFFIX))


def _open(fs: Any, path: str) -> Any:
    return fs.open(path, "rb", block_size=_BLOCK_BYTES)
