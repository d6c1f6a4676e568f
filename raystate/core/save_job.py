"""One durable save, from the snapshot that is due to its commit."""

from __future__ import annotations

from typing import Literal

from raystate.core.messages import HostId, Packaged, SaveId, SnapshotId, Write

Steps = frozenset[int]


class Job:
    """One snapshot on its way to storage."""

    __slots__ = (
        "due_s", "gives_way", "hosts", "kept", "key", "next_s", "orders", "packaged", "phase", "promised", "refused", "save", "started_s",
        "told_s", "tries", "waiting", "why",
    )  # fmt: skip

    def __init__(self, key: SnapshotId, now_s: float, why: str, *, promised: bool):
        self.key = key
        self.why = why
        self.promised = promised  # save() has returned True for it
        self.due_s = now_s
        self.next_s = now_s
        self.started_s = now_s
        self.tries = 0
        self.gives_way = False  # its snapshot may have been overwritten
        self.phase: Literal["queued", "writing", "packaging", "committing"] = "queued"
        self.save = SaveId("")
        self.hosts: tuple[HostId, ...] = ()
        self.waiting: set[HostId] = set()
        self.packaged: Packaged | None = None
        self.orders: tuple[Write, ...] = ()
        self.told_s = now_s
        self.refused = ""
        self.kept: Steps | None = None  # `Saves._kept` when its commit is in the log
