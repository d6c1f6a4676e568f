"""Boxes of arrays out of the slots of one or more trainers, whatever their sharding was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raystate.arrays.paths import shown
from raystate.arrays.restore import ReadRequest
from raystate.arrays.shards import Box
from raystate.checksum import crc32c
from raystate.core.errors import CorruptCheckpointError, ItemTopologyError
from raystate.core.tree import ArraySpec, Layout, Piece, TreeSpec

Values = tuple[tuple[int | float | bool | str | None, ...], ...]  # SlotTable.values


class UncoveredError(CorruptCheckpointError):
    """The holdings at hand don't have all of a box; nothing that they have is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What one trainer's slot holds.

    Attributes:
        layout: of that trainer.
        data: uint8, the slot's data region.
        crc32c: per piece of the layout.
        rank: of that trainer.
        holder: for error messages.
    """

    layout: Layout
    data: np.ndarray
    crc32c: tuple[int, ...]
    rank: int = 0
    holder: str = ""


class _Source:
    """A piece of a holding; its checksum is looked at when it is first used, once."""

    def __init__(self, holding: Holding, index: int):
        self.holding = holding
        self.piece: Piece = holding.layout.pieces[index]
        self.expected = holding.crc32c[index]
        self._intact: bool | None = None

    @property
    def box(self) -> Box:
        return Box(self.piece.start, self.piece.shape)

    def intact(self) -> bool:
        if self._intact is None:
            end = self.piece.offset + self.piece.nbytes
            self._intact = end <= self.holding.data.nbytes and crc32c(self._bytes()) == self.expected
        return self._intact

    def _bytes(self) -> np.ndarray:
        return self.holding.data[self.piece.offset : self.piece.offset + self.piece.nbytes]

    def array(self, dtype: np.dtype) -> np.ndarray:
        view = self._bytes().view(dtype).reshape(self.piece.shape)
        view.flags.writeable = False
        return view


class MemorySource:
    """A PieceSource over one item of one or more holdings of the same snapshot.

    A box that is exactly one piece is returned as a read-only view of the slot, without a copy. When a piece is damaged and another
    holding has the same elements, those are used. Of an array that each rank held for itself (`ArraySpec.local`), a rank gets its own
    value; who has none gets any, if all are equal.

    Args:
        holdings: of different ranks.
        item: of the layouts' trees.
        rank: whose values the arrays are to have that each rank held for itself; None: of no one in particular.
        world: how many ranks the snapshot has; None: as many as there are holdings.
    """

    def __init__(self, holdings: Sequence[Holding], item: str, *, rank: int | None = None, world: int | None = None):
        self._item = item
        self._rank = rank
        self._world = len(holdings) if world is None else world
        self._sources: dict[int, list[_Source]] = {}
        self._tree: TreeSpec | None = None
        for holding in holdings:
            for number, tree in enumerate(holding.layout.trees):
                if tree.item != item:
                    continue
                self._tree = self._tree or tree
                for index, piece in enumerate(holding.layout.pieces):
                    if piece.tree == number:
                        self._sources.setdefault(piece.leaf, []).append(_Source(holding, index))

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        """The boxes, in order.

        Raises:
            UncoveredError: a part of a box is in no holding. CorruptCheckpointError: it is only in damaged pieces.
            ItemTopologyError: ranks held different values of an array of their own, and this one held none.
        """
        return [self._read(request) for request in requests]

    def _read(self, request: ReadRequest) -> np.ndarray:
        if self._tree is None:
            raise UncoveredError(f"no holding has an item {self._item!r}", item=self._item)
        leaf = self._tree.leaves[request.leaf]
        array = leaf.array
        assert array is not None
        dtype = np.dtype(array.dtype)
        wanted = Box(tuple(request.start), tuple(request.shape))
        sources = self._sources.get(request.leaf, [])
        if array.local:
            sources = self._of_one_value(shown(leaf.path), sources)
        damaged: list[_Source] = []
        for source in sources:
            if source.box == wanted:
                if source.intact():
                    return source.array(dtype)
                damaged.append(source)
        result = np.empty(wanted.shape, dtype)
        missing = [wanted] if result.size else []  # an array without elements needs no piece
        for source in sources:
            if not missing:
                break
            if not any(intersection(box, source.box) for box in missing):
                continue
            if not source.intact():
                if source not in damaged:
                    damaged.append(source)
                continue
            missing = _take(source, dtype, wanted, missing, result)
        if missing:
            raise self._error(shown(leaf.path), array, wanted, missing, damaged)
        return result

    def _of_one_value(self, path: str, sources: list[_Source]) -> list[_Source]:
        """The pieces that may be read of an array that each rank held for itself, this rank's own first."""
        by_rank: dict[int, list[_Source]] = {}
        for source in sources:
            by_rank.setdefault(source.holding.rank, []).append(source)
        values = {rank: sorted((source.box, source.expected) for source in held) for rank, held in by_rank.items()}
        if self._rank in by_rank:
            own = values[self._rank]
            return sorted(
                (s for rank in by_rank if values[rank] == own for s in by_rank[rank]), key=lambda s: s.holding.rank != self._rank
            )
        if len(by_rank) < self._world:
            ranks = sorted(by_rank)
            text = f"item {self._item!r}, {path}: {self._world} ranks held values of their own, only those of {ranks} are at hand"
            raise UncoveredError(text, item=self._item, path=path)
        if any(value != next(iter(values.values())) for value in values.values()):
            raise _differing_values(self._item, path, self._world, ", or leave it out (... in the reference)")
        return sources

    def _error(
        self, path: str, array: ArraySpec, wanted: Box, missing: list[Box], damaged: list[_Source]
    ) -> CorruptCheckpointError:
        what = f"item {self._item!r}, {path} ({array.dtype}{list(array.shape)})"
        bad = [source for source in damaged if any(intersection(box, source.box) for box in missing)]
        if bad:
            pieces = "; ".join(
                f"piece at {s.box.start} of shape {s.box.shape}, {s.holding.holder or 'unnamed holder'}" for s in bad
            )
            text = f"{what}: the bytes held in memory don't match their crc32c ({pieces})"
            return CorruptCheckpointError(text, item=self._item, path=path, pieces=[tuple(s.box) for s in bad])
        text = f"{what}: nothing held in memory covers the box at {missing[0].start} of shape {missing[0].shape}"
        return UncoveredError(text, item=self._item, path=path, wanted=tuple(wanted), missing=[tuple(box) for box in missing])


def _differing_values(item: str, path: str, world: int, way_out: str = "") -> ItemTopologyError:
    """What each rank held for itself can't be given to processes that held none of it."""
    text = (
        f"item {item!r}, {path}: {world} processes held different values of their own, which can't be dealt out to others. "
        f"Restore with {world} processes{way_out}"
    )
    return ItemTopologyError(text, item=item, path=path, saved_processes=world)


def common_values(trees: Sequence[TreeSpec], by_rank: Sequence[Values]) -> Values:
    """The numbers and strings of a snapshot for a process that held none of them.

    Args:
        trees: of the layout.
        by_rank: `SlotTable.values` of every rank.

    Raises:
        ItemTopologyError: they differ; names the first that does.
    """
    for number, tree in enumerate(trees):
        leaves = (leaf for leaf in tree.leaves if leaf.kind in ("scalar", "string"))
        for position, leaf in enumerate(leaves):
            if len({repr(values[number][position]) for values in by_rank}) > 1:  # 1, 1.0 and True are equal, but not the same
                raise _differing_values(tree.item, shown(leaf.path), len(by_rank))
    return by_rank[0]


def _take(source: _Source, dtype: np.dtype, wanted: Box, missing: list[Box], result: np.ndarray) -> list[Box]:
    """Copy what `source` has of the missing boxes; what is missing then."""
    rest: list[Box] = []
    view = source.array(dtype)
    for box in missing:
        common = intersection(box, source.box)
        if common is None:
            rest.append(box)
            continue
        result[_slices(common, wanted.start)] = view[_slices(common, source.box.start)]
        rest.extend(difference(box, common))
    return rest


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a - o, a - o + n) for a, n, o in zip(box.start, box.shape, origin, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """The common elements, or None. Boxes of a 0-d array are always the same."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(min(i + n, j + m) for i, n, j, m in zip(a.start, a.shape, b.start, b.shape, strict=True))
    shape = tuple(high - low for low, high in zip(start, stop, strict=True))
    return Box(start, shape) if all(n > 0 for n in shape) else None


def difference(box: Box, hole: Box) -> list[Box]:
    """`box` without `hole`, which lies inside it, as at most two boxes per dimension that don't overlap."""
    rest: list[Box] = []
    start, shape = list(box.start), list(box.shape)
    for axis, (low, size) in enumerate(zip(hole.start, hole.shape, strict=True)):
        before = low - start[axis]
        after = start[axis] + shape[axis] - (low + size)
        if before:
            rest.append(Box(tuple(start), (*shape[:axis], before, *shape[axis + 1 :])))
        if after:
            rest.append(Box((*start[:axis], low + size, *start[axis + 1 :]), (*shape[:axis], after, *shape[axis + 1 :])))
        start[axis], shape[axis] = low, size
    return rest
