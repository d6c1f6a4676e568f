"""npz: a zip archive of .npy files, written without compression and read a box at a time. Nothing in it is unpickled, ever."""

from __future__ import annotations

import io
import itertools
import math
import struct
import threading
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.transfer.description import MOST_DESCRIPTION_BYTES, KeptAs, check_shape, is_plain_name

SUFFIX = ".npz"
DESCRIPTION = "__raystate__"  # the member with our description, as uint8
DTYPES = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    }
)
_MEMBER = ".npy"
_MOST_NAME_BYTES = 60_000  # zip has 65,535
_MOST_FORTRAN_BYTES = 1 << 30
_BAD = (  # what zipfile, zlib and numpy's parser of headers say of bytes that are not theirs
    zipfile.BadZipFile, zlib.error, struct.error, tokenize.TokenError, EOFError, ValueError, NotImplementedError, RuntimeError, KeyError,
    SyntaxError, TypeError, MemoryError, OverflowError,
)  # fmt: skip


def npz_chunks(arrays: Mapping[str, KeptAs], description: str, parts: Iterable[tuple[str, np.ndarray]]) -> Iterator[bytes]:
    """The bytes of an archive.

    Args:
        arrays: name -> what is written.
        description: goes into a member of its own, the first one.
        parts: (name, bytes as uint8) of each array, one after the other, in row-major order.
    """
    sink = _Sink()
    text = np.frombuffer(description.encode(), np.uint8)
    members = itertools.groupby(itertools.chain([(DESCRIPTION, text)], parts), key=lambda part: part[0])
    with zipfile.ZipFile(cast(Any, sink), "w", compression=zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, data in members:
            stored = KeptAs(dtype="uint8", shape=text.shape) if name == DESCRIPTION else arrays[name]
            with archive.open(zipfile.ZipInfo(f"{name}{_MEMBER}"), "w", force_zip64=True) as member:
                member.write(_npy_header(stored))
                for _, part in data:
                    member.write(part.data)
                    yield from sink.drain()
    yield from sink.drain()


def check_names(arrays: Iterable[str]) -> None:
    """Refuse names that no archive should have.

    Raises:
        ConfigError: names the leaf, and the way out.
    """
    for name in arrays:
        if name == DESCRIPTION or not is_plain_name(name) or len(name.encode()) > _MOST_NAME_BYTES:
            message = f"leaf {name[:200]!r} can't be the name of a file in an npz archive; --format safetensors keeps it"
            raise ConfigError(message, field="format", path=name)


@dataclass(frozen=True, kw_only=True)
class Member:
    """An array of an archive. `offset`: bytes of the .npy header before its elements."""

    stored: KeptAs
    dtype: np.dtype  # as it lies there, which may be big-endian
    fortran: bool
    offset: int


class NpzReader:
    """An npz archive, read a box at a time. Reading in the order of the file is fast, anything else begins a member anew.

    Args:
        file: seekable, open for reading.
        what: begins an error's message.

    Raises:
        CorruptCheckpointError: it is no such archive.
    """

    def __init__(self, file: Any, what: str):
        self._what = what
        self._lock = threading.Lock()
        self._open: tuple[str, Any, int] | None = None  # name, member, elements' bytes that were read of it
        try:
            self._zip = zipfile.ZipFile(file)
            names = [info.filename for info in self._zip.infolist()]
            if len(set(names)) != len(names):
                raise ValueError("a name stands there twice")
            self.description = self._description(names)
            self.members = {name.removesuffix(_MEMBER): self._member(name) for name in names if name != f"{DESCRIPTION}{_MEMBER}"}
        except _BAD as error:
            raise CorruptCheckpointError(f"{what} is no npz file: {error}", path=what) from error

    def read(self, name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
        """A box whose elements follow one another in row-major order, or all of an array.

        Raises:
            CorruptCheckpointError: its checksum is wrong, or it ends early.
        """
        member = self.members[name]
        if 0 in shape:
            return np.empty(shape, member.stored.dtype)
        try:
            with self._lock:
                if member.fortran:
                    whole = self._bytes(name, 0, _nbytes(member)).view(member.dtype).reshape(member.stored.shape[::-1]).T
                    box = whole[tuple(slice(at, at + size) for at, size in zip(start, shape, strict=True))]
                else:
                    at = int(np.ravel_multi_index(start, member.stored.shape)) if start else 0
                    size = member.dtype.itemsize
                    box = self._bytes(name, at * size, math.prod(shape) * size).view(member.dtype).reshape(shape)
        except _BAD as error:
            raise CorruptCheckpointError(f"{self._what}: array {name!r}: {error}", path=name) from error
        return box.astype(member.stored.dtype, copy=False)

    def _bytes(self, name: str, begin: int, count: int) -> np.ndarray:
        member = self.members[name]
        if self._open is None or self._open[0] != name or self._open[2] > begin:
            handle = self._zip.open(f"{name}{_MEMBER}")
            _read(handle, member.offset)
            self._open = (name, handle, 0)
        _, handle, at = self._open
        while at < begin:
            at += len(_read(handle, min(_SKIP_BYTES, begin - at)))
        data = np.empty(count, np.uint8)
        _read_into(handle, data)
        self._open = (name, handle, begin + count)
        if begin + count == _nbytes(member) and handle.read(1):  # at the end the archive's own checksum is compared
            raise ValueError("there is more in it than its header says")
        return data

    def _description(self, names: Sequence[str]) -> bytes | None:
        name = f"{DESCRIPTION}{_MEMBER}"
        if name not in names:
            return None
        if self._zip.getinfo(name).file_size > MOST_DESCRIPTION_BYTES:
            raise ValueError("its description by raystate is too large")
        return np.lib.format.read_array(io.BytesIO(self._zip.read(name)), allow_pickle=False).tobytes()

    def _member(self, name: str) -> Member:
        info = self._zip.getinfo(name)
        if not name.endswith(_MEMBER):
            raise ValueError(f"{name[:200]!r} is no .npy file")
        with self._zip.open(info) as handle:
            version = np.lib.format.read_magic(handle)
            if version not in _HEADERS:
                raise ValueError(f"{name[:200]!r} is of the unknown version {version}")
            shape, fortran, dtype = _HEADERS[version](handle)
            offset = handle.tell()
        if dtype.hasobject or dtype.names is not None:
            raise ValueError(f"{name[:200]!r} holds Python objects or records, which are not read")
        if any(not 0 <= size < 2**63 for size in shape):
            raise ValueError(f"{name[:200]!r} has the shape {shape}")
        check_shape(shape, dtype.itemsize)
        member = Member(
            stored=KeptAs(dtype=dtype.newbyteorder("=").name, shape=tuple(map(int, shape))),
            dtype=dtype,
            fortran=bool(fortran) and len(shape) > 1,
            offset=offset,
        )
        if offset + _nbytes(member) != info.file_size:
            raise ValueError(f"{name[:200]!r} has {info.file_size} bytes, its header says {offset + _nbytes(member)}")
        if member.fortran and _nbytes(member) > _MOST_FORTRAN_BYTES:
            raise ValueError(f"{name[:200]!r} is in Fortran order and large: save np.ascontiguousarray(…) of it")
        return member


_SKIP_BYTES = 1 << 20
_HEADERS: dict[tuple[int, int], Callable[[Any], tuple[tuple[int, ...], bool, np.dtype]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}


class _Sink:
    """A file for `zipfile` that can only be written: its bytes are taken away again at once."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(self._parts[-1])

    def flush(self) -> None:
        """Nothing is kept back."""

    def drain(self) -> list[bytes]:
        parts, self._parts = self._parts, []
        return parts


def _npy_header(stored: KeptAs) -> bytes:
    header = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(stored.dtype))
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": stored.shape})
    return header.getvalue()


def _nbytes(member: Member) -> int:
    return math.prod(member.stored.shape) * member.dtype.itemsize


def _read(handle: Any, count: int) -> bytes:
    data = handle.read(count)
    if len(data) != count:
        raise EOFError("it ends early")
    return data


def _read_into(handle: Any, data: np.ndarray) -> None:
    view, at = memoryview(cast(Any, data)), 0
    while at < len(view):
        part = handle.read(min(_SKIP_BYTES, len(view) - at))
        if not part:
            raise EOFError("it ends early")
        view[at : at + len(part)] = part
        at += len(part)
