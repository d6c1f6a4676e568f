"""The one place that parses Orbax's JSON files of a step. Pure: bytes in, values out.

The formats are Orbax's; tests/orbax/test_stock_steps.py compares the outcome with Orbax's public metadata API, so that a change
of format is noticed.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

from raystate.core.errors import CorruptCheckpointError
from raystate.core.tree import PathKey

CUSTOM_KEY = "raystate.custom"  # holds a custom value that isn't a dict, for Orbax takes only dicts
KEY_IMPL = "random_key_impl"  # Orbax's key for the implementation of typed PRNG keys, in an array's `ext_metadata`

NodeKind = Literal["jax.Array", "np.ndarray", "scalar", "string", "none", "dict", "list"]

_KINDS: dict[str, NodeKind] = {
    "jax.Array": "jax.Array",
    "np.ndarray": "np.ndarray",
    "scalar": "scalar",
    "string": "string",
    "None": "none",
    "NamedTuple": "none",  # Orbax, too, gives None for an empty one
    "Dict": "dict",
    "List": "list",
    "Tuple": "list",  # raystate's trees have no tuples
}
_SEQUENCE_KEY = 1
_LONGEST_LIST = 1 << 24  # a list is made as long as its largest index says


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataNode:
    """A leaf as `_METADATA` describes it."""

    path: tuple[PathKey, ...]
    kind: NodeKind

    @property
    def name(self) -> str:
        return ".".join(str(key) for key in self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeMetadata:
    nodes: tuple[MetadataNode, ...]
    zarr3: bool
    ocdbt: bool | None  # None: the file does not say

    @property
    def has_arrays(self) -> bool:
        return any(node.kind in ("jax.Array", "np.ndarray") for node in self.nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    handlers: dict[str, str]  # item -> name of the handler's class; empty if the file does not say
    custom: dict[str, Any]
    begun_s: float | None = None  # wall clock; None if the file does not say
    committed_s: float | None = None


def parse_tree(data: bytes, what: str) -> TreeMetadata:
    """Parse an item's `_METADATA`. `what` begins the error's message."""
    raw = _object(data, what)
    try:
        return TreeMetadata(
            nodes=tuple(_node(entry, what) for entry in raw["tree_metadata"].values()),
            zarr3=bool(raw.get("use_zarr3", False)),
            ocdbt=raw.get("use_ocdbt"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptCheckpointError(f"{what} has not the form of Orbax's tree metadata: {error!r}", path=what) from error


def parse_shardings(data: bytes, what: str) -> dict[str, str]:
    """Parse an item's `_sharding`: parameter name -> Orbax's serialized sharding."""
    try:
        return {base64.urlsafe_b64decode(name).decode(): str(text) for name, text in _object(data, what).items()}
    except ValueError as error:
        raise CorruptCheckpointError(f"{what} has not the form of Orbax's shardings: {error!r}", path=what) from error


def parse_step(data: bytes, what: str) -> CheckpointMetadata:
    """Parse `_CHECKPOINT_METADATA`."""
    raw = _object(data, what)
    handlers = raw.get("item_handlers")
    return CheckpointMetadata(
        handlers={str(k): str(v) for k, v in cast("dict[str, Any]", handlers).items()} if isinstance(handlers, dict) else {},
        custom=raw.get("custom_metadata") or {},
        begun_s=_seconds(raw.get("init_timestamp_nsecs")),
        committed_s=_seconds(raw.get("commit_timestamp_nsecs")),
    )


def parse_strings(data: bytes, what: str) -> Callable[[str], str | None]:
    """Parse an item's `_strings.json`; the answer gives the string of a parameter name, or None.

    Orbax takes a name for a JSON pointer: "a/b" lies in "a" under "b", and "~0", "~1" stand for "~", "/".
    """
    raw = _object(data, what)

    def find(name: str) -> str | None:
        node: Any = raw
        for part in name.split("/"):
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node if isinstance(node, str) else None

    return find


def parse_key_impls(data: bytes, what: str) -> dict[str, str]:
    """Parse an item's `array_metadatas/process_<n>`: parameter name -> implementation, of the arrays that are typed PRNG keys."""
    raw = _object(data, what)
    try:
        entries = [entry["array_metadata"] for entry in raw["array_metadatas"]]
        return {
            str(entry["param_name"]): str(extra[KEY_IMPL])
            for entry in entries
            if isinstance(extra := entry.get("ext_metadata"), dict) and KEY_IMPL in extra
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptCheckpointError(f"{what} has not the form of Orbax's array metadata: {error!r}", path=what) from error


def _seconds(nsecs: object) -> float | None:
    return nsecs / 1e9 if isinstance(nsecs, int) and nsecs > 0 else None


def _node(entry: dict[str, Any], what: str) -> MetadataNode:
    path = tuple(int(key["key"]) if key["key_type"] == _SEQUENCE_KEY else str(key["key"]) for key in entry["key_metadata"])
    if any(isinstance(key, int) and not 0 <= key < _LONGEST_LIST for key in path):
        raise CorruptCheckpointError(f"{what}: leaf {path} has an index that no list has", path=what)
    value_type = entry["value_metadata"]["value_type"]
    if value_type not in _KINDS:
        raise CorruptCheckpointError(f"{what}: leaf {path} is of the unknown type {value_type!r}", path=what)
    return MetadataNode(path=path, kind=_KINDS[value_type])


def _object(data: bytes, what: str) -> dict[str, Any]:
    try:
        raw = json.loads(data)
    except ValueError as error:
        raise CorruptCheckpointError(f"{what} is not JSON: {error}", path=what) from error
    if not isinstance(raw, dict):
        raise CorruptCheckpointError(f"{what} is not a JSON object", path=what)
    return cast("dict[str, Any]", raw)
