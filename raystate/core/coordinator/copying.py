"""Copies of snapshots on other hosts: which snapshot is copied now, who fetches what from whom, and who is not waited for.

All hosts copy the same snapshot, the newest complete one, until it has its copies; then the next one, which is the newest by then. So
nothing queues up, and hosts of unequal speed have the same snapshot in the end. After a host is
lost, or announced to go away, the copies that go with it are made anew in the same way, of the
snapshot that a recovery would restore now.
"""

from __future__ import annotations

from collections.abc import Collection

from raystate.core.coordinator.context import Context, named
from raystate.core.coordinator.joins import Joins
from raystate.core.coordinator.memory import HostView, Memory, Snap
from raystate.core.coordinator.notices import Notices
from raystate.core.coordinator.peers import Peers, assign_peers
from raystate.core.formats.names import HostId, SnapshotId
from raystate.core.formats.orders import Copy, Invalidate
from raystate.waits import RETRY_FIRST_S

EXCUSED_FOR = 10  # times copy_timeout_s: then a host that was too slow is waited for again


class Copying:
    """Orders copies and judges whether a snapshot has enough of them.

    Attributes:
        domains: the failure domain of each host that was there at the last look.
        leaving: those of them that are to go away.
    """

    def __init__(self, context: Context, memory: Memory, joins: Joins, notices: Notices):
        self.context = context
        self.memory = memory
        self.joins = joins
        self.notices = notices
        self.domains: dict[HostId, str] = {}
        self.leaving: frozenset[HostId] = frozenset()
        self._peers: Peers = {}
        self._moves = 0  # of hosts, at the last look
        self._excused: dict[HostId, float] = {}  # hosts that are not waited for, until when
        self._told_of: set[str] = set()  # what is said once
        self._target: SnapshotId | None = None
        self._since_s = 0.0  # when it became the target
        self._ordered_s = 0.0
        self._orders: dict[HostId, Copy] = {}  # the newest of each host, for the target
        self._seq = 0
        self._lacked = 0  # a rank

    @property
    def is_on(self) -> bool:
        """Whether copies are wanted at all."""
        return self.context.settings.replicas > 0

    # ---------------------------------------------------------------- enough copies

    def is_safe(self, snap: Snap) -> bool:
        """Whether a complete snapshot has the copies that it can have now."""
        if not self.is_on:
            return True
        # From the rank that lacked one last: reports come one by one, and each asks.
        for turn in range(snap.world):
            rank = (self._lacked + turn) % snap.world
            if any(map(self.is_waited_for, self._lacking(snap, rank))):
                self._lacked = rank
                return False
        return True

    def is_waited_for(self, host: HostId) -> bool:
        """Whether snapshots wait for the copies that this host should keep."""
        return host not in self._excused and not self.memory.hosts[host].no_copies

    def _home(self, snap: Snap, rank: int) -> HostId:
        """The host whose peers have to have the piece: the rank's own, or one that has it, and stays if one does."""
        group, held = self.joins.group, snap.pieces[rank]
        own = group.hosts.get(rank) if group is not None else None
        return snap.home(rank, own if own in held else min(held.keys() - self.leaving, default=None))

    def _lacking(self, snap: Snap, rank: int) -> tuple[HostId, ...]:
        """The hosts that are still to get the rank's piece: none if others have it that are as good. A copy on a host that goes away
        counts only where its keeper is to have it all the same."""
        home = self._home(snap, rank)
        peers = self._peers.get(home, ())
        held = [host for host in snap.pieces[rank] if host == home or host in peers or host not in self.leaving]
        missing = [peer for peer in peers if peer not in held]
        too_few = len(peers) - (len(held) - 1)
        if too_few <= 0 and missing:
            domain = self.domains.get(home)
            spread = any(self.domains.get(host) != domain for host in held)
            too_few = 0 if spread or all(self.domains.get(peer) == domain for peer in peers) else 1
        return tuple(missing[: max(0, too_few)])

    def kept_beside(self, restore: Invalidate, keys: Collection[SnapshotId]) -> list[SnapshotId]:
        """The snapshot with the most copies, the newest of such, until the restored one, which is
        newer, has as many: else the loss of a host could cost both.
        (test_copies.test_what_has_its_copies_stays_until_what_was_restored_has_them)

        Args:
            restore: of what.
            keys: snapshots that stay anyway. One slot is left for new snapshots, but for the time
                in which copies are waited for.
        """
        if not self.is_on:
            return []
        held = [
            snap
            for snap in self.memory.snaps.values()
            if snap.lineage == restore.lineage and snap.step <= restore.step and snap.complete
        ]
        waits = any(snap.step == restore.step and not self.is_safe(snap) for snap in held)
        safest = max(held, key=lambda snap: (*self._spread(snap), snap.order), default=None)
        room = self.context.settings.snapshot_slots - (not waits)
        return [safest.id] if safest is not None and len({*keys, safest.id}) <= room else []

    def _spread(self, snap: Snap) -> tuple[bool, int]:
        """Whether it has all its copies, and how many hosts have its rarest piece."""
        return not any(self._lacking(snap, rank) for rank in snap.pieces), min(map(len, snap.pieces.values()))

    # ---------------------------------------------------------------- who is there

    def assign(self) -> None:
        """Assign peers among the hosts that are there. One that goes away keeps no copies that another can keep."""
        leaving = self.notices.hosts & self.memory.domains.keys()
        if self.is_on and (self._moves, self.leaving) != (self.memory.moves, leaving):
            self._moves, self.leaving = self.memory.moves, leaving
            self.domains = dict(self.memory.domains)
            self._peers = assign_peers(self.domains, self.context.settings.replicas, self._peers, leaving)

    def reported(self, view: HostView) -> None:
        """A host has reported."""
        if not self.is_on:
            return
        if view.no_copies:
            self._say_once("warning", f"host {view.host} keeps no copies for other hosts: {view.no_copies}")
        order = self._orders.get(view.host)
        if view.host in self._excused and order is not None and not self._is_lacking(order):
            del self._excused[view.host]
            self.context.log("info", f"host {view.host} keeps copies again")

    def _is_lacking(self, order: Copy) -> bool:
        snap = self.memory.snaps.get(order.snapshot)
        return snap is None or any(order.host not in snap.pieces.get(rank, {}) for rank, _ in order.pieces)

    # ---------------------------------------------------------------- orders

    def turn(self) -> None:
        """Choose what is copied now, and tell who has to fetch it."""
        if not self.is_on:
            return
        self.assign()
        snap = self._choose()
        if snap is None:
            return
        if len(self.domains) < 2:
            self._say_once(
                "debug",
                "peer copies need a second host: until one joins, a lost host takes its snapshots with it (replicas=0: none are wanted)",
            )
            return
        if len(set(self.domains.values())) == 1:
            domain = next(iter(self.domains.values()))
            self._say_once("warning", f"all hosts are in failure domain {domain}: peer copies don't survive the loss of it")
        if snap.id != self._target:
            self._target, self._since_s = snap.id, self.context.now_s
            self._order(snap)

    def _choose(self) -> Snap | None:
        found = self.memory.candidates()
        if not found:
            return None
        old = self.memory.complete(self._target) if self._target is not None else None
        if old is not None and old.lineage == found[0].lineage and not self.is_safe(old):
            return old
        return found[0]

    def _order(self, snap: Snap) -> None:
        """Tell every host what it lacks; the same order again if it has been told so before."""
        self._ordered_s = self.context.now_s
        wanted: dict[HostId, list[tuple[int, HostId]]] = {}
        for rank in sorted(snap.pieces):
            for peer in self._lacking(snap, rank):
                wanted.setdefault(peer, []).append((rank, self._home(snap, rank)))
        orders = {host: self._order_to(host, snap.id, tuple(pieces)) for host, pieces in wanted.items()}
        # One that has all by now is remembered for as long as the snapshot is the target: its report may show it.
        self._orders = {host: one for host, one in self._orders.items() if one.snapshot == snap.id} | orders
        self.context.out += [order for host, order in orders.items() if self.memory.hosts[host].up]

    def _order_to(self, host: HostId, key: SnapshotId, pieces: tuple[tuple[int, HostId], ...]) -> Copy:
        old = self._orders.get(host)
        if old is not None and (old.snapshot, old.pieces) == (key, pieces):
            return old
        self._seq += 1
        return Copy(
            host=host,
            lineage=key.lineage,
            step=key.step,
            pieces=pieces,
            attempt=self.context.attempt,
            seq=self._seq,
        )

    # ---------------------------------------------------------------- time

    def tick(self) -> None:
        """Repeat orders, and stop waiting for copies that don't come."""
        if not self.is_on or self._target is None:
            return
        self.assign()
        now_s = self.context.now_s
        for host in [host for host, until_s in self._excused.items() if now_s >= until_s]:
            del self._excused[host]
        snap = self.memory.complete(self._target)
        if snap is not None and now_s - self._ordered_s >= RETRY_FIRST_S:
            self._order(snap)
        limit_s = self.context.settings.copy_timeout_s
        if snap is not None and now_s - self._since_s >= limit_s and not self.is_safe(snap) and not self._may_lose_one():
            late = sorted({peer for rank in snap.pieces for peer in self._lacking(snap, rank) if self.is_waited_for(peer)})
            self._excused |= dict.fromkeys(late, now_s + EXCUSED_FOR * limit_s)
            self.context.log(
                "warning",
                f"hosts {named(late)} have no copies of step {snap.step} after {now_s - self._since_s:.1f} s: until they catch up, "
                "snapshots count without these copies, so losing a host can cost those steps",
            )

    def _may_lose_one(self) -> bool:
        """Whether a host has been silent, and is soon heard or down. Until then no snapshot with
        copies may go for one without."""
        silent_s = self.context.settings.host_timeout_s / 2
        return any(view.up and self.context.now_s - view.heard_s >= silent_s for view in self.memory.views)

    def _say_once(self, level: str, text: str) -> None:
        if text not in self._told_of:
            self._told_of.add(text)
            self.context.log(level, text)
