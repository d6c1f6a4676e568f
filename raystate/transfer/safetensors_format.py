"""safetensors: eight bytes with the header's length, the header (JSON), the arrays one after the other without holes.

The header says where each array begins, so all sizes have to be known before the first byte is written: a step's metadata tell them. The
package `safetensors` reads and writes whole files in memory; so this is our own reader and writer of the format, a box at a time, and
tests compare with the package.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "float8_…"
import numpy as np

from raystate.core.formats.boxes import in_batches
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.transfer.description import KeptAs, check_shape

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_SHARD = r"-\d{5}-of-\d{5}"  # what `shard_names` puts between stem and suffix
MOST_HEADER_BYTES = 32 << 20
_LENGTH_BYTES = 8
_METADATA = "__metadata__"

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32", "U64": "uint64",
    "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
DTYPES = frozenset(_CODES)  # what the format has


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """An array in a file. `begin` and `end`: bytes from the beginning of the file."""

    stored: KeptAs
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says about itself."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, str]


def order(arrays: Mapping[str, KeptAs]) -> list[str]:
    """The names in the order in which a file has them: the widest numbers first, so that each array is aligned."""
    return sorted(arrays, key=lambda name: (-np.dtype(arrays[name].dtype).itemsize, name))


def header_bytes(names: list[str], arrays: Mapping[str, KeptAs], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file that holds these arrays in this order.

    Raises:
        ConfigError: it would be longer than readers take, or a name can't be used.
    """
    entries: dict[str, Any] = {_METADATA: dict(metadata)}
    offset = 0
    for name in names:
        if name == _METADATA:
            raise ConfigError(f"a leaf is named {_METADATA!r}, which safetensors keeps for itself", field="format", path=name)
        end = offset + arrays[name].nbytes
        entries[name] = {"dtype": _CODES[arrays[name].dtype], "shape": arrays[name].shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MOST_HEADER_BYTES:
        message = (
            f"{len(names)} arrays need a safetensors header of {len(text)} bytes, at most {MOST_HEADER_BYTES} can be read back"
        )
        raise ConfigError(message, field="format")
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def parse_header(read: Callable[[int, int], bytes], size: int, what: str) -> Header:
    """The header of a file, checked in full: what it says lies within the file, without overlap and without holes.

    Args:
        read: (begin, end) -> these bytes of the file.
        size: of the file, in bytes.
        what: begins the error's message.

    Raises:
        CorruptCheckpointError: it is no such file, or not a whole one.
    """

    def bad(why: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{what} is not a safetensors file: {why}", path=what)

    length = int.from_bytes(read(0, _LENGTH_BYTES), "little") if size >= _LENGTH_BYTES else -1
    start = _LENGTH_BYTES + length
    if not 2 <= length <= size - _LENGTH_BYTES:
        raise bad(f"its header would have {length} bytes, the file has {size}")
    if length > MOST_HEADER_BYTES:
        raise bad(f"its header has {length} bytes, at most {MOST_HEADER_BYTES} are read")
    try:
        raw = json.loads(read(_LENGTH_BYTES, start), object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise bad("its header is nested too deeply") from error
    except ValueError as error:
        raise bad(f"its header is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise bad("its header is no JSON object")
    metadata = raw.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad(f"its {_METADATA} holds something else than texts")
    tensors: dict[str, Tensor] = {}
    for name, entry in cast("dict[str, Any]", raw).items():
        try:
            tensors[name] = _tensor(entry, start)
        except (KeyError, TypeError, ValueError) as error:
            raise bad(f"array {name[:200]!r}: {error}") from error
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda pair: (pair[1].begin, pair[1].end)):
        if tensor.begin != at:
            raise bad(f"array {name[:200]!r} begins at byte {tensor.begin}, the one before it ends at {at}")
        at = tensor.end
    if at != size:
        raise bad(f"its arrays end at byte {at}, the file has {size}")
    return Header(tensors=tensors, metadata=metadata)


def parse_index(data: bytes, what: str) -> tuple[dict[str, str], Any]:
    """(name of an array -> name of the file in the same folder, our description or None) of a Hugging Face index.

    Raises:
        CorruptCheckpointError: it is no index, or it names files elsewhere.
    """
    try:
        raw = json.loads(data)
        places = raw["weight_map"]
        pairs = {str(name): file for name, file in places.items()}
        metadata = raw.get("metadata") or {}
        description = metadata.get("raystate")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"{what} is no index of safetensors files: {error!r}", path=what) from error
    for name, file in pairs.items():
        if not isinstance(file, str) or not file.endswith(SUFFIX) or not {"/", "\\", "\0"}.isdisjoint(file) or len(file) > 255:
            raise CorruptCheckpointError(
                f"{what}: array {name[:200]!r} would be in {str(file)[:200]!r}, no file beside it", path=what
            )
    return pairs, description


def shards(arrays: Mapping[str, KeptAs], most_bytes: int) -> list[list[str]]:
    """The names, in as many files as have at most `most_bytes` each; a larger array has a file of its own. At least one file."""
    files = list(in_batches(arrays, lambda name: arrays[name].nbytes, most_bytes)) or [[]]
    return [order({name: arrays[name] for name in names}) for names in files]


def shard_names(stem: str, count: int) -> list[str]:
    """The files' names as Hugging Face's tools expect them."""
    if count == 1:
        return [f"{stem}{SUFFIX}"]
    return [f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def is_shard(name: str) -> bool:
    """Whether a file is one of several."""
    return re.fullmatch(f".*{_SHARD}{re.escape(SUFFIX)}", name) is not None


def is_of_export(name: str, stem: str) -> bool:
    """Whether an export of that stem may have written it: the file, a shard or the index."""
    return re.fullmatch(rf"{re.escape(stem)}({_SHARD})?{re.escape(SUFFIX)}(\.index\.json)?", name) is not None


def index_bytes(files: Mapping[str, list[str]], total: int, description: str) -> bytes:
    """The index of several files: their names -> the arrays in each."""
    places = {name: file for file, names in files.items() for name in names}
    metadata = {"total_size": total, "raystate": json.loads(description)}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, indent=2).encode() + b"\n"


def _tensor(entry: Any, start: int) -> Tensor:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    if dtype not in _DTYPES:
        raise ValueError(f"dtype {str(dtype)[:50]!r} can't be read")
    if not isinstance(shape, list):
        raise ValueError(f"no shape: {str(shape)[:200]}")
    for number in (*shape, begin, end):
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < 2**63:
            raise ValueError(f"{str(number)[:50]!r} is no size or offset")
    stored = KeptAs(dtype=_DTYPES[dtype], shape=tuple(shape))
    check_shape(stored.shape, np.dtype(stored.dtype).itemsize)
    if end - begin != stored.nbytes:
        raise ValueError(f"{end - begin} bytes for {dtype} of shape {tuple(shape)}")
    return Tensor(stored=stored, begin=start + begin, end=start + end)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key stands there twice")
    return made
