"""How two steps differ: which arrays and values, and by how much. Arrays are read in boxes, so that memory stays bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raystate.core.formats.boxes import in_batches
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.tree import ArraySpec, LeafSpec
from raystate.inspection.boxes import boxes_of, nbytes_of
from raystate.inspection.metadata import orbax_item, shown_items
from raystate.orbax.step_reader import StepReader

_BATCH_BYTES = 32 << 20  # of each step, per read; a larger chunk comes alone
_PIECE = 1 << 20  # elements that are compared at a time
_DEEPEST = 16  # keys of a member of a JSON object; what lies deeper is compared as one value

Status = Literal["equal", "values", "dtype", "shape", "only in A", "only in B", "unreadable"]


@dataclass(frozen=True, kw_only=True)
class ArrayDifference:
    """What became of one array from A to B.

    Attributes:
        item, name: which.
        status: "equal": bit for bit; "values": some elements differ; "dtype": and perhaps values, too; "shape": nothing was compared.
        a, b: how each step has it; None: it hasn't.
        elements: how many were compared.
        differing: how many differ: in any bit, or, between two dtypes, in value. NaN is equal to itself there.
        max_abs: the largest absolute difference of finite elements; of complex numbers of their distance.
        max_rel: the largest difference relative to the larger of both elements.
        not_finite: how many of the differing are NaN or infinite on either side: no difference can be told.
        problem: why it could not be read.
    """

    item: str
    name: str
    status: Status
    a: ArraySpec | None = None
    b: ArraySpec | None = None
    elements: int = 0
    differing: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    not_finite: int = 0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ValueDifference:
    """A scalar, string, iterator or metric, or a member of a JSON item or of the custom value, that is not the same.

    Attributes:
        item, name: which; a member of an object has its keys as its name, with dots between them.
        a, b: what each step has.
        only_in: the step that has it, "A" or "B", if the other one has not.
    """

    item: str
    name: str
    a: Any
    b: Any
    only_in: Literal["", "A", "B"] = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that was compared. `same_values`: how many of what is not an array are equal."""

    arrays: tuple[ArrayDifference, ...]
    values: tuple[ValueDifference, ...]
    same_values: int

    @property
    def differing(self) -> list[ArrayDifference]:
        """The arrays that are not equal, and those that could not be compared."""
        return [one for one in self.arrays if one.status != "equal"]

    @property
    def differs(self) -> bool:
        return bool(self.values or self.differing)


def compare(
    a: StepReader,
    b: StepReader,
    *,
    wanted: Callable[[str, str], bool] = lambda _item, _name: True,
    on_bytes: Callable[[int, int], None] = lambda _done, _total: None,
) -> Comparison:
    """Compare two steps, of one storage or of two.

    Args:
        a, b: the steps.
        wanted: (item, name of a leaf; "" for what has no leaves) -> whether it is compared.
        on_bytes: called with (bytes of A compared so far, bytes of A in all).

    Raises:
        CorruptCheckpointError: the metadata of a step cannot be read; of an array that cannot, the outcome says it. StorageError.
    """
    kinds = [shown_items(reader) for reader in (a, b)]
    sides = [_leaves(reader, found, wanted) for reader, found in zip((a, b), kinds, strict=True)]
    arrays = [{key: (i, leaf.array) for key, (i, leaf) in side.items() if leaf.array is not None} for side in sides]
    values: list[dict[_Place, Any]] = [
        {(item, (name,)): leaf.plain for (item, name), (_, leaf) in side.items() if leaf.array is None} for side in sides
    ]
    for reader, found, into in zip((a, b), kinds, values, strict=True):
        into.update(_others(reader, found, wanted))
    keys = list(dict.fromkeys([*values[0], *values[1]]))
    unequal = [key for key in keys if key not in values[0] or key not in values[1] or not _same(values[0][key], values[1][key])]
    outcome = {
        key: ArrayDifference(item=key[0], name=key[1], status=status, a=one, b=other)
        for key in dict.fromkeys([*arrays[0], *arrays[1]])
        if (status := _at_sight(one := arrays[0].get(key, (0, None))[1], other := arrays[1].get(key, (0, None))[1])) is not None
    }
    both = [key for key in arrays[0] if key not in outcome]
    total = sum(nbytes_of(array) for key in both if (array := arrays[0][key][1]) is not None)
    tallies = {key: _Tally() for key in both}
    done = 0
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="raystate-diff") as pool:
        for batch in _batches(both, arrays):
            parts = list(pool.map(lambda side, batch=batch: _read(side[0], side[1], batch), zip((a, b), arrays, strict=True)))
            for (key, _, _), one, other in zip(batch, *parts, strict=True):
                if isinstance(one, str) or isinstance(other, str):
                    tallies[key].problem = one if isinstance(one, str) else str(other)
                    continue
                tallies[key].add(one, other)
                done += one.nbytes
            on_bytes(done, total)
    for key in both:
        outcome[key] = tallies[key].outcome(key, arrays[0][key][1], arrays[1][key][1])
    return Comparison(
        arrays=tuple(outcome[key] for key in dict.fromkeys([*arrays[0], *arrays[1]])),
        values=tuple(
            ValueDifference(
                item=key[0],
                name=".".join(key[1]),
                a=values[0].get(key),
                b=values[1].get(key),
                only_in="B" if key not in values[0] else "A" if key not in values[1] else "",
            )
            for key in unequal
        ),
        same_values=len(keys) - len(unequal),
    )


# ---------------------------------------------------------------- inside

_Key = tuple[str, str]  # item, name
_Place = tuple[str, tuple[str, ...]]  # item, path in it
_Arrays = dict[_Key, tuple[int, ArraySpec]]  # leaf index, array
_Part = tuple[_Key, tuple[int, ...], tuple[int, ...]]  # which, start, shape


def _leaves(reader: StepReader, kinds: dict[str, Any], wanted: Callable[[str, str], bool]) -> dict[_Key, tuple[int, LeafSpec]]:
    trees = {item: reader.tree(orbax_item(reader, item)) for item, kind in kinds.items() if kind == "arrays"}
    return {
        (item, leaf.name): (index, leaf)
        for item, tree in trees.items()
        for index, leaf in enumerate(tree.leaves)
        if wanted(item, leaf.name)
    }


def _others(reader: StepReader, kinds: dict[str, Any], wanted: Callable[[str, str], bool]) -> Iterator[tuple[_Place, Any]]:
    """What is not in a tree."""
    for item, kind in kinds.items():
        if not wanted(item, ""):
            continue
        if kind == "json":
            yield from (((item, path), value) for path, value in _members(reader.json(item)))
        elif kind == "iterator":
            states, world = reader.iterator_states(item)
            for process, state in states.items():
                yield (item, (f"process {process} of {world}",)), state.decode(errors="replace")
        elif kind == "files":
            for name, data in reader.own_files(item).items():
                yield (item, (name,)), data.decode(errors="replace")
    for name, value in reader.metrics().items():
        if wanted("metrics", name):
            yield ("metrics", (name,)), value
    if wanted("custom", "") and (custom := reader.custom()) is not None:
        yield from ((("custom", path), value) for path, value in _members(custom))


def _members(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Of a JSON object its members, and theirs; of anything else itself."""
    if not isinstance(value, dict) or not value or len(path) == _DEEPEST:
        yield path, value
        return
    for key, member in value.items():
        yield from _members(member, (*path, str(key)))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and a == b


def _at_sight(a: ArraySpec | None, b: ArraySpec | None) -> Status | None:
    """What can be told without reading."""
    if a is None:
        return "only in B"
    if b is None:
        return "only in A"
    return "shape" if a.shape != b.shape else None


def _batches(keys: Sequence[_Key], arrays: Sequence[_Arrays]) -> Iterator[list[_Part]]:
    pairs = {key: (arrays[0][key][1], arrays[1][key][1]) for key in keys}
    widest = {key: max(np.dtype(one.dtype).itemsize for one in pair) for key, pair in pairs.items()}
    boxes = ((key, box) for key in keys for box in boxes_of(pairs[key][0], box_bytes=_BATCH_BYTES // 2))
    parts: Iterator[_Part] = ((key, box.start, box.shape) for key, box in boxes)
    return in_batches(parts, lambda part: math.prod(part[2]) * widest[part[0]], _BATCH_BYTES)


def _read(reader: StepReader, arrays: _Arrays, batch: Sequence[_Part]) -> list[np.ndarray | str]:
    """The batch's parts; a sentence in place of what cannot be read."""
    by_item: dict[str, list[int]] = {}
    for place, (key, _, _) in enumerate(batch):
        by_item.setdefault(key[0], []).append(place)
    parts: list[np.ndarray | str] = [""] * len(batch)
    for item, places in by_item.items():
        requests = [(arrays[batch[place][0]][0], batch[place][1], batch[place][2]) for place in places]
        name = orbax_item(reader, item)
        try:
            found: Sequence[np.ndarray | str] = reader.read(name, requests)
        except CorruptCheckpointError:
            found = [_read_one(reader, name, request) for request in requests]
        for place, part in zip(places, found, strict=True):
            parts[place] = part
    return parts


def _read_one(reader: StepReader, item: str, request: tuple[int, tuple[int, ...], tuple[int, ...]]) -> np.ndarray | str:
    try:
        return reader.read(item, [request])[0]
    except CorruptCheckpointError as error:
        return error.message


class _Tally:
    """Adds up the differences of one array, box by box."""

    def __init__(self) -> None:
        self.elements = self.differing = self.not_finite = 0
        self.max_abs = self.max_rel = 0.0
        self.problem = ""

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        self.elements += a.size
        flat_a, flat_b = np.ascontiguousarray(a).reshape(-1), np.ascontiguousarray(b).reshape(-1)
        for begin in range(0, a.size, _PIECE):
            self._add_piece(flat_a[begin : begin + _PIECE], flat_b[begin : begin + _PIECE])

    def _add_piece(self, a: np.ndarray, b: np.ndarray) -> None:
        where = _differing(a, b)
        count = int(np.count_nonzero(where))
        if not count:
            return
        self.differing += count
        a, b = a[where], b[where]
        gaps, sizes, finite = _gaps(a, b)
        self.not_finite += count - int(np.count_nonzero(finite))
        gaps, sizes = gaps[finite], sizes[finite]
        if gaps.size:
            self.max_abs = max(self.max_abs, float(gaps.max()))
            relative = np.divide(gaps, sizes, out=np.zeros(gaps.shape), where=sizes > 0)
            self.max_rel = max(self.max_rel, float(relative.max()))

    def outcome(self, key: _Key, a: ArraySpec, b: ArraySpec) -> ArrayDifference:
        status: Status = "dtype" if (a.dtype, a.key_impl) != (b.dtype, b.key_impl) else "values" if self.differing else "equal"
        return ArrayDifference(
            item=key[0],
            name=key[1],
            status="unreadable" if self.problem else status,
            a=a,
            b=b,
            elements=self.elements,
            differing=self.differing,
            max_abs=self.max_abs,
            max_rel=self.max_rel,
            not_finite=self.not_finite,
            problem=self.problem,
        )


def _differing(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype == b.dtype:
        bits = [part.view(np.uint8).reshape(part.size, part.dtype.itemsize) for part in (a, b)]
        return (bits[0] != bits[1]).any(axis=1)
    wide = [_wide(part) for part in (a, b)]
    with np.errstate(invalid="ignore"):
        return (wide[0] != wide[1]) & ~(np.isnan(wide[0]) & np.isnan(wide[1]))


def _gaps(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(|a-b|, the larger of |a| and |b|, where both are finite), as float64."""
    if a.dtype.kind in "iu" and a.dtype == b.dtype:  # exact, where float64 would not be
        low, high = np.minimum(a, b).astype(np.int64 if a.dtype.kind == "i" else np.uint64), np.maximum(a, b)
        gaps = (high.astype(low.dtype).view(np.uint64) - low.view(np.uint64)).astype(np.float64)
        return gaps, np.maximum(np.abs(_wide(a)), np.abs(_wide(b))), np.ones(a.shape, bool)
    one, other = _wide(a), _wide(b)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(one - other), np.maximum(np.abs(one), np.abs(other)), np.isfinite(one) & np.isfinite(other)


def _wide(part: np.ndarray) -> np.ndarray:
    return part.astype(np.complex128 if part.dtype.kind == "c" else np.float64)
