"""One durable save, from the snapshot that is due to its commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raystate.core.coordinator.memory import Snap
from raystate.core.formats.commands import Write
from raystate.core.formats.events import Packaged
from raystate.core.formats.names import HostId, SaveId, SnapshotId

Steps = frozenset[int]
_NO_SAVE = SaveId("")


@dataclass(slots=True, eq=False)
class Job:
    """One snapshot on its way to storage."""

    key: SnapshotId
    why: str
    promised: bool  # save() has returned True for it
    due_s: float
    next_s: float  # not begun before
    phase: Literal["queued", "writing", "packaging", "committing"] = "queued"
    tries: int = 0
    gives_way: bool = False  # its snapshot may be overwritten
    refused: str = ""  # why it may not be committed yet
    first_s: float = 0.0  # when it was first begun
    # Of the newest try:
    save: SaveId = _NO_SAVE
    started_s: float = 0.0
    orders: tuple[Write, ...] = ()  # by host
    told_s: float = 0.0  # when they were given last
    moved: dict[str, int] = field(default_factory=dict[str, int])  # bytes written, by host
    waiting: set[HostId] = field(default_factory=set[HostId])  # hosts that have not written
    packaged: Packaged | None = None
    kept: Steps | None = None  # `Saves._kept` when its commit is in the log

    def begin(self, save: SaveId, snap: Snap, hosts: Mapping[int, HostId], now_s: float) -> None:
        """Begin a try: each rank's piece is written by its own host (`hosts`), if that has it."""
        by_host: dict[HostId, list[int]] = {}
        for rank in sorted(snap.pieces):
            by_host.setdefault(snap.home(rank, hosts.get(rank)), []).append(rank)
        self.save, self.phase, self.tries = save, "writing", self.tries + 1
        self.started_s = self.told_s = now_s
        self.first_s = now_s if self.tries == 1 else self.first_s
        self.waiting, self.moved = set(by_host), {}
        self.orders = tuple(
            Write(host=host, save=save, lineage=snap.lineage, step=snap.step, ranks=tuple(ranks))
            for host, ranks in sorted(by_host.items())
        )

    def moves(self, host: str, done_bytes: int) -> bool:
        """Whether that host has written more than it had said before."""
        before, self.moved[host] = self.moved.get(host, 0), max(done_bytes, self.moved.get(host, 0))
        return done_bytes > before
