"""The one place that parses Orbax's JSON files of a step. Pure: bytes in, values out.

The formats are Orbax's; tests/orbax/test_stock_steps.py compares the outcome with Orbax's public metadata API, so that a change
of format is noticed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.texts import counted
from raystate.core.formats.tree import PathKey
from raystate.orbax.json_checks import MOST_LEVELS, Said, check_name, parse_form, parse_object

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
_LONGEST_LIST = 1 << 24  # a list is made as long as its largest index says; so many entries in all lists of a tree
_INDEX = re.compile(r"[0-9]{1,18}")


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


# What Orbax v1 calls the handler of an object that writes its own files.
STATEFUL_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.stateful_checkpointable_handler.StatefulCheckpointableHandler"

ARRAY_HANDLER = "ArrayCheckpointHandler"  # ends the name of what writes one array, below the item's folder:
ARRAY_FOLDER = "checkpoint/"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    handlers: dict[str, str]  # item -> name of the handler's class; empty if the file does not say
    handler: str = ""  # the same of a tree without items
    custom: dict[str, Any]
    begun_s: float | None = None  # wall clock; None if the file does not say
    committed_s: float | None = None


class _Key(Said):
    key: str | int
    key_type: int


class _ValueMetadata(Said):
    value_type: str


class _Entry(Said):
    key_metadata: list[_Key]
    value_metadata: _ValueMetadata


class _Tree(Said):
    """Orbax's tree metadata"""

    tree_metadata: dict[str, _Entry]
    use_zarr3: bool | None = None
    use_ocdbt: bool | None = None


class _Step(Said):
    """Orbax's checkpoint metadata"""

    item_handlers: dict[str, Any] | str | None = None  # a text: of a tree without items
    custom_metadata: dict[str, Any] | None = None
    init_timestamp_nsecs: Any = None
    commit_timestamp_nsecs: Any = None


class _ArrayMetadata(Said):
    param_name: str
    ext_metadata: Any = None


class _ArrayEntry(Said):
    array_metadata: _ArrayMetadata


class _ArrayMetadatas(Said):
    """Orbax's array metadata"""

    array_metadatas: list[_ArrayEntry]


def parse_tree(data: bytes, what: str) -> TreeMetadata:
    """Parse an item's `_METADATA`. `what` begins the error's message."""
    said = parse_form(_Tree, data, what)
    nodes = tuple(_node(entry, what) for entry in said.tree_metadata.values())
    _check_paths(nodes, what)
    return TreeMetadata(nodes=nodes, zarr3=bool(said.use_zarr3), ocdbt=said.use_ocdbt)


def parse_shardings(data: bytes, what: str) -> dict[str, str]:
    """Parse an item's `_sharding`: parameter name -> Orbax's serialized sharding."""
    found: dict[str, str] = {}
    for name, text in parse_object(data, what).items():
        try:
            found[base64.urlsafe_b64decode(name).decode()] = text
        except ValueError as error:
            raise CorruptCheckpointError(f"{what} has not the form of Orbax's shardings: {error!r}", path=what) from error
        if not isinstance(text, str):
            raise CorruptCheckpointError(f"{what} has not the form of Orbax's shardings: one is no text", path=what)
    return found


def parse_step(data: bytes, what: str) -> CheckpointMetadata:
    """Parse `_CHECKPOINT_METADATA`."""
    said = parse_form(_Step, data, what)
    handlers = said.item_handlers if isinstance(said.item_handlers, dict) else {}
    return CheckpointMetadata(
        handlers={check_name(name, what): str(handler) for name, handler in handlers.items()},
        handler=said.item_handlers if isinstance(said.item_handlers, str) else "",
        custom=said.custom_metadata or {},
        begun_s=_seconds(said.init_timestamp_nsecs),
        committed_s=_seconds(said.commit_timestamp_nsecs),
    )


def parse_strings(data: bytes, what: str) -> Callable[[str], str | None]:
    """Parse an item's `_strings.json`; the answer gives the string of a parameter name, or None.

    Orbax takes a name for a JSON pointer: "a/b" lies in "a" under "b", and "~0", "~1" stand for "~", "/".
    """
    raw = parse_object(data, what)

    def find(name: str) -> str | None:
        node: Any = raw
        for part in name.split("/"):
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
        return node if isinstance(node, str) else None

    return find


def parse_key_impls(data: bytes, what: str) -> dict[str, str]:
    """Parse an item's `array_metadatas/process_<n>`: parameter name -> implementation, of the arrays that are typed PRNG keys."""
    said = parse_form(_ArrayMetadatas, data, what)
    found: dict[str, str] = {}
    for entry in (one.array_metadata for one in said.array_metadatas):
        if isinstance(entry.ext_metadata, dict) and KEY_IMPL in entry.ext_metadata:
            impl: Any = entry.ext_metadata[KEY_IMPL]
            if not isinstance(impl, str):
                raise CorruptCheckpointError(f"{what}: {KEY_IMPL} of {entry.param_name!r} is {impl!r}, and no name", path=what)
            found[entry.param_name] = impl
    return found


def _seconds(nsecs: object) -> float | None:
    return nsecs / 1e9 if isinstance(nsecs, int) and 0 < nsecs < 2**63 else None


def _node(entry: _Entry, what: str) -> MetadataNode:
    if len(entry.key_metadata) > MOST_LEVELS:
        raise CorruptCheckpointError(f"{what}: a leaf lies {len(entry.key_metadata)} levels deep", path=what)
    path = tuple(_path_key(key, what) for key in entry.key_metadata)
    value_type = entry.value_metadata.value_type
    if value_type not in _KINDS:
        raise CorruptCheckpointError(f"{what}: leaf {path} is of the unknown type {value_type[:100]!r}", path=what)
    return MetadataNode(path=path, kind=_KINDS[value_type])


def _path_key(said: _Key, what: str) -> PathKey:
    if said.key_type != _SEQUENCE_KEY:
        return check_name(str(said.key), what)
    text = str(said.key)
    index = int(text) if _INDEX.fullmatch(text) else _LONGEST_LIST
    if index >= _LONGEST_LIST:
        raise CorruptCheckpointError(f"{what}: a leaf has the index {text[:100]!r}, which no list has", path=what)
    return index


def _check_paths(nodes: Sequence[MetadataNode], what: str) -> None:
    """Refuse paths that no tree has: a leaf with others below it, a leaf twice, a list with names among its indices."""
    inner: dict[tuple[PathKey, ...], PathKey] = {}  # path of a node -> one of its keys; of a list, the largest
    for node in nodes:
        for depth, key in enumerate(node.path):
            known = inner.setdefault(node.path[:depth], key)
            if isinstance(known, int) is not isinstance(key, int):
                text = f"{what}: at {node.path[:depth]} there are both the index and the name {known!r}, {key!r}"
                raise CorruptCheckpointError(text, path=what)
            if isinstance(known, int) and isinstance(key, int) and key > known:
                inner[node.path[:depth]] = key
    if len(leaves := {node.path for node in nodes}) < len(nodes):
        raise CorruptCheckpointError(f"{what}: there twice: {counted(len(nodes) - len(leaves), 'leaf', 'leaves')}", path=what)
    if (both := next((path for path in leaves if path in inner), None)) is not None:
        raise CorruptCheckpointError(f"{what}: there are a leaf and others below it at {both}", path=what)
    if (entries := sum(key + 1 for key in inner.values() if isinstance(key, int))) > _LONGEST_LIST:
        raise CorruptCheckpointError(f"{what}: its lists have {entries} entries, and there are {len(nodes)} leaves", path=what)
