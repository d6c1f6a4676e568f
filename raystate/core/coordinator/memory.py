"""What the hosts hold in memory: which snapshots are complete, and which steps cannot become complete any more.

A host's report replaces the one before it, so a lost report costs nothing. Pieces are indexed by snapshot: a report changes only what
differs from the host's last one, and costs no more when there are more hosts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TypeVar

from raystate.core.coordinator.context import Context
from raystate.core.formats.events import TrainerExited
from raystate.core.formats.names import HostId, Lineage, SnapshotId, group_of
from raystate.core.formats.orders import Invalidate, Proposal
from raystate.core.formats.reports import HostSummary, Staged, TrainerWord
from raystate.waits import RETRY_FIRST_S

_NO_HOST = HostId("")
K = TypeVar("K")


@dataclass(slots=True, eq=False)
class HostView:
    """What the Coordinator knows of one host, from its last report."""

    host: HostId
    heard_s: float  # when its last report came in
    up_s: float  # since when it is up
    up: bool = True
    why_down: str = ""  # what it is then, for messages: "down: …", "silent for …", "gone, …"
    incarnation: str = ""
    past: dict[str, int] = field(default_factory=dict[str, int])  # replaced incarnations, each with the newest report number seen
    summary_seq: int = -1
    staged: tuple[Staged, ...] = ()
    trainers: tuple[TrainerWord, ...] = ()
    advised: tuple[int, int] | None = None
    proposal_seen: Proposal | None = None
    heard_of: int | None = None  # newest attempt that the host knows of
    sent: int | None = None  # number of the last Advice given to it; None: it has to be given the newest
    sent_s: float = -1e9
    discarded: tuple[int, int] = (-1, -1)  # newest Invalidate it has applied
    no_copies: str = ""  # why it can't keep copies for other hosts
    counts: tuple[tuple[str, float], ...] = ()  # what its incarnation has counted

    def rise(self, now_s: float) -> bool:
        """The host has spoken. True if it was down until now."""
        self.heard_s = now_s
        if self.up:
            return False
        self.up = True
        self.up_s = now_s
        return True

    def told(self, seq: int, now_s: float) -> None:
        """The advice of this number was given to the host."""
        self.sent = seq
        self.sent_s = now_s

    def tell_again(self) -> None:
        """The newest advice has not reached the host: it counts as not given."""
        self.sent = None


@dataclass(slots=True, eq=False)
class Snap:
    """The pieces of one snapshot."""

    id: SnapshotId
    pieces: dict[int, dict[HostId, Staged]] = field(default_factory=dict[int, dict[HostId, Staged]])  # by rank
    _shapes: Counter[tuple[str, int]] = field(default_factory=Counter[tuple[str, int]])  # (layout, world) of the pieces
    _locals: Counter[int] = field(default_factory=Counter[int])  # those of the pieces that have any
    _promised: Counter[int] = field(default_factory=Counter[int])  # by rank: how many of them are

    @property
    def order(self) -> tuple[Lineage, int]:
        """Newer snapshots are greater, also across lineages."""
        return self.id.order

    @property
    def lineage(self) -> str:
        """The lineage in which it was staged."""
        return self.id.lineage

    @property
    def step(self) -> int:
        """The number of its step."""
        return self.id.step

    @property
    def uniform(self) -> bool:
        """All pieces that are there are of one world, with the same layout."""
        return len(self._shapes) == 1

    @property
    def complete(self) -> bool:
        """Every rank of one world is there, all with the same layout.
        (test_simulator.test_planted_bug_is_found, "complete without one piece")"""
        return self.uniform and len(self.pieces) == self.world

    @property
    def promised(self) -> bool:
        """Complete, and save() returned True for it on every rank. A copy may have been made before that."""
        return self.complete and len(self._promised) == self.world

    @property
    def promised_by_some(self) -> bool:
        """save() returned True for it on a rank whose piece is here."""
        return bool(self._promised)

    @property
    def world(self) -> int:
        """How many ranks have a piece of it; 0 before the first piece is known."""
        return next(iter(self._shapes))[1] if self._shapes else 0

    @property
    def unequal(self) -> bool:
        """Ranks hold different values of something of which a step has one."""
        return len(self._locals) > 1

    def skipper(self, view: HostView) -> int | None:
        """A rank on this host whose piece no host has and that won't have one: past it, and not staging it. If others have promised it,
        a rank at that very step may still be about to."""
        first = self.step + (1 if self.promised_by_some else 0)
        for one in view.trainers:
            is_past = one.lineage == self.lineage and one.newest_step >= first and self.step not in one.pending
            if is_past and one.rank not in self.pieces:
                return one.rank
        return None

    def add(self, host: HostId, piece: Staged) -> None:
        """A host holds this piece."""
        self.remove(host, piece.rank)
        self.pieces.setdefault(piece.rank, {})[host] = piece
        self._count(piece, 1)

    def remove(self, host: HostId, rank: int) -> None:
        """The host does not hold the rank's piece any more."""
        held = self.pieces.get(rank, {})
        piece = held.pop(host, None)
        if piece is None:
            return
        if not held:
            del self.pieces[rank]
        self._count(piece, -1)

    def _count(self, piece: Staged, by: int) -> None:
        _add(self._shapes, (piece.layout, piece.world), by)
        if piece.local:
            _add(self._locals, piece.local, by)
        if piece.promised:
            _add(self._promised, piece.rank, by)

    def holders(self) -> dict[int, tuple[HostId, ...]]:
        """rank -> the hosts that hold its piece."""
        return {rank: tuple(sorted(self.pieces[rank])) for rank in sorted(self.pieces)}

    def home(self, rank: int, own: HostId | None) -> HostId:
        """A host that holds the rank's piece: its `own`, if that has it."""
        held = self.pieces[rank]
        return own if own is not None and own in held else min(held)


def _add(counts: Counter[K], key: K, by: int) -> None:
    counts[key] += by
    if not counts[key]:
        del counts[key]


class Memory:
    """Hosts, the index of their pieces, and what a restore has given up of these."""

    def __init__(self, context: Context):
        self.context = context
        self.hosts: dict[HostId, HostView] = {}
        self.views: list[HostView] = []  # the same, in the order in which they came
        self.machines: dict[HostId, str] = {}  # names of their machines, for people
        self.domains: dict[HostId, str] = {}  # of the hosts that are up: what each is lost together with
        self.moves = 0  # how often these have changed
        self.snaps: dict[SnapshotId, Snap] = {}
        self.restore: Invalidate | None = None  # what the newest restore that is known gives up
        self.gathering: set[str] = set()  # hosts that existed at the claim and have not reported yet
        self.advice_seq = 0  # of the newest advice
        self.asks_all = False  # the next advice goes to every host, also if it says nothing new
        self._decisions = 0
        self._told_s: dict[HostId, float] = {}  # when each host was told the newest one last

    # ---------------------------------------------------------------- hosts come and go

    def view(self, host: HostId) -> HostView:
        """What is known of a host; one that was never heard of counts as up from now on."""
        view = self.hosts.get(host)
        if view is None:
            view = self.hosts[host] = HostView(host, heard_s=self.context.now_s, up_s=self.context.now_s)
            self.views.append(view)
            self._lies_in(host, host)
        return view

    def _lies_in(self, host: HostId, domain: str | None) -> None:
        """The host is up, in this failure domain; None: it is down."""
        if self.domains.get(host) != domain:
            self.moves += 1
            if domain is None:
                del self.domains[host]
            else:
                self.domains[host] = domain

    def incarnate(self, view: HostView, incarnation: str, seq: int) -> bool | None:
        """Note which incarnation speaks. True: a new one; False: the known one; None: one that has been replaced.

        A late message of a dead incarnation may arrive after the first of its successor. A
        Coordinator that has just started can't tell which is which. The dead one falls silent: then
        the other is believed again.
        """
        if incarnation == view.incarnation:
            return False
        is_silent = self.context.now_s - view.heard_s >= self.context.settings.host_timeout_s / 2
        if incarnation in view.past and not (seq > view.past[incarnation] and is_silent):
            view.past[incarnation] = max(seq, view.past[incarnation])
            return None
        if view.incarnation:
            view.past[view.incarnation] = view.summary_seq
        view.incarnation = incarnation
        view.counts = ()
        view.summary_seq = view.past.pop(incarnation, -1)
        view.sent = None
        return True

    def forget(self, view: HostView, why: str) -> None:
        """The host is down: its pieces cannot be read. They count again when it reports them again."""
        self.replace_pieces(view, ())
        view.up = False
        self._lies_in(view.host, None)
        view.why_down = why
        view.sent = None
        view.trainers = ()

    def had_its_time(self, view: HostView) -> bool:
        """Whether it could have reported by now: one that has only just come back gets as long as the others had."""
        return self.context.now_s - view.up_s >= self.context.settings.host_timeout_s

    def ask_all(self) -> int:
        """Ask every host what it holds now. Gives the number of the advice that asks: a report that
        knows it is an answer."""
        self.asks_all = True
        return self.advice_seq + 1

    def exited(self, event: TrainerExited) -> None:
        """The host's next report won't list it any more."""
        view = self.hosts.get(event.host)
        if view is not None:
            gone = group_of(event.lineage), event.rank
            view.trainers = tuple(one for one in view.trainers if (group_of(one.lineage), one.rank) != gone)

    def replace_pieces(self, view: HostView, staged: tuple[Staged, ...]) -> dict[SnapshotId, bool]:
        """Replace the host's pieces; gives the snapshots that changed, each with whether it is new
        here."""
        old = view.staged
        touched: dict[SnapshotId, bool] = {}
        for piece in old:
            if piece not in staged and (snap := self.snaps.get(piece.id)) is not None:
                snap.remove(view.host, piece.rank)
                touched[piece.id] = False
        for piece in staged:
            if piece not in old:
                new = piece.id not in self.snaps
                snap = self.snaps.setdefault(piece.id, Snap(piece.id))
                snap.add(view.host, piece)
                touched.setdefault(piece.id, new)  # of several ranks of this host the first one tells
        view.staged = staged
        for key in touched:
            if not self.snaps[key].pieces:
                del self.snaps[key]
        return touched

    def take(self, view: HostView, summary: HostSummary) -> dict[SnapshotId, bool]:
        """A report of the known incarnation, newer than the last. Gives what `replace_pieces` gives."""
        view.summary_seq = summary.seq
        view.heard_s = self.context.now_s
        view.advised = summary.advised
        view.proposal_seen = summary.proposal
        view.heard_of = summary.attempt
        view.no_copies = summary.no_copies
        view.counts = summary.counts or view.counts
        self._lies_in(view.host, summary.domain or view.host)
        if summary.machine:
            self.machines[view.host] = summary.machine
        if summary.restore is not None:
            view.discarded = max(view.discarded, summary.restore.stamp)
            # A new Coordinator learns from the hosts what the restores before it have given up.
            # (test_fates.test_what_a_restore_gave_up_under_an_earlier_attempt_is_not_made_durable)
            if self.restore is None or summary.restore.stamp > self.restore.stamp:
                self.restore = summary.restore
        view.trainers = summary.trainers
        if summary.staged == view.staged:
            return {}
        return self.replace_pieces(view, summary.staged)

    # ---------------------------------------------------------------- what a restore gives up

    def give_up_but(self, lineage: str, step: int, *, by: str) -> None:
        """A restore has chosen: from now on only (lineage, <= step) counts, with what that came from, and what `by` and later lineages
        stage. Every host is told, until it says that it has discarded all else."""
        # Two restores may choose one step: a late word of the first doesn't count for the second.
        # (test_recovery.test_a_late_word_of_a_discard_does_not_count_for_the_next_of_the_same_step)
        self._decisions += 1
        # With the past of that lineage: its promises still count after several restores in a row.
        # (test_recovery.test_what_was_promised_before_several_restores_in_a_row_becomes_durable)
        older = () if self.restore is None else self.restore.before(lineage)
        attempt = self.context.attempt
        self.restore = Invalidate(
            host=_NO_HOST, lineage=lineage, step=step, by=by, older=older, attempt=attempt, seq=self._decisions
        )
        self._told_s = {}
        for view in self.views:
            self.tell_discard(view)

    def first_undone(self) -> HostView | None:
        """A host that has not yet discarded what the newest choice gives up. A host that is down is
        told when it is back: no restore waits for it.
        (test_deadlines.test_a_host_that_does_not_discard)"""
        return next((view for view in self.views if view.up and not self.has_discarded(view)), None)

    def has_discarded(self, view: HostView) -> bool:
        """Whether the host has discarded what the newest choice gives up."""
        return self.restore is None or view.discarded >= self.restore.stamp

    def tell_discard(self, view: HostView) -> None:
        """Give the host the order, if it has not carried it out and has not just been told."""
        if self.restore is None or not view.up or self.has_discarded(view):
            return
        if self.context.now_s - self._told_s.get(view.host, -1e9) >= RETRY_FIRST_S:
            self._told_s[view.host] = self.context.now_s
            self.context.out.append(replace(self.restore, host=view.host))

    # ---------------------------------------------------------------- what can be recovered

    def believed(self, lineage: str, step: int) -> bool:
        """False for what a restore has given up, although some host that was away may still hold
        it. (test_simulator.test_planted_bug_is_found, "host rejoins without discarding")"""
        restore = self.restore
        return restore is None or restore.spares(lineage, step)

    def complete(self, key: SnapshotId) -> Snap | None:
        """The snapshot, if all its pieces are here and no restore has given it up."""
        snap = self.snaps.get(key)
        return snap if snap is not None and snap.complete and self.believed(key.lineage, key.step) else None

    @property
    def keeps(self) -> bool:
        """Whether a complete snapshot is there, or may be with hosts that have not reported."""
        return bool(self.gathering) or not all(view.up for view in self.views) or bool(self.candidates())

    def candidates(self) -> list[Snap]:
        """Complete and believed snapshots, best first: the newest lineage that has one, then the newest step.

        A lineage that has a complete snapshot had recovered before it: what older lineages hold beyond that was given up.
        """
        found = [snap for snap in self.snaps.values() if snap.complete and self.believed(snap.lineage, snap.step)]
        if len(found) > 1:
            found.sort(key=lambda snap: snap.order, reverse=True)
        return found
