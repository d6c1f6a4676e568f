"""What a state looks like, without its bytes: the description that trainers, hosts, the Coordinator and readers share.

A `TreeSpec` is one pytree in Orbax's serialized form (nested dicts and lists; NamedTuples and dataclasses as dicts by field name).
A `Piece` is a box of one of its arrays that one process holds: `start` and `shape` in elements of the global array.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from raystate.core.formats.codec import decode, dumps, loads, plain, seal, unseal

PathKey = str | int  # a dict key or a sequence index


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySpec:
    """One global array. `chunk` is the shape that is written as one zarr chunk; every shard is a whole number of chunks."""

    shape: tuple[int, ...]
    dtype: str  # numpy / ml_dtypes name: "float32", "bfloat16", "int4", …
    chunk: tuple[int, ...]  # every entry >= 1
    sharding: str | None = None  # Orbax's serialized sharding (the JSON string that goes into `_sharding`), None if it has none
    typestr: Literal["jax.Array", "np.ndarray"] = "jax.Array"
    key_impl: str | None = None  # typed PRNG keys are stored as their uint32 key data; this names the implementation
    local: bool = False  # in a run of several processes each has its own copy; rank 0's is stored (see core.formats.local_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafSpec:
    """One leaf. kind "array": `array` is set; "scalar", "string": `value` is; "none", "dict", "list": an empty node."""

    path: tuple[PathKey, ...]
    kind: Literal["array", "scalar", "string", "none", "dict", "list"]
    array: ArraySpec | None = None
    value: int | float | bool | str | None = None

    @property
    def name(self) -> str:
        """The leaf's name in Orbax's files."""
        return ".".join(str(key) for key in self.path)

    @property
    def plain(self) -> Any:
        """Of a leaf that is no array: the number, the string or the empty node that it stands for."""
        if self.kind == "dict":
            return {}
        return [] if self.kind == "list" else self.value


CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How arrays are laid out in storage.

    Attributes:
        chunk_bytes: the most that is written, checksummed and read back as a whole.
        zstd_level: compress each chunk with zstd; None: not.
        file_bytes: a data file is closed when it has grown to this size; None: by the size of a writer's share.
    """

    chunk_bytes: int = CHUNK_BYTES
    zstd_level: int | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSpec:
    """One array item of a step ("state", or an item that is a tree with arrays), leaves in the order of Orbax's serialized tree."""

    item: str
    leaves: tuple[LeafSpec, ...]
    zstd_level: int | None = None  # see WriteOptions; all writers of an array must agree on it
    file_bytes: int | None = None  # see WriteOptions

    def with_values(self, values: Sequence[int | float | bool | str | None]) -> TreeSpec:
        """The same tree with these values of its scalar and string leaves, in order (`SlotTable.values`)."""
        rest = iter(values)
        leaves = (dataclasses.replace(x, value=next(rest)) if x.kind in ("scalar", "string") else x for x in self.leaves)
        return dataclasses.replace(self, leaves=tuple(leaves))

    @property
    def values(self) -> list[int | float | bool | str | None]:
        """Those of its scalar and string leaves, in order: the inverse of `with_values`."""
        return [leaf.value for leaf in self.leaves if leaf.kind in ("scalar", "string")]


def nest(leaves: Sequence[LeafSpec], values: Sequence[Any]) -> Any:
    """Nested dicts and lists by the leaves' paths, with one value for each; a list with gaps, which others wrote, has None in them."""
    if len(leaves) == 1 and not leaves[0].path:
        return values[0]
    root = _Branch()
    for leaf, value in zip(leaves, values, strict=True):
        node = root
        for key in leaf.path[:-1]:
            node = node.setdefault(key, _Branch())
        node[leaf.path[-1]] = value
    return _settle(root)


class _Branch(dict[PathKey, Any]):
    """An inner node while the tree grows; a plain dict is an empty leaf."""


def _settle(node: Any) -> Any:
    if not isinstance(node, _Branch):
        return node
    children: dict[Any, Any] = {key: _settle(child) for key, child in node.items()}
    if children and all(isinstance(key, int) for key in children):
        return [children.get(index) for index in range(max(children) + 1)]
    return children


class Piece(NamedTuple):
    """A box of an array held by one process. `owned`: this process writes it to storage (exactly one process does)."""

    tree: int  # index into the layout's trees
    leaf: int  # index into that tree's leaves
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int  # bytes, in the slot's data region
    nbytes: int
    owned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One process's share of the state: the global trees and this process's pieces."""

    trees: tuple[TreeSpec, ...]
    pieces: tuple[Piece, ...]

    @property
    def data_bytes(self) -> int:
        """How many bytes the pieces take in a slot."""
        return max((piece.offset + piece.nbytes for piece in self.pieces), default=0)

    @property
    def write_buffer_bytes(self) -> int:
        """What writing this share takes in memory beside the slot, at most.

        TensorStore writes a chunk from where it lies if its elements lie one after the other. It
        keeps a copy of any other, and of a compressed one, until the whole transaction is written.
        """
        return sum(
            piece.nbytes
            for piece in self.pieces
            if piece.owned
            and (array := self.trees[piece.tree].leaves[piece.leaf].array) is not None
            and not (self.trees[piece.tree].zstd_level is None and _contiguous(array.chunk, piece.shape))
        )

    def global_hash(self) -> str:
        """Hash of what is equal on all processes: trees, shapes, dtypes, shardings; not scalar values."""
        trees = [tree.with_values([None] * len(tree.values)) for tree in self.trees]
        return hashlib.sha256(dumps(trees)).hexdigest()[:16]

    def to_bytes(self) -> bytes:
        """As it is stored in an arena."""
        return dumps(self)

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def from_bytes(data: bytes) -> Layout:
        """The inverse of `to_bytes`. Every step of a training has the same: the last few are kept."""
        return loads(Layout, data)


def _contiguous(chunk: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether each chunk of a row-major array lies in one piece: whole in all dimensions after the first in which it has more
    than one element."""
    for axis, length in enumerate(chunk):
        if min(length, shape[axis]) > 1:
            return all(c >= s for c, s in zip(chunk[axis + 1 :], shape[axis + 1 :], strict=True))
    return True


# What an item that is not an array tree is stored as, per process.
ItemKind = Literal["iterator", "json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTable:
    """The small part of a slot, beside the array bytes: which layout, the checksums, and everything that was serialized in save()."""

    layout_ref: str  # content hash of Layout.to_bytes(), stored once per arena
    crc32c: tuple[int, ...]  # per piece, in the layout's order
    values: tuple[
        tuple[int | float | bool | str | None, ...], ...
    ] = ()  # per tree: values of its scalar and string leaves, in order
    iterators: dict[str, bytes] = dataclasses.field(default_factory=dict[str, bytes])  # item -> this process's state
    files: dict[str, dict[str, bytes]] = dataclasses.field(
        default_factory=dict[str, dict[str, bytes]]
    )  # item -> what this process's object wrote itself: name -> bytes
    json_items: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])  # item -> process 0's value; empty elsewhere
    metrics: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    custom: Any = None

    def to_bytes(self) -> bytes:
        """As it is stored in a slot."""
        return dumps(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> SlotTable:
        """The inverse of `to_bytes`."""
        return loads(cls, data)


# ---------------------------------------------------------------- a committed step in storage


@dataclass(frozen=True, slots=True, kw_only=True)
class DataObject:
    """One immutable object of array bytes under a writer's unique name, relative to the step's folder.

    `crc32c` finds flipped bits but does not tell one object from another. Chunks and OCDBT's nodes
    end with their own crc32c, and the crc32c of all that ends so depends on its size alone. So
    there is a second checksum, `digest`.
    """

    name: str
    size: int
    crc32c: int
    writer: str
    digest: str = ""  # "crc32:<8 hex digits>" (zlib's), or "md5:<base64>" as a bucket gives it; empty: none is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """Everything that makes a step: the bytes of every fixed-name file, and every data object with its checksum."""

    step: int
    save: str
    run: str
    files: dict[str, bytes]  # name relative to the step's folder -> bytes; commit_success.txt markers included
    objects: tuple[DataObject, ...]
    format: int = 1

    def to_bytes(self) -> bytes:
        """As it is stored, sealed with a checksum."""
        return seal(plain(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Package:
        """Raises ValueError if it is not what `to_bytes` gave, bit for bit."""
        return decode(cls, unseal(data))
