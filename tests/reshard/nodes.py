"""Nodes that hold a snapshot, in this process, and how trainers in other processes ask them: HostActors without Ray."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raystate.arena import HostArena, TrainerArena
from raystate.arena.layouts import layout_name, put_layout
from raystate.config.state_config import StateConfig
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.messages import Copy, HostId, RestoreChoice, Staged, TrainerWord
from raystate.core.formats.tree import Layout, SlotTable
from raystate.core.formats.words import trainer_word_to_json
from raystate.inspection import open_step
from raystate.manager.memory_snapshot import MemorySnapshot, content_from_memory
from raystate.restored import ReadOptions, Restored
from raystate.runtime.host.loop import HostLoop
from raystate.runtime.link import HostCall, Unreachable
from raystate.runtime.parts import PieceBoxes
from raystate.storage import open_storage
from tests.cluster.training import wait_for

LINE = "1.1.n"
STEP = 1
KEY = b"reshard"


class Share(NamedTuple):
    """What one rank staged."""

    layout: bytes
    table: bytes
    data: np.ndarray


def arena_of(root: Path, host: str) -> Path:
    return root / f"raystate-0-{host}"


class Nodes:
    """One node for each rank of the snapshot. With `copies`, each one's neighbour has a copy of its piece.

    Args:
        root: for the arenas, in shared memory.
        shares: by rank.
        stored: a run's directory in which the same snapshot is step 1; None: it is not durable.
    """

    def __init__(self, root: Path, shares: Sequence[Share], *, copies: bool = False, stored: str | None = None):
        self.root = root
        self.stored = stored
        self.shares = shares
        self.world = len(shares)
        self.loops: dict[HostId, HostLoop] = {}
        self.silent: set[HostId] = set()
        self.garbling: set[HostId] = set()  # whose answers are damaged on the way
        self.given: Counter[HostId] = Counter()  # array bytes
        self._lock = threading.Lock()
        self._listener = Listener(str(root / "nodes"), "AF_UNIX", backlog=64, authkey=KEY)
        for rank in range(self.world):
            self._start(HostId(f"node{rank}"))
        for rank, share in enumerate(shares):
            self._stage(rank, share)
        if copies and self.world > 1:
            for rank in range(self.world):
                self._copy(rank, HostId(f"node{(rank + 1) % self.world}"))
        threading.Thread(target=self._accept, daemon=True).start()

    def _start(self, host: HostId) -> None:
        arena = HostArena.open(
            arena_of(self.root, host), run="r", storage="s", node_id=host, cap_bytes=10**9, memory_threshold=None
        )
        storage = open_storage(str(self.root / "storage"))
        self.loops[host] = HostLoop(
            arena=arena, storage=storage, host=host, incarnation=os.urandom(4).hex(), tell=lambda _: None, peers=self
        )

    def _stage(self, rank: int, share: Share) -> None:
        loop = self.loops[HostId(f"node{rank}")]
        size, trainer = share.data.nbytes, f"t{rank}"
        path, _ = loop.allot(
            incarnation=trainer, rank=rank, pid=os.getpid(), data_bytes=size, table_bytes=len(share.table), buffer_bytes=0, slots=1
        )
        arena = TrainerArena.attach(Path(path), trainer=trainer)
        put_layout(loop.arena.path, share.layout, slot_set=arena.path)
        slot = arena.slots[0]
        slot.begin()
        slot.data_mut[:size] = share.data
        shape = Layout.from_bytes(share.layout).global_hash()
        header = Staged(
            lineage=LINE, step=STEP, rank=rank, world=self.world, layout=shape, promised=False, nbytes=size
        )  # fmt: skip
        slot.commit(header, share.table)
        word = TrainerWord(lineage=LINE, rank=rank, world=self.world, number=1, newest_step=STEP, done=(0, 0, 0))
        arena.trainer_cell.write(trainer_word_to_json(word))
        loop.turn()
        arena.close()

    def _copy(self, rank: int, to: HostId) -> None:
        loop = self.loops[to]
        loop.order(Copy(host=to, lineage=LINE, step=STEP, pieces=((rank, HostId(f"node{rank}")),), attempt=1, seq=rank + 1))
        wait_for(lambda: any(staged.rank == rank for _, _, staged in loop.contents()), f"the copy of rank {rank}")

    def call(self, host: HostId, method: str, timeout_s: float, request: dict[str, Any]) -> Any:
        """See `runtime.copying.Peers`."""
        del timeout_s
        return getattr(self.loops[host].serving, method)(**request)

    def holders(self) -> tuple[tuple[int, tuple[HostId, ...]], ...]:
        """As a Coordinator would say it."""
        found: dict[int, list[HostId]] = {rank: [] for rank in range(self.world)}
        for host, loop in self.loops.items():
            for _, _, staged in loop.contents():
                found[staged.rank].append(host)
        return tuple((rank, tuple(sorted(hosts))) for rank, hosts in found.items())

    def lose(self, host: str) -> None:
        """The node is gone with its memory."""
        self.loops.pop(HostId(host)).close(remove_arena=True)

    def order(self) -> dict[str, Any]:
        """What the trainers that restore are told."""
        there = sorted(self.loops)
        return {"do": "reshard", "root": str(self.root), "nodes": there, "holders": self.holders(), "stored": self.stored}

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        while True:
            try:
                host, method, kwargs = connection.recv()
            except (EOFError, OSError):
                return
            loop = self.loops.get(host)
            answer: Any = None
            if loop is not None and host not in self.silent:
                try:
                    answer = getattr(loop.serving, method)(**kwargs)
                except RaystateError as error:
                    answer = error
            if isinstance(answer, PieceBoxes):
                with self._lock:
                    self.given[host] += answer.data.nbytes
                if host in self.garbling:
                    answer.data[0] ^= 1
            connection.send(answer)

    def close(self) -> None:
        self._listener.close()
        for host in list(self.loops):
            self.lose(host)


# ---------------------------------------------------------------- a trainer's side


class Link:
    """Calls of `Nodes` from another process; see `runtime.link.Link`."""

    def __init__(self, root: Path):
        self._connection = Client(str(root / "nodes"), "AF_UNIX", authkey=KEY)

    def clock(self) -> float:
        return time.monotonic()

    def rest(self, seconds: float) -> None:
        time.sleep(seconds)

    def call_hosts(self, calls: Sequence[HostCall], timeout_s: float) -> Iterator[tuple[int, Any]]:
        del timeout_s
        for index, call in enumerate(calls):
            self._connection.send(tuple(call))
            answer = self._connection.recv()
            yield index, Unreachable("nobody is there") if answer is None else answer

    def close(self) -> None:
        self._connection.close()


class Session:
    """As much of a trainer's session as reading a snapshot needs."""

    def __init__(self, order: dict[str, Any], rank: int, world: int):
        nodes = order["nodes"]
        self.rank, self.world = rank, world
        self.host = HostId(nodes[rank % len(nodes)])
        self.arena_path = arena_of(Path(order["root"]), self.host)
        self.config = StateConfig(storage=order["root"], run="r", host_timeout_s=0.2)
        self.link = Link(Path(order["root"]))


def restore(order: dict[str, Any], reference: Any, rank: int, world: int) -> Restored:
    """This process's part of the snapshot."""
    session = Session(order, rank, world)
    holders = tuple((old, tuple(HostId(host) for host in hosts)) for old, hosts in order["holders"])
    choice = RestoreChoice(
        tier="memory",
        step=STEP,
        begins="1.2.n",
        lineage=LINE,
        holders=holders,
        world=len(holders),
        stored=order["stored"] is not None,
    )
    snapshot = MemorySnapshot(session, choice, lambda: open_step(open_storage(order["stored"]), STEP))  # type: ignore[arg-type]
    try:
        content = content_from_memory(snapshot, choice)
        return content.restore(reference, None, ReadOptions(), world=world, process_index=rank)
    finally:
        snapshot.close()
        session.link.close()


def share_of(layout: Layout, table: SlotTable, data: np.ndarray) -> Share:
    """What a slot would hold of it."""
    raw = layout.to_bytes()
    return Share(raw, dataclasses.replace(table, layout_ref=layout_name(raw)).to_bytes(), data)
