"""Boxes of arrays out of the memory of one or more nodes, of any sharding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raystate.arrays.holdings import BytesTaken, Elsewhere, FarBox, Holding
from raystate.arrays.paths import shown
from raystate.arrays.restore import ReadRequest
from raystate.core.formats.boxes import Box, intersection, slices
from raystate.core.formats.errors import CorruptCheckpointError, ItemTopologyError, RaystateError, StepNotFoundError
from raystate.core.formats.names import HostId
from raystate.core.formats.tree import ArraySpec, LeafSpec, Piece, TreeSpec
from raystate.core.trainer.sharing import HERE, HeldPiece, Missing, Take, WantedBox, share_out
from raystate.machine.aligned import aligned
from raystate.machine.checksum import crc32c
from raystate.machine.threads import in_threads

Values = tuple[tuple[int | float | bool | str | None, ...], ...]  # SlotTable.values

FETCH_BYTES = 16 << 20  # of one array in one go


class UncoveredError(CorruptCheckpointError):
    """The holdings at hand don't have all of a box; nothing that they have is damaged."""


class _Source:
    """A piece of a holding; its checksum is looked at when it is first used here, once."""

    __slots__ = ("_intact", "box", "expected", "holding", "index", "piece")

    def __init__(self, holding: Holding, index: int):
        self.holding = holding
        self.index = index
        self.piece: Piece = holding.layout.pieces[index]
        self.expected = holding.crc32c[index]
        self.box = Box(self.piece.start, self.piece.shape)
        self._intact: bool | None = None

    def intact(self) -> bool:
        if self._intact is None:
            data, end = self._data, self.piece.offset + self.piece.nbytes
            self._intact = end <= data.nbytes and crc32c(self._bytes()) == self.expected
        return self._intact

    @property
    def _data(self) -> np.ndarray:
        assert self.holding.data is not None, "it is on this node"
        return self.holding.data

    def _bytes(self) -> np.ndarray:
        return self._data[self.piece.offset : self.piece.offset + self.piece.nbytes]

    def array(self, dtype: np.dtype) -> np.ndarray:
        view = self._bytes().view(dtype).reshape(self.piece.shape)
        view.flags.writeable = False
        return view

    def held(self, useless: set[tuple[HostId, int, int]]) -> HeldPiece:
        """Who may be asked for it."""
        rank = self.holding.rank
        hosts = (HERE, *self.holding.hosts) if self.holding.data is not None else self.holding.hosts
        use = tuple(
            host for host in hosts if not useless & {(host, rank, self.index), (host, rank, _ALL), (host, _ALL, _ALL)}
        )  # fmt: skip
        return HeldPiece(self.box, rank, self.index, use)


_ALL = -1
_LARGE_BYTES = 128 << 10  # the checksum of so much lets other threads run


class MemorySource:
    """A PieceSource over one item of a snapshot in memory.

    A box within one piece of this node is returned as a read-only view of the slot; another is put
    together in memory of its own. Boxes missing or damaged here are taken from other nodes, in turn
    if one fails; else from storage, if it has the same bytes. Of an array that each rank held for
    itself (`ArraySpec.local`), a rank gets its own value; one without gets any, if all are equal.

    Args:
        holdings: of different ranks, on this node.
        item: of the layouts' trees.
        rank: whose values the arrays are to have that each rank held for itself; None: of no one in particular.
        world: how many ranks the snapshot has; None: as many as there are holdings.
        elsewhere: what else can be had; None: nothing.
        reader: rank of this process, which says with which of several nodes it begins.
        tally: counts what is taken.
    """

    lends = True

    def __init__(
        self,
        holdings: Sequence[Holding],
        item: str,
        *,
        rank: int | None = None,
        world: int | None = None,
        elsewhere: Elsewhere | None = None,
        reader: int = 0,
        tally: BytesTaken | None = None,
    ):
        self._item = item
        self._rank = rank
        self._world = len(holdings) if world is None else world
        self._elsewhere = elsewhere
        self._has_looked = elsewhere is None
        self._reader = reader
        self._tally = tally or BytesTaken()
        self._load: dict[HostId, int] = {}
        # (host, rank, piece or _ALL): not again.
        self._useless: set[tuple[HostId, int, int]] = set()
        self._failures: dict[tuple[HostId, int, int], str] = {}
        self._sources: dict[int, list[_Source]] = {}  # by leaf
        self._source: dict[tuple[int, int], _Source] = {}  # by rank and piece
        self._tree: TreeSpec | None = None
        self._add(holdings)

    def _add(self, holdings: Sequence[Holding]) -> None:
        for holding in holdings:
            for number, tree in enumerate(holding.layout.trees):
                if tree.item != self._item:
                    continue
                self._tree = self._tree or tree
                for index, piece in enumerate(holding.layout.pieces):
                    if piece.tree == number:
                        source = self._source[holding.rank, index] = _Source(holding, index)
                        self._sources.setdefault(piece.leaf, []).append(source)

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        """The boxes, in order.

        Raises:
            UncoveredError: a part of a box is in no holding. CorruptCheckpointError: it is only in damaged pieces.
            ItemTopologyError: ranks held different values of an array of their own, and this one held none.
        """
        reading = _Reading(requests)
        rest = self._lend(reading)
        while rest:
            if self._tree is None:
                rest = self._look_elsewhere(reading, rest)
                continue
            takes, missing = self._plan(reading, rest)
            rest = self._take(reading, takes)
            rest += self._look_elsewhere(reading, missing) if missing else []
        return [reading.result(number, self._leaf(one.leaf)[1]) for number, one in enumerate(requests)]

    def _lend(self, reading: _Reading) -> list[Missing]:
        """Small boxes that are just what this node has are given where they lie, if they are intact; what is left. It is what the rest
        of this class would come to, but there may be ten thousand of them."""
        rest: list[Missing] = []
        for number, (leaf, start, shape) in enumerate(reading.requests):
            box = Box(tuple(start), tuple(shape))
            source = next((one for one in self._sources.get(leaf, ()) if one.holding.data is not None and one.box == box), None)
            if source is None or source.piece.nbytes > _LARGE_BYTES or self._leaf(leaf)[1].local or not source.intact():
                rest.append(Missing(number, box))
                continue
            view = source.array(np.dtype(self._leaf(leaf)[1].dtype))
            reading.lend(number, view)
            self._tally.memory += view.nbytes
        return rest

    def _leaf(self, leaf: int) -> tuple[LeafSpec, ArraySpec]:
        assert self._tree is not None
        found = self._tree.leaves[leaf]
        assert found.array is not None
        return found, found.array

    # ------------------------------------------------------------ who has it

    def _plan(self, reading: _Reading, rest: Sequence[Missing]) -> tuple[list[Take], list[Missing]]:
        held: dict[int, list[HeldPiece] | None] = {}
        wanted: list[WantedBox] = []
        missing: list[Missing] = []
        for number, box in rest:
            leaf = reading.requests[number].leaf
            if not box.size:
                continue  # an array without elements needs no piece
            if leaf not in held:
                held[leaf] = self._held(leaf, reading)
            pieces = held[leaf]
            if pieces is None:
                missing.append(Missing(number, box))
            else:
                itemsize = np.dtype(self._leaf(leaf)[1].dtype).itemsize
                wanted.append(WantedBox(number=number, box=box, itemsize=itemsize, held=pieces))
        takes, nowhere = share_out(wanted, rank=self._reader, most_bytes=FETCH_BYTES, load=self._load)
        return takes, missing + nowhere

    def _held(self, leaf: int, reading: _Reading) -> list[HeldPiece] | None:
        """The pieces of an array that may be used; None: it is not known yet."""
        spec, array = self._leaf(leaf)
        sources = self._sources.get(leaf, [])
        if array.local:
            try:
                sources = self._of_one_value(shown(spec.path), sources)
            except UncoveredError as error:
                reading.why[leaf] = error
                return None
        return [source.held(self._useless) for source in sources]

    def _of_one_value(self, path: str, sources: list[_Source]) -> list[_Source]:
        """The pieces that may be read of an array that each rank held for itself."""
        by_rank: dict[int, list[_Source]] = {}
        for source in sources:
            by_rank.setdefault(source.holding.rank, []).append(source)
        values = {rank: sorted((source.box, source.expected) for source in held) for rank, held in by_rank.items()}
        if self._rank in by_rank:
            own = values[self._rank]
            return [source for rank in by_rank if values[rank] == own for source in by_rank[rank]]
        if len(by_rank) < self._world:
            ranks = sorted(by_rank)
            text = f"item {self._item!r}, {path}: {self._world} ranks held values of their own, only those of {ranks} are at hand"
            raise UncoveredError(text, item=self._item, path=path)
        if any(value != next(iter(values.values())) for value in values.values()):
            raise _differing_values(self._item, path, self._world, ", or leave it out (... in the reference)")
        return sources

    # ------------------------------------------------------------ taking it

    def _take(self, reading: _Reading, takes: Sequence[Take]) -> list[Missing]:
        """Take what has been dealt out. What came to nothing is to be dealt out again, without who failed."""
        again: list[Missing] = []
        far: list[Take] = []
        parts: list[tuple[np.ndarray, np.ndarray]] = []
        self._check(takes)
        for take in takes:
            if take.host != HERE:
                far.append(take)
                continue
            source = self._source[take.held.rank, take.held.piece]
            if not source.intact():
                self._fails(take, CorruptCheckpointError(""))
                again.append(Missing(take.number, take.box))
                continue
            array = self._leaf(reading.requests[take.number].leaf)[1]
            view = source.array(np.dtype(array.dtype))
            got = view[slices(take.box, source.box.start)]
            if (place := reading.place(take.number, take.box, array)) is None:
                reading.put(take.number, take.box, got, array)
            else:
                parts.append((place, got))
            self._tally.memory += got.nbytes
        in_threads(lambda pair: np.copyto(*pair), parts, sum(got.nbytes for _, got in parts))
        if far:
            again += self._take_far(reading, far)
        return again

    def _check(self, takes: Sequence[Take]) -> None:
        """Look at the checksums of large pieces of this node, on several threads."""
        large = {
            (take.held.rank, take.held.piece): source
            for take in takes
            if take.host == HERE and (source := self._source[take.held.rank, take.held.piece]).piece.nbytes > _LARGE_BYTES
        }
        in_threads(_Source.intact, list(large.values()), sum(source.piece.nbytes for source in large.values()))

    def _take_far(self, reading: _Reading, takes: Sequence[Take]) -> list[Missing]:
        assert self._elsewhere is not None
        again: list[Missing] = []
        boxes: list[FarBox] = []
        for _, box, held, host in takes:
            piece = self._source[held.rank, held.piece].piece
            start = tuple(a - o for a, o in zip(box.start, piece.start, strict=True))
            nbytes = piece.nbytes // held.box.size * box.size
            boxes.append(FarBox(host, held.rank, held.piece, Box(start, box.shape), nbytes))
        for index, got in self._elsewhere.fetch(boxes):
            take = takes[index]
            if isinstance(got, RaystateError):
                self._fails(take, got)
                again.append(Missing(take.number, take.box))
                continue
            array = self._leaf(reading.requests[take.number].leaf)[1]
            came = got.view(np.dtype(array.dtype)).reshape(take.box.shape)
            came.flags.writeable = False  # it may share its memory with what else came
            reading.put(take.number, take.box, came, array)
            self._tally.peer += got.nbytes
            self._load[take.host] = self._load.get(take.host, 0) + got.nbytes
        return again

    def _fails(self, take: Take, error: RaystateError) -> None:
        rank, piece = take.held.rank, take.held.piece
        if isinstance(error, StepNotFoundError):
            piece = _ALL
        elif not isinstance(error, CorruptCheckpointError):
            rank = piece = _ALL
        self._useless.add((take.host, rank, piece))
        if take.host != HERE:
            self._failures[take.host, rank, piece] = f"node {take.host[:8]}: {error.message}"

    # ------------------------------------------------------------ when it is not in this node's memory

    def _look_elsewhere(self, reading: _Reading, missing: list[Missing]) -> list[Missing]:
        """Learn of more places, or read from storage; what is still to be taken then."""
        if not self._has_looked and self._elsewhere is not None:
            more = self._elsewhere.holdings()
            self._has_looked = more is None
            self._add(more or ())
            return missing
        silent = {one for one in self._useless if one[1] == _ALL}
        if silent and self._elsewhere is not None and self._elsewhere.rest():
            self._useless -= silent
            return missing
        requests = [ReadRequest(reading.requests[number].leaf, *box) for number, box in missing]
        stored = self._elsewhere.stored(requests) if self._elsewhere is not None and self._tree is not None else None
        if stored is None:
            raise self._error(reading, *missing[0])
        for (number, box), got in zip(missing, stored, strict=True):
            reading.put(number, box, got, self._leaf(reading.requests[number].leaf)[1])
        return []

    def _error(self, reading: _Reading, number: int, box: Box) -> CorruptCheckpointError:
        if self._tree is None:
            return UncoveredError(f"no holding has an item {self._item!r}", item=self._item)
        leaf = reading.requests[number].leaf
        if leaf in reading.why:
            return reading.why[leaf]
        spec, array = self._leaf(leaf)
        path = shown(spec.path)
        what = f"item {self._item!r}, {path} ({array.dtype}{list(array.shape)})"
        others = "".join(f"; {text}" for text in self._failures.values())
        bad = [
            source
            for source in self._sources.get(leaf, [])
            if (HERE, source.holding.rank, source.index) in self._useless and intersection(box, source.box)
        ]
        if bad:
            pieces = "; ".join(
                f"piece at {s.box.start} of shape {s.box.shape}, {s.holding.holder or 'unnamed holder'}" for s in bad
            )
            text = f"{what}: the bytes held in memory don't match their crc32c ({pieces}){others}"
            return CorruptCheckpointError(text, item=self._item, path=path, pieces=[tuple(s.box) for s in bad])
        request = reading.requests[number]
        text = f"{what}: nothing held in memory covers the box at {box.start} of shape {box.shape}{others}"
        wanted = (tuple(request.start), tuple(request.shape))
        return UncoveredError(text, item=self._item, path=path, wanted=wanted, missing=[tuple(box)])


class _Reading:
    """The boxes of one call of `read`, filled bit by bit."""

    def __init__(self, requests: Sequence[ReadRequest]):
        self.requests = requests
        self.why: dict[int, UncoveredError] = {}  # leaf -> why no host's value can be used yet
        self._results: dict[int, np.ndarray] = {}

    def lend(self, number: int, got: np.ndarray) -> None:
        """All of a box, where it lies."""
        self._results[number] = got

    def put(self, number: int, box: Box, got: np.ndarray, array: ArraySpec) -> None:
        """Elements of the request's box have come."""
        if (place := self.place(number, box, array)) is None:
            self._results[number] = got  # where it lies
        else:
            place[...] = got

    def place(self, number: int, box: Box, array: ArraySpec) -> np.ndarray | None:
        """Where elements of the request's box go; None: they are all of it."""
        request = self.requests[number]
        if tuple(box.shape) == tuple(request.shape):
            return None
        return self.result(number, array)[slices(box, tuple(request.start))]

    def result(self, number: int, array: ArraySpec) -> np.ndarray:
        """What has come so far."""
        if number not in self._results:
            self._results[number] = aligned(self.requests[number].shape, np.dtype(array.dtype))
        return self._results[number]


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
