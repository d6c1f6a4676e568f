"""A snapshot that is still in host memory, as something to restore from: this node's arena first, other nodes' HostActors next."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence

import numpy as np

from raystate.arena import SlotContent, SlotHeader, SlotSet, finished_sets
from raystate.arena.layouts import get_layout
from raystate.arrays import Holding, MemorySource, PieceSource, ReadRequest, common_values
from raystate.core.errors import CorruptCheckpointError
from raystate.core.messages import HostId, RestoreChoice, SnapshotId
from raystate.core.own_files import common_files
from raystate.core.tree import Layout, SlotTable
from raystate.manager.session import Session
from raystate.restored import StepContent
from raystate.runtime.parts import RankData


class MemorySnapshot:
    """The pieces of (lineage, step), fetched as far as they are needed. Not thread-safe; use within one restore."""

    def __init__(self, session: Session, choice: RestoreChoice):
        self._session = session
        self._choice = choice
        self._host_of = dict(choice.hosts)
        self._holdings: dict[int, Holding] = {}
        self._tables: dict[int, SlotTable] = {}
        self._sets: list[SlotSet] = []
        self.used_peer = False
        for slot_set in finished_sets(session.arena_path):
            self._sets.append(slot_set)
            for slot in slot_set.slots:
                content = slot.read()
                if content is not None and _id_of(content.header) == choice.base and content.header.rank not in self._holdings:
                    self._take(content)

    def _take(self, content: SlotContent) -> None:
        rank = content.header.rank
        table = SlotTable.from_bytes(content.table)
        layout = Layout.from_bytes(get_layout(self._session.arena_path, table.layout_ref))
        self._tables[rank] = table
        self._holdings[rank] = Holding(
            layout=layout, data=content.data, crc32c=table.crc32c, rank=rank, holder=f"rank {rank} on this node"
        )

    def _fetch(self, rank: int, *, with_data: bool) -> None:
        host = HostId(self._host_of[rank])
        got: RankData = self._session.call_host(
            "fetch",
            timeout_s=self._session.config.restore_timeout_s,
            host=host,
            lineage=self._choice.lineage,
            step=self._choice.step,
            again=self._choice.again,
            rank=rank,
            with_data=with_data,
        )
        self.used_peer = self.used_peer or with_data
        table = self._tables[rank] = SlotTable.from_bytes(got.table)
        layout = Layout.from_bytes(got.layout)
        if got.data is not None:
            self._holdings[rank] = Holding(
                layout=layout, data=got.data, crc32c=table.crc32c, rank=rank, holder=f"rank {rank} on node {host[:8]}"
            )
        self._layouts[rank] = layout

    @functools.cached_property
    def _layouts(self) -> dict[int, Layout]:
        return {rank: holding.layout for rank, holding in self._holdings.items()}

    def table(self, rank: int) -> SlotTable:
        if rank not in self._tables:
            self._fetch(rank, with_data=False)
        return self._tables[rank]

    def layout(self, rank: int) -> Layout:
        if rank not in self._layouts:
            self._fetch(rank, with_data=False)
        return self._layouts[rank]

    @property
    def world(self) -> int:
        """How many ranks the snapshot has."""
        return len(self._host_of)

    @property
    def own_rank(self) -> int | None:
        """This process's rank in the snapshot; None if the snapshot is of another number of processes."""
        return self._session.rank if self._session.world == self.world and self._session.rank in self._host_of else None

    def local(self) -> list[Holding]:
        return list(self._holdings.values())

    def everything(self) -> list[Holding]:
        """All ranks' pieces, other nodes' too."""
        for rank in sorted(set(self._host_of) - set(self._holdings)):
            self._fetch(rank, with_data=True)
        return list(self._holdings.values())

    def close(self) -> None:
        """Unmap this node's slots. The arrays made from them are copies."""
        self._holdings.clear()
        for slot_set in self._sets:
            slot_set.close()


def _id_of(header: SlotHeader) -> SnapshotId:
    return SnapshotId(header.lineage, header.step, header.again)


class _LocalFirst:
    """A PieceSource that goes to other nodes only for what this node's arena doesn't cover."""

    def __init__(self, snapshot: MemorySnapshot, item: str):
        self._snapshot = snapshot
        self._item = item

    def read(self, requests: Sequence[ReadRequest]) -> list[np.ndarray]:
        rank, world = self._snapshot.own_rank, self._snapshot.world
        local = self._snapshot.local()
        if local:
            # Not covered, or damaged here: another node may hold it, intact.
            with contextlib.suppress(CorruptCheckpointError):
                return MemorySource(local, self._item, rank=rank, world=world).read(requests)
        return MemorySource(self._snapshot.everything(), self._item, rank=rank, world=world).read(requests)


def content_from_memory(snapshot: MemorySnapshot, choice: RestoreChoice) -> StepContent:
    ranks = sorted(rank for rank, _ in choice.hosts)
    first = snapshot.table(ranks[0])
    layout = snapshot.layout(ranks[0])
    if snapshot.own_rank is not None:
        values = snapshot.table(snapshot.own_rank).values
    else:
        values = common_values(layout.trees, [snapshot.table(rank).values for rank in ranks])
    trees = {tree.item: tree.with_values(row) for tree, row in zip(layout.trees, values, strict=True)}

    def source(item: str) -> PieceSource:
        return _LocalFirst(snapshot, item)

    def iterator_states(item: str) -> tuple[dict[int, bytes], int]:
        return {rank: snapshot.table(rank).iterators[item] for rank in ranks}, len(ranks)

    return StepContent(
        step=choice.step,
        tier="memory",
        trees=trees,
        source=source,
        iterator_states=iterator_states,
        iterators=tuple(first.iterators),
        files=lambda item: common_files(item, {rank: snapshot.table(rank).files[item] for rank in ranks}),
        file_items=tuple(first.files),
        json_items=first.json_items,
        metrics=first.metrics,
        custom=first.custom,
        used_tier=lambda: "peer" if snapshot.used_peer else "memory",
    )
