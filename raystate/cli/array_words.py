"""An array of a checkpoint in words, and as JSON."""

from __future__ import annotations

from typing import Any

from raystate.inspection.metadata import ArrayMetadata, StoredArray


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
