"""How the ranks of a worker group come together, which lineage it is, and how it ends."""

from __future__ import annotations

from collections.abc import Collection

from raystate.core.coordinator.context import Context, all_have, named, ranks_text
from raystate.core.coordinator.group import Group
from raystate.core.coordinator.joining import Joining
from raystate.core.coordinator.journal import Journal
from raystate.core.coordinator.memory import HostView, Memory
from raystate.core.formats.events import TrainerExited
from raystate.core.formats.names import Ask, HostId, Lineage, SnapshotId, group_of, lineage_order
from raystate.core.formats.orders import EndTrainers
from raystate.core.formats.questions import Joined
from raystate.core.formats.replies import JoinReply
from raystate.core.formats.reports import TrainerWord
from raystate.core.formats.texts import brief, counted
from raystate.waits import RETRY_FIRST_S


class Joins:
    """Collects the ranks of a new group, draws its lineage, and ends the group before it."""

    def __init__(self, context: Context, memory: Memory, journal: Journal):
        self.context = context
        self.memory = memory
        self.journal = journal
        self.group: Group | None = None
        self.ended: dict[str, str] = {}  # worker group -> why, the newest end last
        self.gone_s: dict[str, float] = {}  # worker group -> when the first of its trainers ended, also one that left
        self.newest = -1  # step that a rank has saved since the last rollback
        self.joined_s = float("-inf")  # when a rank last asked to join
        self.heard_s = float("-inf")  # when something was last heard of a trainer, the news of its end included
        self._counter = 0
        self.joining = Joining(context, "", 0)  # the group that is joining or has joined
        self._past: set[str] = set()
        self._told_end_s: dict[tuple[HostId, str], float] = {}
        self._returned: set[int] = set()  # ranks of the group that joins, or has joined, whose training function has returned

    # ---------------------------------------------------------------- joining

    def joined(self, event: Joined) -> None:
        """A rank of a group has come. When all have, each gets the group's lineage; the group before has ended then."""
        context = self.context
        self.joined_s = self.heard_s = context.now_s
        if event.group != self.joining.name:
            if event.group in self._past:
                why = f"group {event.group} has been replaced by {self.joining.name}"
                context.fail([event.ask], "StaleAttemptError", why, rank=event.rank, replaced=True)
                return
            self.joining.replaced(event.group)
            self._past.add(self.joining.name)
            self.joining = Joining(context, event.group, event.world)
            self._returned = set()
            context.ranks = event.world
            context.log("debug", f"group {event.group} of {counted(event.world, 'rank')} joins")
        if self.joining.add(event):
            self._complete()

    def _complete(self) -> None:
        context, joining = self.context, self.joining
        if self.group is not None and self.group.alive:
            # Not at the first rank: that may be a late message of a group which this Coordinator has never known.
            self.end(f"a new worker group ({joining.name}) has joined")
        self._counter += 1
        lineage = str(Lineage(context.attempt, self._counter, joining.name))
        hosts = {rank: joining.members[rank].host for rank in sorted(joining.members)}
        self.group = Group(lineage, joining.world, hosts, context.now_s, adopted=False)
        for host in hosts.values():
            self.memory.view(host)
        context.log("debug", f"{all_have(joining.world)} joined: lineage {lineage}, on hosts {sorted(set(hosts.values()))}")
        host_count, newest = len(set(hosts.values())), self.journal.newest
        joining.answer(JoinReply(lineage=lineage, attempt=context.attempt, host_count=host_count, newest_step=newest))

    def turn(self) -> None:
        """Refuse those who wait too long for ranks that don't come."""
        self.joining.turn(self.why_not_here)

    def why_not_here(self, missing: Collection[int], what: str, waited_s: float, limit_s: float) -> str:
        """Why ranks that others wait for will not come, or have had their time; "": they still may."""
        if gone := sorted(self._returned.intersection(missing)):
            return f"{self.where(gone)} did not {what}: its training function has returned"
        return f"{self.where(sorted(missing))} did not {what} within {waited_s:.1f} s" if waited_s >= limit_s else ""

    @property
    def is_joining(self) -> bool:
        """Whether ranks wait for others of their group."""
        return self.joining.barrier is not None

    # ---------------------------------------------------------------- who may ask

    def stale(self, lineage: str, *, restoring: bool = False) -> str | None:
        """Why this lineage may not ask for anything, or None. One that a predecessor drew is adopted.

        Args:
            restoring: any lineage of the present worker group may: it may not have heard of the next one.
        """
        name = group_of(lineage)
        if name in self.ended:
            return f"lineage {lineage} has ended: {self.ended[name]}"
        group = self.group
        if group is not None and (group.lineage == lineage or (restoring and group.name == name)):
            return None
        if group is None or (group.adopted and lineage_order(lineage) > group.order):
            self.adopt(lineage)
            return None
        return f"lineage {lineage} has been replaced by {group.lineage}"

    def check(self, ask: Ask, lineage: str, rank: int, *, restoring: bool = False) -> bool:
        """Refuse an ask that `stale` refuses."""
        why = self.stale(lineage, restoring=restoring)
        if why is None:
            return True
        self.context.fail([ask], "StaleAttemptError", why, rank=rank, lineage=lineage, replaced=True)
        return False

    def adopt(self, lineage: str) -> None:
        """A group that an earlier attempt started is still there: go on with it."""
        old = self.group
        same = old is not None and old.name == group_of(lineage)
        if old is not None and old.alive and not same:
            self.end(f"lineage {lineage} is newer")
        world, hosts = (old.world, old.hosts) if old is not None and same else (None, {})
        self.group = Group(lineage, world, hosts, self.context.now_s, adopted=True)
        self.context.log("debug", f"adopted lineage {lineage}, started by an earlier attempt")

    def next_lineage(self) -> str:
        """A name for the one in which the present worker group goes on after its restore.

        Never the old one: pieces from before and after the restore would count together.
        (test_simulator.test_planted_bug_is_found, "restore without a new lineage")
        """
        assert self.group is not None
        self._counter += 1
        return str(Lineage(self.context.attempt, self._counter, self.group.name))

    def renew(self, lineage: str, *, back_to: int | None = None) -> Group:
        """The present worker group has restored: it goes on in a lineage of its own. `back_to`: the step of a rollback."""
        old = self.group
        assert old is not None
        self.group = Group(lineage, old.world, old.hosts, self.context.now_s, adopted=False)
        self.newest = self.newest if back_to is None else back_to
        return self.group

    # ---------------------------------------------------------------- what the hosts see

    def observe(self, view: HostView) -> bool:
        """Take the trainers' words out of a host's new report. True if something about the current group changed."""
        changed = False
        if view.trainers:
            self.heard_s = self.context.now_s
        for one in view.trainers:
            group = self._group_of(view, one)
            if group is None:
                continue
            self.newest = max(self.newest, one.newest_step)
            if not group.alive:  # its words count still: a release waits for that of the rank that has failed
                self._tell_end(view.host, one.lineage, group.why_ended)
            old = group.seen.get(one.rank)
            if old is not None and (old is one or old == one) and group.hosts.get(one.rank) == view.host:
                continue
            if old is not None and one.number < old.number:
                continue  # its word is gone with its slots, and its host goes by what it said at the door
            changed = True
            if group.world is None:
                group.world = self.context.ranks = one.world
            group.hosts[one.rank] = view.host
            group.seen[one.rank] = one
            group.lived_s[one.rank] = self.context.now_s
            group.newest = max(group.newest, one.newest_step)
            if one.ack_ok and one.ack_id > group.acked:
                group.acked = one.ack_id
            if old is None or old.newest_step != one.newest_step:
                group.moved_s[one.rank] = self.context.now_s
        return changed

    def _group_of(self, view: HostView, one: TrainerWord) -> Group | None:
        """The present group if the trainer is in its lineage; a trainer of another group is ended or adopted."""
        group, name = self.group, group_of(one.lineage)
        if group is not None and one.lineage == group.lineage:
            return group
        if name in self.ended:
            self._tell_end(view.host, one.lineage, self.ended[name])
            return None
        newer = group is None or (group.adopted and lineage_order(one.lineage) > group.order)
        if newer:
            self.adopt(one.lineage)
            return self.group
        if group is not None and name != group.name and lineage_order(one.lineage) < group.order:
            self._tell_end(view.host, one.lineage, f"replaced by lineage {group.lineage}")
        return None  # of the same worker group: it has not heard of the restore yet

    def _tell_end(self, host: HostId, lineage: str, reason: str, *, announced: bool = False) -> None:
        last_s = self._told_end_s.get((host, lineage))
        if last_s is None or self.context.now_s - last_s >= RETRY_FIRST_S:
            self._told_end_s[host, lineage] = self.context.now_s
            attempt = self.context.attempt
            self.context.out.append(
                EndTrainers(host=host, lineage=lineage, reason=brief(reason), attempt=attempt, announced=announced)
            )

    # ---------------------------------------------------------------- the end of a group

    def exited(self, event: TrainerExited) -> None:
        """A trainer's process is gone: unless it left on purpose, its group cannot go on."""
        name, group = group_of(event.lineage), self.group
        self.heard_s = self.context.now_s
        if event.returned:
            if name in (self.joining.name, "" if group is None else group.name):
                self._returned.add(event.rank)
            return
        self.gone_s.setdefault(name, self.context.now_s)
        self.memory.exited(event)
        if event.clean and group is not None and group.name == name:
            group.left.add(event.rank)
        if event.stack:  # of each: those that hung together end one by one
            self.context.log("error", f"rank {event.rank} was at\n{event.stack}")
        if event.clean or name in self.ended:
            return
        if group is None or group.name != name:
            if group is None or lineage_order(event.lineage) > group.order:
                self.ended[name] = f"rank {event.rank} on host {event.host} exited: {event.reason}"
            return
        group.hosts.setdefault(event.rank, event.host)
        self.end(f"rank {event.rank} on host {event.host} exited: {event.reason}", spare=event.host)

    def end(self, why: str, spare: HostId | None = None, *, announced: bool = False) -> None:
        """The group cannot go on: its other ranks are stuck with a dead one. `announced`: see `EndTrainers`."""
        group = self.group
        if group is None or not group.alive:
            return
        group.alive, self.heard_s = False, self.context.now_s
        group.why_ended, group.announced = why, announced
        self.ended[group.name] = why
        level = "debug" if self.context.settings.launched or group.world == 1 else "warning"
        self.context.log(level, f"lineage {group.lineage} has ended: {why}")
        for host in sorted(set(group.hosts.values())):
            # The host of the dead rank may have other ranks of the group.
            if host != spare or sum(1 for one in group.hosts.values() if one == host) > 1:
                self._tell_end(host, group.lineage, why, announced=announced)

    def where(self, ranks: list[int]) -> str:
        """These ranks with their hosts, for messages."""
        return ranks_text(ranks, {} if self.group is None else self.group.hosts)

    def lost_text(self, key: SnapshotId) -> str:
        """What became of a snapshot that was complete, for messages."""
        group, snap = self.group, self.memory.snaps.get(key)
        hosts = group.hosts if group is not None and group.name == group_of(key.lineage) else {}
        missing = [] if snap is None else [rank for rank in range(snap.world) if rank not in snap.pieces]
        return f"its snapshot of {ranks_text(missing, hosts)} is lost" if missing else "its hosts have lost its snapshot"

    def missing_text(self, key: SnapshotId) -> str:
        """Why a snapshot is not complete, for messages. Pieces out of reach are not called missing."""
        group, snap = self.group, self.memory.snaps.get(key)
        hosts = {} if group is None else group.hosts
        pieces = {} if snap is None else snap.pieces
        views = {rank: self.memory.hosts.get(host) for rank, host in sorted(hosts.items()) if rank not in pieces}
        if away := [f"the host of {self.where([rank])} is {view.why_down}" for rank, view in views.items() if view and not view.up]:
            return f"step {key.step} is out of reach: {named(away)}"
        if snap is None:
            return f"no host holds a piece of step {key.step}"
        if missing := [rank for rank in range(snap.world) if rank not in pieces]:
            return f"step {key.step} was not staged by {self.where(missing)}"
        waits = f"all of step {key.step} is in host memory and waits for storage"
        return waits if snap.complete else f"the pieces of step {key.step} differ in layout"
