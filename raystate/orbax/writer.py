"""Host side of a step: one writer's chunks of one array item, as zarr3 in an OCDBT database. Loads neither jax nor orbax.

The arrays are laid out as Orbax does, uncompressed unless the tree says otherwise, with one addition: a crc32c codec at the end.
Each chunk then carries its checksum, and any reader, stock Orbax too, refuses a chunk with a flipped bit. Nothing outside
`ocdbt.process_<writer>/` is touched.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import ml_dtypes  # noqa: F401 - gives numpy the names "bfloat16", "int4", "float8_…"
import numpy as np
import tensorstore as ts

from raystate.core.formats.errors import ConfigError
from raystate.core.formats.tree import ArraySpec, TreeSpec
from raystate.orbax import kv

_REQUESTS = 16  # to storage at a time
WRITER_PREFIX = "ocdbt.process_"  # Orbax's name for the folder of one process


def write_item(
    kv_base: dict[str, Any],
    writer: str,
    tree: TreeSpec,
    pieces: Iterable[tuple[int, tuple[int, ...], np.ndarray]],
) -> bool:
    """Write one writer's share of an item, durably, in one atomic transaction.

    TensorStore writes straight from the pieces' memory if a chunk's elements lie one after the
    other. It keeps a copy of any other or compressed chunk until all is written
    (`Layout.write_buffer_bytes`). Nothing else is buffered, on any storage. So the bytes must not
    change until this returns.

    Args:
        kv_base: TensorStore kvstore spec of the item's folder, its path ending in "/".
        writer: unique name, letters and digits, such as "a7k1h3".
        tree: the whole item, equal for all writers.
        pieces: (leaf index, start, data): boxes of whole chunks, in elements of the global array. A piece without elements makes
            the array known (an array of size zero needs one).

    Returns:
        Whether anything was written: False if there was no piece.

    Raises:
        ConfigError: a piece or an array that cannot be written; names item and leaf.
        StorageError: the write failed; nothing refers to what it may have left in the writer's folder.
    """
    if not writer.isalnum() or not writer.isascii():
        raise ConfigError(f"writer {writer!r} must be letters and digits", writer=writer)
    folder = kv.below(kv_base, f"{WRITER_PREFIX}{writer}/")
    where = f"item {tree.item!r}, writer {writer}"
    with kv.named_errors(f"writing {where} to {kv.url_of(kv_base)}", damage=False, item=tree.item, writer=writer):
        ctx = kv.context(io_concurrency=_REQUESTS)
        transaction = ts.Transaction(atomic=True)
        stores: dict[int, ts.TensorStore] = {}
        writes: list[ts.WriteFutures] = []
        pieces = list(pieces)
        file_bytes = tree.file_bytes or default_file_bytes(sum(data.nbytes for _, _, data in pieces))
        try:
            for leaf, start, data in pieces:
                array = _checked(tree, leaf, start, data)
                if leaf not in stores:
                    spec = array_spec(folder, tree.leaves[leaf].name, array, data_file_bytes=file_bytes, zstd_level=tree.zstd_level)
                    opening = ts.open(ts.Spec(spec), create=True, open=True, context=ctx, transaction=transaction)
                    stores[leaf] = kv.result(opening)
                if data.size:
                    box = tuple(slice(s, s + n) for s, n in zip(start, data.shape, strict=True))
                    writes.append(stores[leaf][box].write(data, can_reference_source_data_indefinitely=True))
            for write in writes:
                kv.result(write.copy)
        except BaseException:
            transaction.abort()
            raise
        if not stores:
            transaction.abort()
            return False
        kv.result(transaction.commit_async())
    return True


def default_file_bytes(nbytes: int) -> int:
    """Size of data files, given the bytes of a writer's share: a few at a time, and few requests to an object store in all.

    A small share is written as four files beside each other; a large one as files of 448 MiB, since every file costs a billed request.
    """
    return min(448 << 20, max(32 << 20, -(-nbytes // 4)))


def array_spec(
    folder: dict[str, Any], name: str, array: ArraySpec, *, data_file_bytes: int, zstd_level: int | None = None
) -> dict[str, Any]:
    """The TensorStore spec by which one writer creates an array in its folder."""
    zstd = [] if zstd_level is None else [{"name": "zstd", "configuration": {"level": zstd_level}}]
    return {
        "driver": "zarr3",
        "kvstore": kv.ocdbt_for_writing(folder, kv.array_path(name), data_file_bytes=data_file_bytes),
        "dtype": array.dtype,
        "metadata": {
            "shape": array.shape,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": array.chunk}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *zstd, {"name": "crc32c"}],
        },
        # So that an absent chunk always means lost data, never a chunk of zeros.
        "store_data_equal_to_fill_value": True,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


@functools.cache
def storable(dtype: str) -> bool:
    """Whether TensorStore's zarr3 can hold the dtype."""
    try:
        np.dtype(dtype)
        spec = {"driver": "zarr3", "kvstore": "memory://", "dtype": dtype, "metadata": {"shape": []}}
        kv.result(ts.open(ts.Spec(spec), create=True))
    except (TypeError, ValueError):
        return False
    return True


def _checked(tree: TreeSpec, leaf: int, start: tuple[int, ...], data: np.ndarray) -> ArraySpec:
    """The leaf's array, if the piece is one that may be written into it."""
    spec = tree.leaves[leaf]
    array, name, facts = spec.array, spec.name, {"item": tree.item, "path": spec.name}
    if array is None:
        raise ConfigError(f"leaf {name!r} of item {tree.item!r} is not an array but {spec.kind}", **facts)
    if not storable(array.dtype):
        raise ConfigError(f"leaf {name!r} of item {tree.item!r}: dtype {array.dtype} cannot be stored as zarr3", **facts)
    if data.dtype != np.dtype(array.dtype):
        raise ConfigError(f"leaf {name!r} of item {tree.item!r}: piece of {data.dtype}, array of {array.dtype}", **facts)
    if problem := misfit(array, tuple(start), data.shape):
        raise ConfigError(f"leaf {name!r} of item {tree.item!r}: piece at {tuple(start)} of shape {data.shape} {problem}", **facts)
    return array


def misfit(array: ArraySpec, start: tuple[int, ...], shape: tuple[int, ...]) -> str:
    """Why a box is not a union of whole chunks of the array, or ""."""
    if len(start) != len(array.shape) or len(shape) != len(array.shape):
        return f"has not the array's {len(array.shape)} dimensions"
    for begin, length, whole, chunk in zip(start, shape, array.shape, array.chunk, strict=True):
        end = begin + length
        if begin < 0 or length < 0 or end > whole:
            return f"reaches outside the array's shape {array.shape}"
        if length and (begin % chunk or (end % chunk and end != whole)):
            return f"is not made of whole chunks of {array.chunk}"
    return ""
