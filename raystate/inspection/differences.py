"""How two steps differ: which arrays and values, and by how much. Arrays are read in boxes, so that memory stays bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from raystate.core.formats.boxes import Box
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.tree import ArraySpec, LeafSpec
from raystate.inspection.boxes import boxes_of, nbytes_of
from raystate.inspection.metadata import orbax_item, shown_items
from raystate.orbax.step_reader import StepReader

_BOX_BYTES = 8 << 20  # of each step, per read; a larger chunk comes alone
_READERS = 4  # arrays that are compared at a time

Status = Literal["equal", "values", "dtype", "shape", "only in A", "only in B", "unreadable"]


@dataclass(frozen=True, kw_only=True)
class ArrayDifference:
    """What became of one array from A to B.

    Attributes:
        item, name: which.
        status: "equal": bit for bit; "values": some elements differ; "dtype": and perhaps values, too; "shape": nothing was compared.
        a, b: how each step has it; None: it hasn't.
        max_abs: the largest absolute difference of two elements; infinite where only one of them is finite, or a NaN.
        max_rel: the largest difference relative to the larger of both elements.
        problem: why it could not be read.
    """

    item: str
    name: str
    status: Status
    a: ArraySpec | None = None
    b: ArraySpec | None = None
    max_abs: float = 0.0
    max_rel: float = 0.0
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class ValueDifference:
    """A scalar, string, metric, JSON item, iterator or custom value that is not the same; None: a step has it not."""

    item: str
    name: str
    a: Any
    b: Any


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that was compared. `same_values`: how many of what is not an array are equal."""

    arrays: tuple[ArrayDifference, ...]
    values: tuple[ValueDifference, ...]
    same_values: int

    @property
    def differing(self) -> list[ArrayDifference]:
        """The arrays that are not equal, and those that could not be compared; what can't be measured first, then the largest."""
        return sorted(
            (one for one in self.arrays if one.status != "equal"), key=lambda one: (one.status in _MEASURED, -one.max_rel)
        )

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
    sides = [_leaves(reader, wanted) for reader in (a, b)]
    arrays = [{key: leaf for key, leaf in side.items() if leaf[1].array is not None} for side in sides]
    values = [
        {key: leaf.plain for key, (_, leaf) in side.items() if leaf.array is None} | dict(_others(reader, wanted))
        for reader, side in zip((a, b), sides, strict=True)
    ]
    keys = list(dict.fromkeys([*values[0], *values[1]]))
    unequal = [key for key in keys if key not in values[0] or key not in values[1] or not _same(values[0][key], values[1][key])]
    total = sum(nbytes_of(leaf.array) for _, leaf in arrays[0].values() if leaf.array is not None)
    found: list[ArrayDifference] = []
    done = 0
    with ThreadPoolExecutor(max_workers=_READERS, thread_name_prefix="raystate-diff") as pool:
        both = dict.fromkeys([*arrays[0], *arrays[1]])
        for one in pool.map(lambda key: _compare_array(key, (a, b), (arrays[0].get(key), arrays[1].get(key))), both):
            found.append(one)
            done += nbytes_of(one.a) if one.a is not None else 0
            on_bytes(done, total)
    return Comparison(
        arrays=tuple(found),
        values=tuple(ValueDifference(item=key[0], name=key[1], a=values[0].get(key), b=values[1].get(key)) for key in unequal),
        same_values=len(keys) - len(unequal),
    )


# ---------------------------------------------------------------- inside

_MEASURED = ("values", "dtype")
_Key = tuple[str, str]  # item, name
_Leaf = tuple[int, LeafSpec]  # leaf index, leaf


def _leaves(reader: StepReader, wanted: Callable[[str, str], bool]) -> dict[_Key, _Leaf]:
    return {
        (item, leaf.name): (index, leaf)
        for item, kind in shown_items(reader).items()
        if kind == "arrays"
        for index, leaf in enumerate(reader.tree(orbax_item(reader, item)).leaves)
        if wanted(item, leaf.name)
    }


def _others(reader: StepReader, wanted: Callable[[str, str], bool]) -> Iterator[tuple[_Key, Any]]:
    """What is not in a tree."""
    for item, kind in shown_items(reader).items():
        if not wanted(item, ""):
            continue
        if kind == "json":
            yield (item, ""), reader.json(item)
        elif kind == "iterator":
            states, world = reader.iterator_states(item)
            for process, state in states.items():
                yield (item, f"process {process} of {world}"), state.decode(errors="replace")
        elif kind == "files":
            for name, data in reader.own_files(item).items():
                yield (item, name), data.decode(errors="replace")
    for name, value in reader.metrics().items():
        if wanted("metrics", name):
            yield ("metrics", name), value
    if wanted("custom", "") and (custom := reader.custom()) is not None:
        yield ("custom", ""), custom


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    return type(a) is type(b) and a == b


def _compare_array(key: _Key, readers: tuple[StepReader, StepReader], leaves: tuple[_Leaf | None, _Leaf | None]) -> ArrayDifference:
    a, b = (leaf[1].array if leaf is not None else None for leaf in leaves)

    def outcome(status: Status, **how: Any) -> ArrayDifference:
        return ArrayDifference(item=key[0], name=key[1], status=status, a=a, b=b, **how)

    if a is None or b is None:
        return outcome("only in B" if a is None else "only in A")
    if a.shape != b.shape:
        return outcome("shape")
    most_abs, most_rel, is_equal = 0.0, 0.0, True
    try:
        for box in boxes_of(a, box_bytes=_BOX_BYTES):
            one, other = (
                _read(reader, key[0], leaf, box) for reader, leaf in zip(readers, leaves, strict=True) if leaf is not None
            )
            if one.dtype != other.dtype or one.tobytes() != other.tobytes():
                is_equal = False
                gap, relative = _gaps(one, other)
                most_abs, most_rel = max(most_abs, gap), max(most_rel, relative)
    except CorruptCheckpointError as error:
        return outcome("unreadable", problem=error.message)
    is_of_one_kind = (a.dtype, a.key_impl) == (b.dtype, b.key_impl)
    return outcome(("equal" if is_equal else "values") if is_of_one_kind else "dtype", max_abs=most_abs, max_rel=most_rel)


def _read(reader: StepReader, item: str, leaf: _Leaf, box: Box) -> np.ndarray:
    return reader.read(orbax_item(reader, item), [(leaf[0], box.start, box.shape)])[0]


def _gaps(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
    """(the largest |a-b|, the largest |a-b| / max(|a|, |b|))."""
    one, other = _wide(a), _wide(b)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        gaps = np.where((one == other) | (np.isnan(one) & np.isnan(other)), 0, np.abs(one - other))
        sizes = np.maximum(np.abs(one), np.abs(other))
        relative = np.where(gaps != 0, gaps / sizes, 0)
    gaps, relative = (np.where(np.isfinite(one) & np.isfinite(other) | (part == 0), part, np.inf) for part in (gaps, relative))
    return float(gaps.max(initial=0)), float(relative.max(initial=0))


def _wide(part: np.ndarray) -> np.ndarray:
    """Wide enough for 64-bit integers to stay exact, where the machine has such a float."""
    return part.astype(np.clongdouble if part.dtype.kind == "c" else np.longdouble)
