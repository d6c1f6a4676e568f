"""An array of a checkpoint in words and as JSON; raystate inspect --array: all about one."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from typing import Any

import numpy as np
from rich.markup import escape

from raystate.cli.choosing import did_you_mean
from raystate.cli.console import count, out, print_json, size
from raystate.core.formats.errors import ConfigError
from raystate.inspection.metadata import ArrayMetadata, StepMetadata, StoredArray

_CORNER = 8  # elements of each dimension that are shown of a large array
_WHOLE = 1 << 20  # elements up to which an array is read for its values
_KEYS = 8


def the_array(found: StepMetadata, item: str | None, path: str) -> ArrayMetadata:
    named = path.replace("/", ".")
    matches = [
        one
        for in_item in found.trees
        if item in (None, in_item)
        for name, one in found.arrays(in_item).items()
        if path in (name, f"{in_item}:{name}") or named == name.replace("/", ".")
    ]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise ConfigError(f"--array: {path!r} is in the items {[one.item for one in matches]}: name one with --item", field="array")
    names = [name for in_item in found.trees for name in found.arrays(in_item)]
    close = difflib.get_close_matches(path, names, n=3, cutoff=0.5) or [name for name in names if path in name][:3]
    raise ConfigError(f"--array: step {found.step} has no array {path!r}{did_you_mean(close)}", field="array", got=path)


def show_array(one: ArrayMetadata, *, values: bool, at: str | None, as_json: bool) -> None:
    stored = one.stored()
    start, shape = _box(one, at)
    got = one.read(start, shape) if values else None
    if as_json:
        keys = {key: {"nbytes": value.nbytes, "file": value.file} for key, value in stored.keys.items()}
        document = {**array_document(one, stored), "keys": keys, "spec": one.spec(), "checksums": one.has_checksums()}
        if got is not None:
            document |= {"start": start, "values": got.astype(object).tolist() if got.dtype.kind in "biu" else _listed(got)}
        print_json(document)
        return
    out.print(f"[bold]{escape(one.name or '(the item itself)')}[/]  {escape(kind_text(one))}  {size(one.nbytes)}")
    out.print(f"item      {escape(one.item)}")
    out.print(f"chunks    {shape_text(one.chunk)}, {'with' if one.has_checksums() else 'without'} checksums")
    out.print(f"sharding  {escape(sharding_text(one) or 'none was written down')}")
    if one.key_impl is not None:
        out.print(f"keys of   {escape(one.key_impl)}: typed PRNG keys, stored as their data")
    by = f", by {', '.join(stored.writers)}" if stored.writers else ""
    out.print(f"stored    {size(stored.nbytes)} in {count(len(stored.keys), 'value')}{by}")
    for key, value in list(stored.keys.items())[:_KEYS]:
        out.print(f"{size(value.nbytes):>10}  {escape(key)}")
    if len(stored.keys) > _KEYS:
        out.print(f"{'':>10}  … and {len(stored.keys) - _KEYS:,} more: --json")
    files = Counter(value.file for key, value in stored.keys.items() if value.file not in ("", key))
    for file, values_in_it in files.most_common(_KEYS):
        out.print(f"{values_in_it:>10}  in {escape(file)}")
    spec = one.spec()
    database = " in an OCDBT database" if spec["kvstore"]["driver"] == "ocdbt" else ""
    out.print(f"format    {'zarr3' if spec['driver'] == 'zarr3' else 'zarr, version 2'}{database}")
    out.print(f"spec      {escape(json.dumps(spec))}")
    if got is not None:
        box = ", ".join(f"{first}:{first + length}" for first, length in zip(start, shape, strict=True))
        out.print(f"values    [{box}]" if shape != one.shape else "values", markup=False)
        with np.printoptions(linewidth=78, threshold=200, edgeitems=4):
            out.print(str(got), markup=False)


def _listed(got: np.ndarray) -> Any:
    if got.dtype.kind == "c":
        return np.stack([np.real(got), np.imag(got)], axis=-1).tolist()
    return got.astype(np.float64).tolist()


def _box(one: ArrayMetadata, at: str | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, shape) of what `--at` says; without it the whole array, or its first corner if it is large."""
    if at is None:
        return (0,) * one.ndim, one.shape if one.size <= _WHOLE else tuple(min(_CORNER, whole) for whole in one.shape)
    parts = [part.strip() for part in at.strip("[] ").split(",")] if at.strip("[] ") else []
    found = [re.fullmatch(r"(-?\d+)?(:)?(-?\d+)?", part) for part in parts]
    if len(parts) > one.ndim or not all(found):
        raise ConfigError(
            f"--at: expected up to {one.ndim} of 'i', 'i:j', 'i:' or ':j' with commas, not {at!r}", field="at", got=at
        )
    slices = [
        slice(int(part[1] or 0), int(part[3]) if part[3] else None) if part[2] else slice(int(part[1]), int(part[1]) + 1 or None)
        for part in found
        if part is not None and part[0]
    ]
    if len(slices) < len(parts):
        raise ConfigError(f"--at: an index is missing in {at!r}", field="at", got=at)
    bounds = [
        s.indices(whole)[:2] for s, whole in zip([*slices, *[slice(None)] * (one.ndim - len(slices))], one.shape, strict=True)
    ]
    return tuple(first for first, _ in bounds), tuple(max(0, end - first) for first, end in bounds)


# ---------------------------------------------------------------- in words, and as JSON


def kind_text(one: ArrayMetadata) -> str:
    return f"{one.dtype.name}[{','.join(map(str, one.shape))}]"


def shape_text(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"


def sharding_text(one: ArrayMetadata) -> str:
    """Orbax's JSON in the words of JAX."""
    found = one.sharding
    if found is None:
        return ""
    kind = str(found.get("sharding_type", "?"))
    match found:
        case {"axis_names": [*axes], "shape": [*sizes], "partition_spec": [*parts]}:
            mesh = ", ".join(f"{axis}={length}" for axis, length in zip(axes, sizes, strict=False))
            spec = ", ".join("None" if part is None else "+".join(part) if isinstance(part, list) else str(part) for part in parts)
            return f"{kind}({mesh}; P({spec}))"
        case {"device_str": device}:
            return f"{kind}({device})"
    return kind


def array_document(one: ArrayMetadata, stored: StoredArray | None) -> dict[str, Any]:
    return {
        "item": one.item,
        "name": one.name,
        "path": one.path,
        "shape": one.shape,
        "dtype": one.dtype.name,
        "chunk": one.chunk,
        "sharding": one.sharding,
        "key_impl": one.key_impl,
        "kind": one.kind,
        "nbytes": one.nbytes,
        "stored_nbytes": stored.nbytes if stored is not None else None,
        "writers": stored.writers if stored is not None else None,
    }
