"""From the trees of a save to their description: which leaves, which pieces of which arrays on this process, where in a slot.

A state keeps its structure for a whole training, so nearly every call takes the fast path: flatten, compare, swap the leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
from jax.core import Tracer

from raystate.arrays.checks import check_text, kind, of_a_class, plain_scalar, shown
from raystate.arrays.holders_of_arrays import uncollected
from raystate.arrays.names import argument_of, check_names, flatten_trees, mistake
from raystate.arrays.paths import TreeNode, empty_kind, flatten
from raystate.arrays.shards import Shard, chunk_shape, is_process_local, local_shards, sharding_json, straight_boxes
from raystate.core.formats.boxes import Box
from raystate.core.formats.errors import ConfigError
from raystate.core.formats.tree import ArraySpec, Layout, LeafSpec, Piece, TreeSpec, WriteOptions

Scalar = int | float | bool | str
_ARRAYS = (jax.Array, np.ndarray, np.generic)

PIECE_ALIGNMENT_BYTES = 64  # a cache line: pieces are copied and checksummed by several threads


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayLeaf:
    """Where an array of the layout comes from, and which parts of it are copied."""

    position: int  # in the flattened trees
    tree: int
    leaf: int
    shards: tuple[Shard, ...]
    whole: bool  # every addressable shard is a distinct box: nothing to select
    numpy: bool
    key: bool  # a typed PRNG key array: its uint32 data is what is kept


class Process(NamedTuple):
    """Which process of how many this is."""

    index: int
    count: int


class Signature(NamedTuple):
    """What must be equal for a leaf to fit the plan; only the type for what is neither a jax nor a numpy array."""

    kind: type
    shape: tuple[int, ...] | None
    dtype: Any
    sharding: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What stays the same from step to step."""

    layout: Layout  # scalar and string leaves have no value here: a step's values are in Described.values
    layout_hash: str  # Layout.global_hash(): equal on all processes
    layout_bytes: bytes  # Layout.to_bytes()
    arrays: tuple[ArrayLeaf, ...]  # in the order of the layout's pieces
    pieces_of: tuple[range, ...]  # per shard of these, in their order: its pieces in the layout
    scalars: tuple[tuple[int, ...], ...]  # per tree: positions of its scalar and string leaves
    structure: Any  # jax's, of all trees together
    signatures: tuple[Signature, ...]  # per leaf; holding the leaves themselves would keep a second state on the devices
    process: Process


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """One step's state: the plan and this step's leaves."""

    plan: Plan
    leaves: tuple[Any, ...]  # of all trees, in the order of jax.tree_util.tree_flatten
    values: tuple[tuple[Scalar | None, ...], ...]  # for SlotTable.values

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def layout_hash(self) -> str:
        return self.plan.layout_hash

    @property
    def layout_bytes(self) -> bytes:
        return self.plan.layout_bytes


_DEFAULT = WriteOptions()


def describe(
    trees: Mapping[str, Any],
    *,
    process_index: int | None = None,
    process_count: int | None = None,
    previous: Plan | None = None,
    options: WriteOptions = _DEFAULT,
) -> Described:
    """Describe the trees of one save.

    Args:
        trees: item name -> pytree. Leaves: jax.Array, np.ndarray, numpy scalars (kept as 0-d arrays), bool, int, float, str;
            None and empty containers are kept as such. Of a subclass of int, float or str, such as an enum's, the plain value is kept.
        process_index, process_count: of this trainer; None asks jax. In a run of several, arrays that only this process can see are
            copies of a value that all must have equal (`core.formats.local_values`).
        previous: the plan of the last answer. If structure, shapes, dtypes and shardings still fit, only the leaves are swapped
            (150 leaves: well under 1 ms), and the answer's plan is this very object.
        options: how the arrays are to be laid out in storage; those of `previous`.

    Raises:
        ConfigError: a leaf can't be kept, or a name can't be written; names its path and type.
    """
    process = Process(
        jax.process_index() if process_index is None else process_index,
        jax.process_count() if process_count is None else process_count,
    )
    leaves, structure = flatten_trees(trees)
    if previous is not None and _fits(previous, leaves, structure, process):
        plan = previous
    else:
        with uncollected():
            plan = _plan(trees, leaves, structure, process, options)
    _check_alive(plan, leaves)
    values = tuple(tuple(cast(Scalar, plain_scalar(leaves[position])) for position in positions) for positions in plan.scalars)
    for tree, row in zip(plan.layout.trees, values, strict=True):
        _check_values(tree, row)
    return Described(plan=plan, leaves=tuple(leaves), values=values)


# ---------------------------------------------------------------- fast path


def _fits(plan: Plan, leaves: Sequence[Any], structure: Any, process: Process) -> bool:
    if plan.process != process or plan.structure != structure or len(plan.signatures) != len(leaves):
        return False
    return all(map(_fits_leaf, plan.signatures, leaves))


def _fits_leaf(signature: Signature, leaf: Any) -> bool:
    kind, shape, dtype, sharding = signature
    if type(leaf) is not kind:
        return False
    if shape is None:
        return True
    if leaf.shape != shape or leaf.dtype != dtype:
        return False
    return sharding is None or leaf.sharding is sharding or leaf.sharding == sharding


def _check_alive(plan: Plan, leaves: Sequence[Any]) -> None:
    """Refuse deleted arrays, at every call: a plan that is reused says nothing about them."""
    for array in plan.arrays:
        if not array.numpy and leaves[array.position].is_deleted():
            tree = plan.layout.trees[array.tree]
            raise mistake(tree.item, tree.leaves[array.leaf].path, _DONATED)


def _signature(leaf: Any) -> Signature:
    if isinstance(leaf, jax.Array):
        return Signature(type(leaf), leaf.shape, leaf.dtype, leaf.sharding)
    if isinstance(leaf, np.ndarray | np.generic):
        return Signature(type(leaf), leaf.shape, leaf.dtype, None)
    return Signature(type(leaf), None, None, None)


# ---------------------------------------------------------------- slow path


def _plan(trees: Mapping[str, Any], leaves: Sequence[Any], structure: Any, process: Process, options: WriteOptions) -> Plan:
    # jax flattens a dict by sorted keys; the trees follow the same order, so that positions agree.
    builder = _Builder(process, options)
    specs = tuple(builder.add_tree(item, trees[item]) for item in sorted(trees))
    layout = Layout(trees=specs, pieces=tuple(builder.pieces))
    return Plan(
        layout=layout,
        layout_hash=layout.global_hash(),
        layout_bytes=layout.to_bytes(),
        arrays=tuple(builder.arrays),
        pieces_of=tuple(builder.pieces_of),
        scalars=tuple(builder.scalars),
        structure=structure,
        signatures=tuple(map(_signature, leaves)),
        process=process,
    )


class _PlacedPart(NamedTuple):
    """A piece of a shard, wherever it comes to lie in the slot."""

    box: Box
    nbytes: int
    padded_bytes: int


class _Placed(NamedTuple):
    """What arrays of one sharding, shape and dtype have in common: see ArrayLeaf."""

    spec: ArraySpec
    shards: tuple[Shard, ...]
    whole: bool
    parts: tuple[tuple[_PlacedPart, ...], ...]  # per shard


class _Builder:
    def __init__(self, process: Process, options: WriteOptions):
        self.process = process
        self.options = options
        self.pieces: list[Piece] = []
        self.pieces_of: list[range] = []
        self.arrays: list[ArrayLeaf] = []
        self.scalars: list[tuple[int, ...]] = []
        self._trees = 0
        self._position = 0
        self._offset = 0
        self._shardings: dict[Any, str | None] = {}
        self._placed: dict[Any, _Placed] = {}

    def add_tree(self, item: str, tree: Any) -> TreeSpec:
        nodes = flatten(tree)
        if not nodes or (nodes[0].empty and not nodes[0].path):
            raise mistake(item, (), f"it is {shown(tree)}, in which there is nothing to keep")
        scalars: list[int] = []
        leaves: list[LeafSpec] = []
        for node in nodes:
            leaves.append(self._add_leaf(item, node, len(leaves), scalars))
        check_names(item, leaves)
        self.scalars.append(tuple(scalars))
        self._trees += 1
        options = self.options
        return TreeSpec(item=item, leaves=tuple(leaves), zstd_level=options.zstd_level, file_bytes=options.file_bytes)

    def _add_leaf(self, item: str, node: TreeNode, leaf: int, scalars: list[int]) -> LeafSpec:
        if node.empty:
            kind = cast(Literal["none", "dict", "list"], empty_kind(node.value))
            return LeafSpec(path=node.path, kind=kind)
        position = self._position
        self._position += 1
        value = node.value
        if isinstance(value, _ARRAYS):
            try:
                placed = self._placed_like(value)
            except _UnsupportedError as error:
                raise _unsupported(item, node, str(error)) from None
            self._add_array(placed, position, leaf, numpy=not isinstance(value, jax.Array))
            return LeafSpec(path=node.path, kind="array", array=placed.spec)
        if isinstance(value, bool | int | float | str):
            scalars.append(position)
            return LeafSpec(path=node.path, kind="string" if isinstance(value, str) else "scalar")
        if isinstance(value, type):
            raise mistake(item, node.path, of_a_class(value))
        if callable(value):
            raise _unsupported(item, node, _FUNCTION)
        raise _unsupported(item, node, "")

    def _placed_like(self, value: Any) -> _Placed:
        if not isinstance(value, jax.Array):
            return self._numpy(value)
        if isinstance(value, Tracer):
            raise _UnsupportedError("it is traced: save() can't be called inside jit")
        if value.is_deleted():
            raise _UnsupportedError(_DONATED)
        key = value.sharding, value.shape, value.dtype
        if key not in self._placed:  # asking each of ten thousand arrays takes half a second
            self._placed[key] = self._jax(value)
        return self._placed[key]

    def _numpy(self, value: Any) -> _Placed:
        if isinstance(value, np.ma.MaskedArray):
            raise _UnsupportedError("its mask would be lost: save x.data and x.mask")
        _check_dtype(value.dtype)
        # Every process keeps its own copy, so that each can restore alone; process 0's is the one that is stored.
        shard = Shard(0, (0,) * value.ndim, value.shape, self.process.index == 0)
        local = self.process.count > 1
        chunk = self._chunk(value.shape, value)
        spec = ArraySpec(shape=value.shape, dtype=value.dtype.name, chunk=chunk, typestr="np.ndarray", local=local)
        return _Placed(spec, (shard,), whole=True, parts=(self._parts(spec, shard),))

    def _jax(self, value: jax.Array) -> _Placed:
        key_impl = None
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            key_impl = str(jax.random.key_impl(value))
            value = jax.random.key_data(value)
        elif jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
            raise _UnsupportedError(f"dtype {value.dtype} has no form in a checkpoint")
        _check_dtype(value.dtype)
        self._check_seen(value.sharding)
        shards = local_shards(value, process_index=self.process.index, process_count=self.process.count)
        spec = ArraySpec(
            shape=value.shape,
            dtype=value.dtype.name,
            chunk=self._chunk(value.sharding.shard_shape(value.shape), value),
            sharding=self._sharding_json(value.sharding),
            key_impl=key_impl,
            local=is_process_local(value.sharding, self.process.count),
        )
        whole = len(shards) == len(value.addressable_shards)
        return _Placed(spec, tuple(shards), whole=whole, parts=tuple(self._parts(spec, shard) for shard in shards))

    def _parts(self, spec: ArraySpec, shard: Shard) -> tuple[_PlacedPart, ...]:
        whole, itemsize = Box(shard.start, shard.shape), np.dtype(spec.dtype).itemsize
        # Compressed chunks are copied in any case: they need no boxes that lie straight in memory.
        boxes = [whole] if self.options.zstd_level is not None else straight_boxes(whole, spec.chunk, itemsize)
        sizes = [box.size * itemsize for box in boxes]
        align = PIECE_ALIGNMENT_BYTES
        return tuple(_PlacedPart(box, nbytes, -(-nbytes // align) * align) for box, nbytes in zip(boxes, sizes, strict=True))

    def _chunk(self, shard: tuple[int, ...], value: Any) -> tuple[int, ...]:
        return chunk_shape(shard, value.shape, value.dtype.itemsize, self.options.chunk_bytes)

    def _check_seen(self, sharding: Any) -> None:
        """An array on the devices of one process alone is that process's own to it: the others have to know nothing of it."""
        owners = {device.process_index for device in sharding.device_set} if not sharding.addressable_devices else set()
        if len(owners) == 1:
            why = f"all of it lies on the devices of process {owners.pop()}, which takes it for a value of its own"
            raise _UnsupportedError(f"{why}: shard or replicate it over devices of several processes")

    def _sharding_json(self, sharding: Any) -> str | None:
        if sharding not in self._shardings:  # few distinct ones, each as long as the mesh is large
            self._shardings[sharding] = sharding_json(sharding, process_count=self.process.count)
        return self._shardings[sharding]

    def _add_array(self, placed: _Placed, position: int, leaf: int, *, numpy: bool) -> None:
        tree, key = self._trees, placed.spec.key_impl is not None
        same = {"shards": placed.shards, "whole": placed.whole, "numpy": numpy, "key": key}
        self.arrays.append(ArrayLeaf(position=position, tree=tree, leaf=leaf, **same))
        for shard, parts in zip(placed.shards, placed.parts, strict=True):
            self.pieces_of.append(range(len(self.pieces), len(self.pieces) + len(parts)))
            for (start, shape), nbytes, padded_bytes in parts:
                at, self._offset = self._offset, self._offset + padded_bytes
                where = Piece(tree=tree, leaf=leaf, start=start, shape=shape, offset=at, nbytes=nbytes, owned=shard.owned)
                self.pieces.append(where)


class _UnsupportedError(Exception):
    pass


def _unsupported(item: str, node: TreeNode, why: str) -> ConfigError:
    what = kind(node.value)
    if not why and isinstance(node.value, jax.Ref):
        why = "save what it holds, ref[...], and make a new one of what is restored: jax.new_ref(restored)"
    text = why or "a leaf must be a jax.Array, numpy array or scalar, bool, int, float or str"
    return mistake(item, node.path, f"can't save a{'n' if what[:1] in 'aeiouAEIOU' else ''} {what}: {text}", got=what)


# As Equinox has them, which keeps activations among a module's leaves.
_FUNCTION = (
    "a function has no form in a checkpoint. Of an equinox module, save eqx.filter(module, eqx.is_array), and put what is loaded back "
    "with eqx.combine(loaded, module)"
)
_DONATED = "it was donated to a later computation and is deleted: call save() with the newest state"

# What TensorStore's zarr3 can hold (tests/orbax/test_writer.py compares). Refused at the save, not minutes later when it is written.
STORABLE = frozenset(
    {
        *("bool", "int2", "int4", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("bfloat16", "float16", "float32", "float64", "complex64", "complex128"),
        *("float8_e3m4", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
        *("float8_e8m0fnu", "float4_e2m1fn"),
    }
)


def _check_dtype(dtype: np.dtype) -> None:
    if dtype.name not in STORABLE:
        raise _UnsupportedError(f"dtype {dtype} has no form in a checkpoint")


def _check_values(tree: TreeSpec, values: Sequence[Any]) -> None:
    rest = (leaf for leaf in tree.leaves if leaf.kind in ("scalar", "string"))
    for leaf, value in zip(rest, values, strict=True):
        if isinstance(value, str):
            if not value.isascii():  # cheap: strings are few
                check_text(
                    argument_of(tree.item), leaf.path, "the string", value, empty=True, where=f"item {tree.item!r}", item=tree.item
                )
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise mistake(tree.item, leaf.path, f"the integer {shown(value)} doesn't fit into 64 bits: save a string or an array")
