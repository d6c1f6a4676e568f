"""What the hosts hold in memory: which snapshots are complete, and which steps cannot become complete any more.

A host's report replaces the one before it, so a lost report costs nothing. Pieces are indexed by (lineage, step): a report changes
only what differs from the host's last one.
"""

from __future__ import annotations

from collections.abc import Callable

from raystate.core.messages import HostId, HostSummary, Invalidate, Proposal, Staged, TrainerSeen
from raystate.core.slots import lineage_order

Key = tuple[str, int]
"""(lineage, step) of a snapshot."""


class HostView:
    """The last that is known of one host."""

    __slots__ = (
        "advised",
        "back_until_s",
        "base_order",
        "heard_of",
        "heard_s",
        "host",
        "incarnation",
        "past",
        "proposal_seen",
        "reported_s",
        "sent",
        "sent_s",
        "sent_seq",
        "staged",
        "summary_seq",
        "told_base_s",
        "trainers",
        "up",
        "why_down",
    )  # fmt: skip

    def __init__(self, host: HostId, now_s: float):
        self.host = host
        self.incarnation = ""
        self.past: dict[str, int] = {}  # replaced incarnations, each with the newest report number seen
        self.up = True
        self.why_down = ""
        self.back_until_s = -1e9  # down with its pieces, but expected back until then
        self.heard_s = now_s
        self.summary_seq = -1
        self.staged: tuple[Staged, ...] = ()
        self.trainers: tuple[TrainerSeen, ...] = ()
        self.reported_s: float | None = None  # when its last report came in, None before the first of this incarnation
        self.advised: tuple[int, int] | None = None
        self.proposal_seen: Proposal | None = None
        self.heard_of: int | None = None  # newest attempt that the host knows of
        self.sent: object = None  # content of the last Advice given to it
        self.sent_seq = -1
        self.sent_s = -1e9
        self.base_order: tuple[int, int] = (-1, -1)  # newest Invalidate it has applied
        self.told_base_s = -1e9


class Snap:
    """The pieces of one snapshot."""

    __slots__ = ("complete", "durable", "lineage", "order", "pieces", "step")

    def __init__(self, lineage: str, step: int):
        self.lineage = lineage
        self.step = step
        self.order = lineage_order(lineage)
        self.pieces: dict[int, dict[HostId, Staged]] = {}
        self.complete = False
        self.durable = False

    def refresh(self) -> None:
        """Complete: every rank of one world, all with the same layout."""
        pieces = self.pieces
        first: Staged | None = None
        self.complete = self.durable = False
        durable = True
        for held in pieces.values():
            for piece in held.values():
                if first is None:
                    first = piece
                elif piece.layout != first.layout or piece.world != first.world:
                    return
                durable = durable and piece.durable
        if first is not None and len(pieces) == first.world:
            self.complete = True
            self.durable = durable

    @property
    def world(self) -> int:
        for held in self.pieces.values():
            for piece in held.values():
                return piece.world
        return 0

    def homes(self, preferred: dict[int, HostId]) -> dict[int, HostId]:
        """rank -> a host that holds its piece; the rank's own host if that has it."""
        homes: dict[int, HostId] = {}
        for rank in sorted(self.pieces):
            held = self.pieces[rank]
            own = preferred.get(rank)
            homes[rank] = own if own is not None and own in held else min(held)
        return homes


class Memory:
    """Hosts and the index of their pieces. `changed` collects the snapshots that a report touched."""

    def __init__(self) -> None:
        self.hosts: dict[HostId, HostView] = {}
        self.snaps: dict[Key, Snap] = {}
        self.base: Invalidate | None = None  # the newest recovery decision that is known

    # ---------------------------------------------------------------- hosts come and go

    def view(self, host: HostId, now_s: float) -> HostView:
        view = self.hosts.get(host)
        if view is None:
            view = self.hosts[host] = HostView(host, now_s)
        return view

    def incarnate(self, view: HostView, incarnation: str, seq: int, now_s: float, patience_s: float) -> bool | None:
        """Note which incarnation speaks. True: a new one; False: the known one; None: one that has been replaced.

        A late message of a dead incarnation may arrive after the first of its successor, and a Coordinator that has just started
        cannot tell which is which. The dead one falls silent: then the other is believed again.
        """
        if incarnation == view.incarnation:
            return False
        if incarnation in view.past and not (seq > view.past[incarnation] and now_s - view.heard_s >= patience_s):
            view.past[incarnation] = max(seq, view.past[incarnation])
            return None
        if view.incarnation:
            view.past[view.incarnation] = view.summary_seq
        view.incarnation = incarnation
        view.summary_seq = view.past.pop(incarnation, -1)
        view.reported_s = None
        view.sent = None
        view.advised = None
        view.trainers = ()  # with the pieces: what the old one said of them would look like steps that they have skipped
        return True

    def forget(self, view: HostView, why: str) -> None:
        """The host is down: its pieces cannot be read. They count again when it reports them again."""
        self.place(view, ())
        view.up = False
        view.why_down = why
        view.reported_s = None
        view.sent = None
        view.trainers = ()

    def place(self, view: HostView, staged: tuple[Staged, ...]) -> list[Snap]:
        """Replace the host's pieces; gives the snapshots that changed."""
        old = view.staged
        touched: dict[Key, Snap] = {}
        for piece in old:
            if piece not in staged:
                snap = self.snaps.get((piece.lineage, piece.step))
                if snap is not None and piece.rank in snap.pieces:
                    held = snap.pieces[piece.rank]
                    held.pop(view.host, None)
                    if not held:
                        del snap.pieces[piece.rank]
                    touched[piece.lineage, piece.step] = snap
        for piece in staged:
            if piece not in old:
                key = (piece.lineage, piece.step)
                snap = self.snaps.get(key)
                if snap is None:
                    snap = self.snaps[key] = Snap(piece.lineage, piece.step)
                snap.pieces.setdefault(piece.rank, {})[view.host] = piece
                touched[key] = snap
        view.staged = staged
        for key, snap in touched.items():
            if not snap.pieces:
                del self.snaps[key]
            snap.refresh()
        return list(touched.values())

    def take(self, view: HostView, summary: HostSummary, now_s: float) -> list[Snap]:
        """A report of the known incarnation, newer than the last."""
        view.summary_seq = summary.seq
        view.heard_s = view.reported_s = now_s
        view.advised = summary.advised
        view.proposal_seen = summary.proposal
        view.heard_of = summary.attempt
        if summary.base is not None:
            order = (summary.base.attempt, summary.base.seq)
            if order > view.base_order:
                view.base_order = order
            if self.base is None or order > (self.base.attempt, self.base.seq):
                self.base = summary.base
        view.trainers = summary.trainers
        if summary.staged == view.staged:
            return []
        return self.place(view, summary.staged)

    # ---------------------------------------------------------------- what can be recovered

    def believed(self, lineage: str, step: int) -> bool:
        """False for what a recovery decision has discarded, although some host that was away may still hold it."""
        base = self.base
        if base is None or not base.by:
            return True
        return lineage_order(lineage) >= lineage_order(base.by) or (lineage == base.lineage and step <= base.step)

    def complete(self, key: Key) -> Snap | None:
        snap = self.snaps.get(key)
        return snap if snap is not None and snap.complete and self.believed(*key) else None

    def candidates(self) -> list[Snap]:
        """Complete and believed snapshots, best first: the newest lineage that has one, then the newest step.

        A lineage that has a complete snapshot had recovered before it: what older lineages hold beyond that was given up.
        """
        found = [snap for snap in self.snaps.values() if snap.complete and self.believed(snap.lineage, snap.step)]
        if len(found) > 1:
            found.sort(key=_newest_first, reverse=True)
        return found

    def missing_text(self, key: Key, where: Callable[[list[int]], str]) -> str:
        """Why a snapshot is not complete, for messages. `where` names ranks with their hosts."""
        snap = self.snaps.get(key)
        if snap is None:
            return f"no host holds a piece of step {key[1]}"
        world = snap.world
        missing = [rank for rank in range(world) if rank not in snap.pieces]
        if missing:
            return f"step {key[1]} was not staged by {where(missing)}"
        return f"the pieces of step {key[1]} differ in layout" if not snap.complete else f"step {key[1]} is complete"


def _newest_first(snap: Snap) -> tuple[tuple[int, int, str], int]:
    return (snap.order, snap.step)
