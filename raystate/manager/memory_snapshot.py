"""A snapshot that is still in host memory, as something to restore from: this node's arena first, other nodes' next, storage last."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from raystate.arena import SlotContent, SlotSet, finished_sets
from raystate.arena.layouts import get_layout
from raystate.arrays.holdings import BytesTaken, FarBox, Holding
from raystate.arrays.memory import MemorySource, common_values
from raystate.arrays.restore import PieceSource, ReadRequest
from raystate.core.formats.errors import CorruptCheckpointError, RaystateError
from raystate.core.formats.messages import HostId, RestoreChoice
from raystate.core.formats.own_files import common_files
from raystate.core.formats.tree import Layout, SlotTable, TreeSpec
from raystate.machine.checksum import Bytes
from raystate.machine.counts import counts
from raystate.manager.peers import FarPieces
from raystate.manager.session import Session
from raystate.orbax.step_reader import StepReader
from raystate.restored import StepContent, content_from_storage


class MemorySnapshot:
    """The pieces of (lineage, step), fetched as far as they are needed. Not thread-safe; use within one restore.

    Args:
        session: of this process.
        choice: what is restored.
        open_stored: opens the step in storage, if `choice.stored`.

    Attributes:
        world: how many ranks the snapshot has.
        own_rank: this process's rank in the snapshot; None if the snapshot is of another number of processes.
        tally: the array bytes that were taken from memory.
    """

    def __init__(self, session: Session, choice: RestoreChoice, open_stored: Callable[[], StepReader]):
        self._session = session
        self._choice = choice
        self._open_stored = open_stored
        self._holders = dict(choice.holders)
        self._peers = FarPieces(session, choice)
        self._here: dict[int, Holding] = {}
        self._far: dict[int, Holding] = {}
        self._tables: dict[int, SlotTable] = {}
        self._lost: dict[int, str] = {}  # ranks of which no host has anything, and why
        self._reader: StepReader | None = None
        self._sets: list[SlotSet] = []
        self.world = choice.world
        self.own_rank = session.rank if session.world == self.world else None
        self.tally = BytesTaken()
        for slot_set in finished_sets(session.arena_path):
            self._sets.append(slot_set)
            for slot in slot_set.slots:
                content = slot.read()
                if content is not None and content.header.id == choice.in_memory and content.header.rank not in self._here:
                    self._take(content)

    def _take(self, content: SlotContent) -> None:
        rank = content.header.rank
        table = self._tables[rank] = SlotTable.from_bytes(content.table)
        self._here[rank] = Holding(
            layout=Layout.from_bytes(get_layout(self._session.arena_path, table.layout_ref)),
            data=content.data,
            crc32c=table.crc32c,
            rank=rank,
            holder=f"rank {rank} on this node",
            hosts=self._others(rank),
        )

    def _others(self, rank: int) -> tuple[HostId, ...]:
        """The other nodes that have a rank's piece."""
        return tuple(host for host in self._holders.get(rank, ()) if host != self._session.host)

    # ------------------------------------------------------------ the small parts

    def _look_up(self, ranks: Iterable[int]) -> None:
        """Learn what these ranks' pieces are made of, unless it is known."""
        unknown = {rank: self._others(rank) for rank in ranks if rank not in self._tables and rank not in self._lost}
        if not unknown:
            return
        heads, lost = self._peers.heads(unknown)
        self._lost |= lost
        for rank, head in heads.items():
            table = self._tables[rank] = SlotTable.from_bytes(head.table)
            self._far[rank] = Holding(
                layout=Layout.from_bytes(head.layout), data=None, crc32c=table.crc32c, rank=rank, hosts=unknown[rank]
            )

    def tables(self, ranks: Iterable[int]) -> dict[int, SlotTable]:
        """All but the arrays of these ranks' pieces.

        Raises:
            CorruptCheckpointError: no host has one of them.
        """
        ranks = list(ranks)
        self._look_up(ranks)
        for rank in ranks:
            if rank in self._lost:
                step = self._choice.step
                raise CorruptCheckpointError(
                    f"no host gives what rank {rank} held of step {step}: {self._lost[rank]}", step=step, rank=rank
                )
        return {rank: self._tables[rank] for rank in ranks}

    def trees(self) -> tuple[TreeSpec, ...]:
        """The trees of arrays, if any rank's piece is known."""
        return next((holding.layout.trees for holding in [*self._here.values(), *self._far.values()]), ())

    # ------------------------------------------------------------ the arrays

    def source(self, item: str) -> PieceSource:
        """The arrays of one tree."""
        return MemorySource(
            list(self._here.values()),
            item,
            rank=self.own_rank,
            world=self.world,
            elsewhere=_Elsewhere(self, item),
            reader=self._session.rank,
            tally=self.tally,
        )

    def farther(self) -> Iterator[Sequence[Holding]]:
        """What other nodes hold: first of this process's own rank, then of all."""
        given = set(self._here)
        for ranks in ([] if self.own_rank is None else [self.own_rank], range(self.world)):
            self._look_up(ranks)
            more = [rank for rank in ranks if rank in self._far and rank not in given]
            given |= set(more)
            yield [self._far[rank] for rank in more]

    def fetch(self, boxes: Sequence[FarBox]) -> Iterator[tuple[int, Bytes | RaystateError]]:
        """See `arrays.holdings.Elsewhere`."""
        return self._peers.fetch(boxes)

    def rest(self) -> bool:
        """See `arrays.holdings.Elsewhere`."""
        return self._peers.rest()

    # ------------------------------------------------------------ the same step in storage

    @property
    def stored(self) -> StepContent | None:
        """The same step in storage; None: it is not there."""
        return self._stored if self._choice.stored else None

    @functools.cached_property
    def _stored(self) -> StepContent:
        self._reader = self._open_stored()
        return content_from_storage(self._reader, self._choice.step)

    def used_tier(self) -> str:
        """The slowest tier that reading has needed so far."""
        return "storage" if self._reader is not None else "peer" if self.tally.peer else "memory"

    def bytes_from(self) -> dict[str, int]:
        """Array bytes by tier."""
        stored = self._reader.bytes_read if self._reader is not None else 0
        return {"memory": self.tally.memory, "peer": self.tally.peer, "storage": stored}

    def close(self) -> None:
        """Unmap this node's slots. The arrays made from them are copies."""
        counts.add("read_bytes/memory", self.tally.memory)
        counts.add("read_bytes/peer", self.tally.peer)
        self._here.clear()
        for slot_set in self._sets:
            slot_set.close()


class _Elsewhere:
    """See `arrays.holdings.Elsewhere`: for one item of a snapshot."""

    def __init__(self, snapshot: MemorySnapshot, item: str):
        self._snapshot = snapshot
        self._item = item
        self._more = snapshot.farther()
        self.fetch = snapshot.fetch
        self.rest = snapshot.rest

    def holdings(self) -> Sequence[Holding] | None:
        return next(self._more, None)

    def stored(self, requests: Sequence[ReadRequest]) -> list[np.ndarray] | None:
        content = self._snapshot.stored
        if content is None:
            return None
        memory = next(tree for tree in self._snapshot.trees() if tree.item == self._item)
        return _Renumbered(content.source(self._item), memory, content.trees[self._item]).read(requests)


class _Renumbered:
    """A PieceSource of a tree, for requests that number its leaves as another description of the same tree does."""

    def __init__(self, source: PieceSource, given: TreeSpec, own: TreeSpec):
        numbers = {leaf.name: number for number, leaf in enumerate(own.leaves)}
        self._source = source
        self.lends = source.lends
        self._number = {number: numbers.get(leaf.name, -1) for number, leaf in enumerate(given.leaves)}

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        """See `PieceSource.read`."""
        return self._source.read([request._replace(leaf=self._number[request.leaf]) for request in requests])


# ---------------------------------------------------------------- a step to restore from


def content_from_memory(snapshot: MemorySnapshot, choice: RestoreChoice) -> StepContent:
    """The step of a snapshot. Pieces that no host has in memory come from storage, if it has them.

    Raises:
        CorruptCheckpointError: something is nowhere.
    """
    every, own = range(snapshot.world), snapshot.own_rank
    try:
        tables = snapshot.tables([0, own] if own is not None else every)
    except CorruptCheckpointError:
        stored = snapshot.stored
        if stored is None:
            raise
        return _with_arrays_of(snapshot, stored)
    first, trees = tables[0], snapshot.trees()
    values = tables[own].values if own is not None else common_values(trees, [table.values for table in tables.values()])
    iterators = {own: tables[own]} if own is not None else tables
    return StepContent(
        step=choice.step,
        tier="memory",
        trees={tree.item: tree.with_values(row) for tree, row in zip(trees, values, strict=True)},
        source=snapshot.source,
        iterator_states=lambda item: ({rank: table.iterators[item] for rank, table in iterators.items()}, snapshot.world),
        iterators=tuple(first.iterators),
        files=lambda item: _files(snapshot, item),
        file_items=tuple(first.files),
        json_items=first.json_items,
        metrics=first.metrics,
        custom=first.custom,
        used_tier=snapshot.used_tier,
        bytes_from=snapshot.bytes_from,
    )


def _files(snapshot: MemorySnapshot, item: str) -> dict[str, bytes]:
    try:
        tables = snapshot.tables(range(snapshot.world))
    except CorruptCheckpointError:
        if snapshot.stored is None:
            raise
        return snapshot.stored.files(item)
    return common_files(item, {rank: table.files[item] for rank, table in tables.items()})


def _with_arrays_of(snapshot: MemorySnapshot, stored: StepContent) -> StepContent:
    """A step in storage, with the arrays of the same snapshot as far as these are in memory."""
    held = {tree.item: tree for tree in snapshot.trees()}

    def source(item: str) -> PieceSource:
        if item not in held:
            return stored.source(item)
        return _Renumbered(snapshot.source(item), stored.trees[item], held[item])

    return dataclasses.replace(stored, source=source, used_tier=snapshot.used_tier, bytes_from=snapshot.bytes_from)
