"""TensorStore specs of a checkpoint's arrays, and what an open array tells of itself."""

from __future__ import annotations

from typing import Any

import tensorstore as ts

from raystate.core.tree import ArraySpec
from raystate.orbax import kv
from raystate.orbax.step_metadata import MetadataNode


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
