"""From pieces, wherever they are, to the tree that a reference asks for.

Each process reads only the boxes that its own devices need, each box once, and no process waits for another.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from raystate.arrays.checks import plain_scalar
from raystate.arrays.converting import converted, number_as
from raystate.arrays.holders_of_arrays import uncollected
from raystate.arrays.leaves import key_impl_of
from raystate.arrays.mismatch import DifferenceError, Differences
from raystate.arrays.paths import Path, shown
from raystate.arrays.placing import Placing
from raystate.arrays.raw import array_bytes, host_want, raw_wants
from raystate.arrays.reference import (
    Device,
    Given,
    Keep,
    Make,
    Matched,
    Numpy,
    Plain,
    ShapeRule,
    Want,
    match_leaf,
    match_reference,
)
from raystate.arrays.shards import places_of
from raystate.arrays.straight import ReadsInto, read_onto
from raystate.arrays.transforms import Rules
from raystate.core.formats.boxes import Box, in_batches
from raystate.core.formats.errors import callers_code
from raystate.core.formats.tree import ArraySpec, LeafSpec, TreeSpec, nest

BATCH_BYTES = 1 << 30  # read so much, place it on the devices, go on: host memory stays bounded


class ReadRequest(NamedTuple):
    """A box of one array: `leaf` is an index into the TreeSpec's leaves; start and shape in elements of the global array."""

    leaf: int
    start: tuple[int, ...]
    shape: tuple[int, ...]


class PieceSource(Protocol):
    """The arrays of one tree, in any tier.

    Attributes:
        lends: `read` may give views of memory that is reused later, or that others may write to;
            such views are read-only.
    """

    lends: bool

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        """The boxes, in order, with the dtype of the TreeSpec. Equal requests may be given one array."""
        ...


def restore_tree(
    reference: Any,
    spec: TreeSpec,
    source: PieceSource,
    *,
    partial: bool = False,
    cast: bool = False,
    shapes: ShapeRule = "match",
    rules: Rules | None = None,
    matched: Matched | None = None,
    on_plan: Callable[[int], None] = lambda _: None,
) -> Any:
    """Build the tree that the reference asks for.

    Args:
        reference: any pytree; leaves ShapeDtypeStruct or jax.Array (gives a jax.Array with that sharding; an abstract one without has
            the saved one, if its devices are here, else it goes onto the default device and is free to move), np.ndarray, Python or
            numpy scalars, str, a Sharding or PartitionSpec (shape and dtype from the checkpoint; in place of a subtree, all of it as
            nested dicts and lists), or `...` (skipped, stays `...`). Shardings without devices are taken to be on the mesh in force.
            None: the raw tree, as `raw_wants` says.
        spec: what the checkpoint holds, with the values of its scalars (`TreeSpec.with_values`).
        source: where its bytes are. What is returned is a copy, or memory that only the
            caller has (`PieceSource.lends`).
        partial: paths that only the reference has keep its value instead of being an error.
        cast: convert dtypes instead of refusing.
        shapes: "checkpoint" takes the checkpoint's shape where the reference has another.
        rules: `transforms` as a mapping.
        matched: what `match_reference` has said of all these already.
        on_plan: called with bytes that will be asked of `source`, before they are.

    Raises:
        ReferenceMismatchError: all differences in one. CorruptCheckpointError: from the source.
    """
    if reference is None:
        return read_raw(raw_wants(spec), spec, source, on_plan)
    with uncollected():
        if matched is None:
            matched = match_reference(reference, spec, partial=partial, cast=cast, shapes=shapes, rules=rules)
        wants, structure, _, paths = matched
        differences = Differences()
        results = _gather(wants, spec, source, on_plan, lambda position, why: differences.refuse(paths[position], why))
    made = [(position, want) for position, want in enumerate(wants) if isinstance(want, Make)]
    _fill_made(results, made, spec, source, differences, cast=cast, shapes=shapes)
    if differences:
        raise differences.error(spec.item)
    with callers_code():  # its classes make themselves of their leaves
        return jax.tree_util.tree_unflatten(structure, results)


def read_raw(wants: Sequence[Want], spec: TreeSpec, source: PieceSource, on_plan: Callable[[int], None] = lambda _: None) -> Any:
    """All of a checkpoint, in nested dicts and lists; `wants` has one entry per leaf."""
    with uncollected():
        return nest(spec.leaves, _gather(wants, spec, source, on_plan))


Refuse = Callable[[int, DifferenceError], None]


def _refuse(position: int, why: DifferenceError) -> None:
    """Where dtypes are the checkpoint's own, all values fit."""
    raise AssertionError(f"leaf {position}: {why}")


def _gather(
    wants: Sequence[Want],
    spec: TreeSpec,
    source: PieceSource,
    on_plan: Callable[[int], None] = lambda _: None,
    refuse: Refuse = _refuse,
) -> list[Any]:
    """What is wanted, by position. `refuse`: called with each position whose values the wanted dtype can't hold."""
    results: list[Any] = [want.value if isinstance(want, Keep | Plain) else None for want in wants]
    for position, want in enumerate(wants):
        if isinstance(want, Given):
            device = Device(leaf=-1, shape=(), dtype=want.value.dtype, sharding=want.sharding, weak_type=want.weak_type)
            placing = Placing()
            placing.add(position, device, {Box((), ()): want.value})
            results[position] = placing.arrays()[position]
    parts = [_part(i, want, spec) for i, want in enumerate(wants) if isinstance(want, Numpy | Device)]
    on_plan(sum(part.nbytes for part in parts))
    if isinstance(source, ReadsInto):
        arrays = read_onto(dict(enumerate(wants)), spec, source)
        for position, array in arrays.items():
            results[position] = array
        parts = [part for part in parts if part.position not in arrays]
    for batch in in_batches(parts, lambda part: part.nbytes, BATCH_BYTES):
        _fill(results, batch, source, refuse)
    return results


# ---------------------------------------------------------------- what functions make


def _fill_made(
    results: list[Any],
    made: list[tuple[int, Make]],
    spec: TreeSpec,
    source: PieceSource,
    differences: Differences,
    *,
    cast: bool,
    shapes: ShapeRule,
) -> None:
    """Call the functions, and place what they give as the reference's leaves say."""
    for batch in _made_batches(made, spec):
        needed = list(dict.fromkeys(index for _, want in batch for index in want.made.needs))
        inputs = dict(zip(needed, _gather([host_want(spec, index) for index in needed], spec, source), strict=True))
        for position, want in batch:
            results[position] = _placed(want, _called(want, spec, inputs), differences, spec.item, cast=cast, shapes=shapes)


def _made_batches(made: list[tuple[int, Make]], spec: TreeSpec) -> Iterator[list[tuple[int, Make]]]:
    """Functions of the same leaves together, so that these are read once; as many as host memory is meant to hold."""
    batch: list[tuple[int, Make]] = []
    needed: set[int] = set()
    for position, want in made:
        more = needed | set(want.made.needs)
        if batch and more != needed and sum(array_bytes(spec.leaves[index]) for index in more) > BATCH_BYTES:
            yield batch
            batch, more = [], set(want.made.needs)
        batch.append((position, want))
        needed = more
    if batch:
        yield batch


def _called(want: Make, spec: TreeSpec, inputs: dict[int, Any]) -> Any:
    arguments: list[Any] = []
    for indices, depth in want.made.inputs:
        leaves = [dataclasses.replace(spec.leaves[index], path=spec.leaves[index].path[depth:]) for index in indices]
        arguments.append(nest(leaves, [inputs[index] for index in indices]))
    try:
        with callers_code():
            return want.made.call(arguments, want.value)
    except Exception as error:
        error.add_note(f"raised by the function in transforms for {shown(want.path)} (from {want.made.said})")
        raise


def _placed(want: Make, value: Any, differences: Differences, item: str, *, cast: bool, shapes: ShapeRule) -> Any:
    """Match and place a value that a function has made, like a checkpoint of this one leaf."""
    try:
        spec, source = host_tree(item, want.path, value)
    except DifferenceError as error:
        differences.refuse(want.path, error)
        return None
    matched = match_leaf(spec, want.path, want.value, differences, cast=cast, shapes=shapes)
    return _gather([matched], spec, source, refuse=lambda _, why: differences.refuse(want.path, why))[0]


# ---------------------------------------------------------------- reading and placing


class _Part(NamedTuple):
    """One leaf to read: where it goes, and the boxes it is made of."""

    position: int
    want: Numpy | Device
    boxes: Sequence[Box]
    nbytes: int


def _part(position: int, want: Numpy | Device, spec: TreeSpec) -> _Part:
    array = spec.leaves[want.leaf].array
    assert array is not None
    boxes, elements = _boxes(None if isinstance(want, Numpy) else want.sharding, array.shape)
    return _Part(position, want, boxes, elements * np.dtype(array.dtype).itemsize)


@functools.lru_cache(maxsize=1024)
def _boxes(sharding: Sharding | None, shape: tuple[int, ...]) -> tuple[Sequence[Box], int]:
    """(the distinct boxes that this process needs, how many elements they have); without a sharding it is all of the array."""
    whole = Box((0,) * len(shape), shape)
    boxes = [whole] if sharding is None else list(dict.fromkeys(box for _, box in places_of(sharding, shape)))
    return boxes, sum(box.size for box in boxes)


def _fill(results: list[Any], batch: list[_Part], source: PieceSource, refuse: Refuse) -> None:
    # Two leaves of a reference may ask for the same box only if they have the same path, which a pytree can't: no need to merge.
    requests = [ReadRequest(part.want.leaf, box.start, box.shape) for part in batch for box in part.boxes]
    arrays = iter(source.read(requests))
    placing = Placing()
    for part in batch:
        boxes = {box: np.asarray(next(arrays)) for box in part.boxes}  # of shape () it may be a scalar
        try:
            boxes = {
                box: values if values.dtype == part.want.dtype else converted(values, part.want.dtype, box.start)
                for box, values in boxes.items()
            }
            if isinstance(part.want, Device):
                placing.add(part.position, part.want, boxes)
                continue
            (values,) = boxes.values()
            results[part.position] = _as_numpy(part.want, values, own=source.lends and values.flags.writeable)
        except DifferenceError as error:
            refuse(part.position, error)
    placed = placing.arrays()
    for position, array in placed.items():
        results[position] = array
    # The source's memory may be reused as soon as this returns, and transfers to devices run behind.
    jax.block_until_ready(list(placed.values()))


def _as_numpy(want: Numpy, box: np.ndarray, *, own: bool) -> Any:
    """`own`: only the caller has the box, so it may be the array itself."""
    array = box if own else np.array(box)
    if want.scalar is None:
        return array
    return array[()] if issubclass(want.scalar, np.generic) else number_as(array.item(), want.scalar)


# ---------------------------------------------------------------- a value in host memory as something to restore from


@dataclasses.dataclass(frozen=True)
class HostArrays:
    """A PieceSource over numpy arrays, by leaf. It gives views."""

    arrays: Mapping[int, np.ndarray]
    lends = True

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        """See `PieceSource.read`."""
        boxes = [(r.leaf, tuple(slice(a, a + n) for a, n in zip(r.start, r.shape, strict=True))) for r in requests]
        views = [np.asarray(self.arrays[leaf][box]).view() for leaf, box in boxes]  # of shape () it would be a scalar
        for view in views:
            view.flags.writeable = False
        return views


def host_tree(item: str, path: Path, value: Any) -> tuple[TreeSpec, PieceSource]:
    """One leaf that a function gave, as a checkpoint of its own.

    Raises:
        DifferenceError: it is no leaf of a checkpoint.
    """
    if isinstance(value, bool | int | float | str):
        leaf = LeafSpec(path=path, kind="string" if isinstance(value, str) else "scalar", value=plain_scalar(value))
        return TreeSpec(item=item, leaves=(leaf,)), HostArrays({})
    key_impl = None
    if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        key_impl, value = key_impl_of(value.dtype), jax.random.key_data(value)
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise DifferenceError(f"its function in transforms gave a {type(value).__name__}, not an array, number or string")
    array = np.asarray(value)
    spec = ArraySpec(shape=array.shape, dtype=array.dtype.name, chunk=tuple(max(1, n) for n in array.shape), key_impl=key_impl)
    return TreeSpec(item=item, leaves=(LeafSpec(path=path, kind="array", array=spec),)), HostArrays({0: array})
