"""The worker group that trains now: how its ranks come together, which lineage it is, and how it ends."""

from __future__ import annotations

from raystate.core.desk import Barrier, Desk, ranks_text
from raystate.core.memory import HostView, Memory
from raystate.core.messages import (
    Ask,
    EndTrainers,
    HostId,
    Joined,
    JoinReply,
    Lineage,
    TrainerExited,
    TrainerSeen,
)
from raystate.core.slots import lineage_order

RESEND_S = 1.0  # a command that a host must have had is repeated after so long


class Group:
    """One lineage. `world` is None while unknown: a Coordinator that took over learns it from the hosts' reports."""

    __slots__ = (
        "acked",
        "adopted",
        "alive",
        "decided",
        "first_s",
        "hosts",
        "lineage",
        "moved_s",
        "order",
        "rewound",
        "seen",
        "why_ended",
        "world",
    )

    def __init__(self, lineage: str, world: int | None, hosts: dict[int, HostId], now_s: float, *, adopted: bool):
        self.lineage = lineage
        self.order = lineage_order(lineage)
        self.world = world
        self.hosts = hosts
        self.adopted = adopted
        self.alive = True
        self.why_ended = ""
        self.decided = False  # it has restored, or has shown that it doesn't
        self.first_s = now_s
        self.seen: dict[int, TrainerSeen] = {}
        self.acked = 0  # newest proposal that a rank has agreed to
        self.moved_s: dict[int, float] = {}  # when the rank's newest step last changed
        self.rewound: dict[int, int] = {}  # ranks whose word still tells of before a second restore -> the step it tells

    @property
    def newest(self) -> int:
        return max((one.newest_step for one in self.seen.values()), default=-1)


class Joins:
    """Collects the ranks of a new group, draws its lineage, and ends the group before it."""

    def __init__(self, desk: Desk, memory: Memory):
        self.desk = desk
        self.memory = memory
        self.group: Group | None = None
        self.ended: dict[str, str] = {}  # lineage -> why
        self.newest_committed = -1
        self._counter = 0
        self._name = ""  # of the group that is joining or has joined
        self._past: set[str] = set()
        self._barrier: Barrier | None = None
        self._world = 0
        self._members: dict[int, Joined] = {}
        self._reply: JoinReply | None = None
        self._told_end_s: dict[tuple[HostId, str], float] = {}

    # ---------------------------------------------------------------- joining

    def joined(self, event: Joined) -> None:
        desk = self.desk
        if event.group != self._name:
            if event.group in self._past:
                desk.fail(
                    [event.ask],
                    "StaleAttemptError",
                    f"group {event.group} has been replaced by {self._name}",
                    rank=event.rank,
                    replaced=True,
                )
                return
            self._open(event)
        first = self._members.get(event.rank)
        if first is not None and first.host != event.host:
            self._refuse(
                event,
                f"rank {event.rank} of group {event.group} joined from two hosts: {first.host} and {event.host}",
                rank=event.rank,
                hosts=[first.host, event.host],
            )
            return
        if event.world != self._world or not 0 <= event.rank < event.world:
            self._refuse(
                event,
                f"rank {event.rank} (host {event.host}) of group {event.group} has world size {event.world}, but rank "
                f"{min(self._members, default=event.rank)} has {self._world}",
                rank=event.rank,
                expected=self._world,
                got=event.world,
            )
            return
        if first is None:
            self._members[event.rank] = event
        if self._reply is not None:
            desk.answer(event.ask, self._reply)
            return
        if self._barrier is None:
            self._barrier = Barrier(desk.now_s)
        self._barrier.add(event.rank, event.ask)
        if len(self._members) == self._world and not self._barrier.missing(self._world):
            self._complete(self._barrier)

    def _open(self, event: Joined) -> None:
        desk = self.desk
        if self._barrier is not None:
            desk.fail(
                self._barrier.everybody(),
                "StaleAttemptError",
                f"group {self._name} was replaced by {event.group} while it joined",
                replaced=True,
            )
        if self._name:
            self._past.add(self._name)
        self._name = event.group
        self._world = event.world
        self._members = {}
        self._reply = None
        self._barrier = Barrier(desk.now_s)
        desk.log("debug", f"group {event.group} of {event.world} ranks joins")

    def _refuse(self, event: Joined, message: str, **details: object) -> None:
        """The group cannot be what its ranks say: nobody of it may start."""
        asks = [event.ask]
        if self._barrier is not None:
            asks += [ask for ask in self._barrier.everybody() if ask != event.ask]
            self._barrier = None
            self._members = {}
            self._world = event.world
        self.desk.log("error", message)
        self.desk.fail(asks, "ConfigError", message, **details)

    def _complete(self, barrier: Barrier) -> None:
        desk = self.desk
        if self.group is not None and self.group.alive:
            # Not at the first rank: that may be a late message of a group which this Coordinator has never known.
            self.end(f"a new worker group ({self._name}) has joined")
        self._counter += 1
        lineage = str(Lineage(desk.attempt, self._counter, self._members[0].nonce))
        hosts = {rank: self._members[rank].host for rank in sorted(self._members)}
        self.group = Group(lineage, self._world, hosts, desk.now_s, adopted=False)
        for host in hosts.values():
            self.memory.view(host, desk.now_s)
        self._reply = JoinReply(
            lineage=lineage, attempt=desk.attempt, hosts=tuple(hosts.items()), newest_step=self.newest_committed
        )
        self._barrier = None
        desk.log("info", f"all {self._world} ranks have joined: lineage {lineage}, on hosts {sorted(set(hosts.values()))}")
        for ask in barrier.everybody():
            desk.answer(ask, self._reply)
        desk.stir = True

    def tick(self) -> None:
        barrier = self._barrier
        if barrier is None or not barrier.asks:
            return
        desk = self.desk
        waited_s = desk.now_s - barrier.opened_s
        if waited_s < desk.settings.start_timeout_s:
            return
        missing = barrier.missing(self._world)
        here = ranks_text(sorted(self._members), {rank: join.host for rank, join in self._members.items()})
        message = (
            f"{ranks_text(missing, {})} of {self._world} did not construct a StateManager within {waited_s:.1f} s of the first; "
            f"{here} did"
        )
        desk.log("error", message)
        desk.fail(barrier.everybody(), "BarrierTimeoutError", message, missing_ranks=missing, phase="start", waited_s=waited_s)
        self._barrier = None
        self._members = {}

    # ---------------------------------------------------------------- who may ask

    def stale(self, lineage: str) -> str | None:
        """Why this lineage may not ask for anything, or None. One that a predecessor drew is adopted."""
        if lineage in self.ended:
            return f"lineage {lineage} has ended: {self.ended[lineage]}"
        group = self.group
        if group is not None and group.lineage == lineage:
            return None
        if group is None or (group.adopted and lineage_order(lineage) > group.order):
            self.adopt(lineage)
            return None
        return f"lineage {lineage} has been replaced by {group.lineage}"

    def check(self, ask: Ask, lineage: str, rank: int) -> bool:
        why = self.stale(lineage)
        if why is None:
            return True
        self.desk.fail([ask], "StaleAttemptError", why, rank=rank, lineage=lineage, replaced=True)
        return False

    def adopt(self, lineage: str) -> None:
        """A group that an earlier attempt started is still there: go on with it."""
        if self.group is not None and self.group.alive:
            self.end(f"lineage {lineage} is newer")
        self.group = Group(lineage, None, {}, self.desk.now_s, adopted=True)
        self.desk.log("info", f"adopted lineage {lineage}, started by an earlier attempt")
        self.desk.stir = True

    # ---------------------------------------------------------------- what the hosts see

    def observe(self, view: HostView) -> bool:
        """Take the trainers' words out of a host's new report. True if something about the current group changed."""
        changed = False
        for one in view.trainers:
            group = self.group
            if group is None or one.lineage != group.lineage:
                if one.lineage in self.ended:
                    self._tell_end(view.host, one.lineage, self.ended[one.lineage])
                    continue
                if group is not None and not (group.adopted and lineage_order(one.lineage) > group.order):
                    if lineage_order(one.lineage) < group.order:
                        self._tell_end(view.host, one.lineage, f"replaced by lineage {group.lineage}")
                    continue
                self.adopt(one.lineage)
                group = self.group
                assert group is not None
            if not group.alive:
                self._tell_end(view.host, one.lineage, group.why_ended)
                continue
            old = group.seen.get(one.rank)
            if old is not None and (old is one or old == one) and group.hosts.get(one.rank) == view.host:
                continue
            changed = True
            if group.adopted:
                if group.world is None:
                    group.world = one.world
                group.hosts[one.rank] = view.host
            group.seen[one.rank] = one
            if one.ack_ok and one.ack_id > group.acked:
                group.acked = one.ack_id
            if one.rank in group.rewound and one.newest_step < group.rewound[one.rank]:
                del group.rewound[one.rank]
            if old is None or old.newest_step != one.newest_step:
                group.moved_s[one.rank] = self.desk.now_s
        return changed

    def _tell_end(self, host: HostId, lineage: str, reason: str) -> None:
        last_s = self._told_end_s.get((host, lineage))
        if last_s is None or self.desk.now_s - last_s >= RESEND_S:
            self._told_end_s[host, lineage] = self.desk.now_s
            self.desk.out.append(EndTrainers(host=host, lineage=lineage, reason=reason))

    # ---------------------------------------------------------------- the end of a group

    def exited(self, event: TrainerExited) -> None:
        if event.clean or event.lineage in self.ended:
            return
        group = self.group
        if group is None or group.lineage != event.lineage:
            if group is None or lineage_order(event.lineage) > group.order:
                self.ended[event.lineage] = f"rank {event.rank} on host {event.host} exited: {event.reason}"
            return
        group.hosts.setdefault(event.rank, event.host)
        self.end(f"rank {event.rank} on host {event.host} exited: {event.reason}", spare=event.host)

    def end(self, why: str, spare: HostId | None = None) -> None:
        """The group cannot go on: its other ranks are stuck with a dead one."""
        group = self.group
        if group is None or not group.alive:
            return
        group.alive = False
        group.why_ended = why
        self.ended[group.lineage] = why
        self.desk.log("warning", f"lineage {group.lineage} has ended: {why}")
        for host in sorted(set(group.hosts.values())):
            # The host of the dead rank may have other ranks of the group.
            if host != spare or sum(1 for one in group.hosts.values() if one == host) > 1:
                self._tell_end(host, group.lineage, why)
        self.desk.stir = True

    def where(self, ranks: list[int]) -> str:
        return ranks_text(ranks, {} if self.group is None else dict(self.group.hosts))
