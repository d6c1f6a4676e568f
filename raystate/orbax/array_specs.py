"""TensorStore specs of a checkpoint's arrays, and what an open array tells of itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import tensorstore as ts

from raystate.core.formats.tree import ArraySpec
from raystate.orbax import kv
from raystate.orbax.step_metadata import MetadataNode

_SMALL_CHUNK_BYTES = 64 << 20  # chunks of up to so many may be larger than their array


def plain_spec(base: dict[str, Any], name: str, *, zarr3: bool, ocdbt: bool) -> dict[str, Any]:
    """The spec of one array, as anybody can give it to `tensorstore.open`.

    Args:
        base: kvstore spec of the folder in which the item lies.
        name: of the array; "": it is the whole item.
        zarr3, ocdbt: how the item is stored.
    """
    path = kv.array_path(name)
    return {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": path} if ocdbt else kv.below(base, path),
    }


def read_spec(base: dict[str, Any], manifest: dict[str, Any] | None, name: str, *, zarr3: bool, ocdbt: bool) -> dict[str, Any]:
    """The spec with which a `StepReader` opens an array. `manifest`: see `kv.ocdbt`; the rest as `plain_spec`."""
    spec = plain_spec(base, name, zarr3=zarr3, ocdbt=ocdbt)
    if ocdbt:
        spec["kvstore"] = kv.ocdbt(base, spec["kvstore"]["path"], manifest=manifest)
    return {
        **spec,
        "fill_missing_data_reads": False,  # a missing chunk is an error, not zeros
        "open": True,
        "recheck_cached_data": False,
        "recheck_cached_metadata": False,
    }


def open_arrays(
    specs: Mapping[str, dict[str, Any]],
    *,
    numbers: Collection[str],
    named: Callable[[str], AbstractContextManager[None]],
    context: ts.Context,
    on_open: Callable[[int, int], None] = lambda _done, _total: None,
) -> dict[str, ts.TensorStore]:
    """Open arrays, all at once; nothing of their elements is read.

    Args:
        specs: name -> TensorStore spec.
        numbers: the names of those that are numbers.
        named: name -> a context that gives the errors in it their names (`kv.named_errors`).
        context: TensorStore's.
        on_open: called with (how many are open, how many there are).

    Raises:
        CorruptCheckpointError: there is no such array, or its own metadata can't be true.
        StorageError: storage did not answer.
    """
    opening: dict[str, Any] = {}
    for name, spec in specs.items():
        with named(name):  # what can't be a path is refused here
            opening[name] = ts.open(ts.Spec(spec), context=context)
    stores: dict[str, ts.TensorStore] = {}
    for name, future in opening.items():
        with named(name):
            stores[name] = kv.result(future)
            if problem := _problem(stores[name], is_number=name in numbers):
                raise ValueError(problem)
        on_open(len(stores), len(opening))
    return stores


def _problem(store: ts.TensorStore, *, is_number: bool) -> str:
    """Why an array's own metadata can't be true; "" if they can. A reader makes room for a whole
    chunk first."""
    dtype = store.dtype.numpy_dtype
    if store.dtype.name != dtype.name:
        return f"its elements are of the type {store.dtype.name}, which is no number's"
    if is_number and store.rank:
        return f"it is an array of shape {store.shape} instead of a number"
    whole = math.prod(store.shape) * dtype.itemsize
    for chunk in (store.chunk_layout.read_chunk.shape, store.chunk_layout.write_chunk.shape):
        size = math.prod(max(1, length or 1) for length in chunk or ()) * dtype.itemsize
        if size > max(2 * whole, _SMALL_CHUNK_BYTES):
            return f"a chunk of shape {chunk} takes {size} bytes, and the whole array of shape {store.shape} only {whole}"
    return ""


def describe_store(store: ts.TensorStore, sharding: str | None, key_impl: str | None, node: MetadataNode) -> ArraySpec:
    """What an open array says of itself, with what the item's own files say of it."""
    # A dimension of size 0 may have a chunk of 0 in zarr2.
    chunk = tuple(max(1, size or 1) for size in store.chunk_layout.read_chunk.shape or ())
    return ArraySpec(
        shape=tuple(store.shape),
        dtype=store.dtype.name,
        chunk=chunk,
        sharding=sharding,
        typestr="np.ndarray" if node.kind == "np.ndarray" else "jax.Array",
        key_impl=key_impl,
    )
