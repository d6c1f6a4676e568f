"""The world of one schedule: virtual time, the network, the processes, the launcher."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import Any

from raystate.core.messages import (
    AttemptDead,
    Finish,
    HostDown,
    LeaveReply,
    LogEntry,
    Settings,
    Staged,
    StopAsked,
)
from tests.sim.coordinators import CoordinatorProc
from tests.sim.faults import FAULTS
from tests.sim.network import Network
from tests.sim.nodes import HostProc, Node, Proc, SlotSet
from tests.sim.storage import Storage, Violation
from tests.sim.trainers import Group, TrainerProc

_RUN = Settings(
    run="run",
    storage="sim",
    start_timeout_s=8.0,
    barrier_timeout_s=10.0,
    save_timeout_s=12.0,
    restore_timeout_s=20.0,
    host_timeout_s=6.0,
    idle_timeout_s=1000.0,
)


class World(Network):
    """Everything of one schedule."""

    def __init__(self, seed: int, hosts: int, events: int, faults: int, mutations: Collection[str], tracing: bool):
        self.seed = seed
        rng = Random(seed)
        self.rng = rng
        self.random = rng.random
        self.mutations = frozenset(mutations)
        self.tracing = tracing
        self.trace: list[tuple[Any, ...]] = []
        self.now_s = 0.0
        self.count = 0
        self.heap: list[tuple[float, int, Proc | None, Any, tuple[Any, ...]]] = []
        self.pushed = 0
        super().__init__(Storage(is_directory=rng.random() < 0.5))
        self.save_every = rng.choice((2, 3, 5))
        self.settings = replace(_RUN, save_every_s=4.0) if rng.random() < 0.2 else _RUN
        self.faults_wanted = faults
        self.events_wanted = events
        self.fault_count = 0
        self.healed = False
        self.pace = 1.0  # storage is faster when nothing is wrong any more: that keeps schedules short
        self.ended = False
        self.asks = 0
        self.connections = 0
        self.callers: dict[Any, TrainerProc] = {}
        self.failures: list[Any] = []
        self.lost_acks = 0
        self.trap = ""  # the operation at which the next fault strikes
        self.rolling_back = False  # the next group goes back to an older step
        self.lossy = 0.05  # chance that a message is lost; as much for a double
        # processes
        self.nodes: list[Node] = []
        self.nodes_by_id: dict[str, Node] = {}
        for index in range(hosts):
            self.add_node(index, 0)
        self.dead_first: tuple[int, ...] = ()
        if rng.random() < 0.6:
            self.storage.before(self.save_every)
            self.dead_first = (1,)
            if rng.random() < 0.3:
                # An older snapshot is still in memory.
                for node in self.nodes:
                    node.sets.append(SlotSet())
                    node.sets[0].content[0] = Staged(
                        rank=node.index, world=hosts, lineage="1.0.before", step=self.save_every + 1, layout="L", promised=False
                    )
        self.coordinators: list[CoordinatorProc] = []
        self.current: CoordinatorProc | None = None
        self.groups = 0
        self.group: Group | None = None
        self.pending_start = False
        self.leaving_at = -1
        self.final: LeaveReply | None = None
        self.finishing = False

    # ---------------------------------------------------------------- time

    def at(self, delay_s: float, fn: Any, *args: Any) -> None:
        self.pushed += 1
        heapq.heappush(self.heap, (self.now_s + delay_s, self.pushed, None, fn, args))

    def on(self, proc: Proc, delay_s: float, fn: Any, *args: Any) -> None:
        """Later, in that process: never if it is dead by then, later still if it sleeps."""
        self.pushed += 1
        heapq.heappush(self.heap, (self.now_s + delay_s, self.pushed, proc, fn, args))

    def run(self) -> None:
        heap, pop, push = self.heap, heapq.heappop, heapq.heappush
        tracing = self.tracing
        limit = self.events_wanted + 6000
        while heap and not self.ended:
            when, number, proc, fn, args = pop(heap)
            if proc is not None:
                if not proc.alive:
                    continue
                if proc.wake_s > when:
                    push(heap, (proc.wake_s, number, proc, fn, args))
                    continue
            self.now_s = when
            self.count += 1
            if tracing:
                self.trace.append((when, fn.__qualname__, args))
            fn(*args)
            if self.count > limit:
                raise Violation(f"liveness: the run has not finished after {self.count} events; {self.state()}")
        if not self.ended:
            raise Violation(f"liveness: nothing happens any more; {self.state()}")

    def state(self) -> str:
        parts = [f"now {self.now_s:.1f} s"]
        group = self.group
        if group is not None:
            parts.append(
                f"group {group.name}: "
                + ", ".join(f"r{t.rank} {t.stage} {t.step} {'up' if t.alive else 'dead'}" for t in group.members)
            )
        if self.current is not None:
            core = self.current.core
            parts.append(
                f"attempt {core.attempt}: recovery {core.recovery.phase}, leaving {core.leaving.phase}, jobs "
                f"{[(k, j.phase) for k, j in core.saves.jobs.items()]}, stable {core.snapshots.stable}, durable {core.journal.durable_step}"
            )
        parts.append(f"failures {self.failures[-3:]}")
        return "; ".join(parts)

    def violated(self, text: str) -> None:
        raise Violation(text)

    # ---------------------------------------------------------------- processes come and go

    def add_node(self, index: int, generation: int) -> None:
        node = Node(self, index, generation)
        if index < len(self.nodes):
            self.nodes[index] = node
        else:
            self.nodes.append(node)
        self.nodes_by_id[node.id] = node
        self.start_actor(node)

    def new_connection(self) -> int:
        self.connections += 1
        return self.connections

    def start_actor(self, node: Node) -> None:
        if node.up and (node.actor is None or not node.actor.alive):
            node.actor = HostProc(self, node)
            self.on(node.actor, 0.1 * self.random(), node.actor.begin)

    def start_coordinator(self, dead: tuple[int, ...]) -> None:
        proc = CoordinatorProc(self, f"w{len(self.coordinators) + 1}", dead)
        self.coordinators.append(proc)
        self.on(proc, 0.1, proc.claim)

    def claimed(self, proc: CoordinatorProc) -> None:
        if self.current is None or proc is not self.current:
            self.current = proc

    def host_down(self, node: Node, reason: str, *, gone: bool) -> None:
        """Ray notices, mostly."""
        if self.random() < 0.7:
            self.at(0.3 + self.random(), self._deliver, HostDown(host=node.id, reason=reason, gone=gone))

    def superseded(self, proc: CoordinatorProc) -> None:
        proc.alive = False

    # ---------------------------------------------------------------- the launcher

    def launch(self) -> None:
        """Start the worker group on every node that is up, once there is one."""
        self.pending_start = False
        if self.ended or self.final is not None:
            return
        old, self.group = self.group, None
        if old is not None:
            for member in old.members:
                if member.alive and member.wake_s <= self.now_s:
                    member.die("the launcher ends the group")
        nodes = [node for node in self.nodes if node.up]
        if not nodes or (len(nodes) < len(self.nodes) and self.healed):
            self.pending_start = True
            self.at(1.0, self.launch)
            return
        if self.current is not None and self.current.over:
            self.start_coordinator(self.dead_attempts())
        self.groups += 1
        group = self.group = Group(f"g{self.groups}")
        if not self.healed and self.storage.log and (self.rolling_back or self.random() < 0.05):
            self.rolling_back = False
            # A person goes back to an older step, and gives up the newer ones.
            steps = sorted(set(self.storage.visible()) & {one.step for one in self.storage.tail.live})
            if len(steps) > 1:
                group.want = steps[0]
                group.rollback = True
                self.floor = -1
        group.members = [TrainerProc(self, group, node, rank) for rank, node in enumerate(nodes)]
        for member in group.members:
            self.on(member, 0.1 + 0.2 * self.random(), member.begin)
        self.at(30.0, self._hurry, group)

    def _hurry(self, group: Group) -> None:
        """A launcher's own patience: a group that does not get to train is started again."""
        if group is self.group and any(member.stage not in ("train", "leave", "stopping") for member in group.members):
            self.group_broken(group)

    def group_broken(self, group: Group) -> None:
        if group is self.group and not self.pending_start and self.final is None:
            self.pending_start = True
            self.at(0.5 + self.random(), self.launch)

    def step_done(self, group: Group) -> None:
        """The next step's collective runs once all ranks have finished this one."""
        members = group.members
        if len(group.called) < len(members):
            return
        steps = set(group.called.values())
        if len(steps) != 1:
            return
        step = next(iter(steps))
        if any(not member.alive for member in members):
            return
        if self.healed and self.leaving_at < 0:
            self.leaving_at = step + 3
        leave = self.healed and step >= self.leaving_at
        if leave:
            for member in members:
                self.on(member, 0.1, member.leave)
            return
        chance = 1.0 if self.healed else self.random()
        if chance < 0.03:
            self._restore_again(group)
            return
        for member in members:
            if chance < 0.07 and step > 0:
                self.on(member, 0.1 * self.random(), member.save, step, True)
            elif chance < 0.14 and member.rank == step % len(members):
                self.on(member, 0.1 * self.random(), member.flush)
            self.on(member, 0.4 + 0.4 * self.random(), member.save, step + 1)

    def _restore_again(self, group: Group) -> None:
        """The script restores in mid-training: the newest step, or an older one for good."""
        steps = sorted(set(self.storage.visible()) & {one.step for one in self.storage.tail.live})
        want = steps[0] if len(steps) > 1 and self.random() < 0.5 else None
        group.called.clear()
        group.restored.clear()
        if want is not None:
            self.floor = -1
        for member in group.members:
            self.on(member, 0.1 + 0.5 * self.random(), member.restore_again, want, want is not None)

    # ---------------------------------------------------------------- the end

    def left(self, trainer: TrainerProc, reply: LeaveReply) -> None:
        if not self.healed:
            raise Violation("a rank has left before the end")
        self.final = reply
        trainer.die("left", clean=True)
        group = trainer.group
        if all(member.left for member in group.members):
            if reply.step not in self.storage.visible():
                raise Violation(f"close: step {reply.step} is said to be durable and is not visible")
            stable = -1 if trainer.machine is None else self.true_stable.get(trainer.machine.lineage, -1)
            if reply.step < stable:
                raise Violation(f"close: step {stable} was complete in memory, but only step {reply.step} is durable")
            choice = None if trainer.machine is None else self.choices.get(trainer.machine.lineage)
            stable = max(stable, -1 if choice is None else choice.step)
            if stable < group.called[trainer.rank] - 8:
                raise Violation(f"liveness: at step {group.called[trainer.rank]} only step {stable} is complete on all hosts")
            self.ended = True

    def finished(self, command: Finish) -> None:
        if not self.healed:
            raise Violation(f"finished before the end: {command.reason}")

    # ---------------------------------------------------------------- faults

    def plan(self) -> None:
        """Faults come at random times; afterwards all is healed and the run has to finish."""
        span_s = self.events_wanted * 0.08
        kinds = list(FAULTS)
        for _ in range(self.faults_wanted + int(2 * self.random())):
            kind = kinds[int(self.random() * len(kinds))]
            self.at(1.0 + span_s * self.random(), self._fault, kind)
        self.at(span_s + 1.5, self.heal)

    def _fault(self, kind: str) -> None:
        if not self.healed:
            self.fault_count += 1
            FAULTS[kind](self)

    def heal(self) -> None:
        self.healed = True
        self.pace = 0.3
        self.storage.outage = False
        self.lost_acks = 0
        for node in self.nodes:
            node.cut_until_s = 0.0
            if node.up and (node.actor is None or not node.actor.alive):
                self.start_actor(node)
        for index, node in enumerate(self.nodes):
            if not node.up:
                self.add_node(index, int(node.id.split("g")[1]) + 1)
        zombies = [proc for proc in self.coordinators if proc is not self.current and proc.alive and proc.core.attempt]
        for proc in zombies:
            # A zombie wakes up once more before it is found dead.
            proc.wake_s = min(proc.wake_s, self.now_s + 5.0)
            self.at(8.0, self._bury, proc)
        self.at(9.0, self._tell_dead)
        current = self.current
        if current is None or not current.alive or current.over:
            if not any(proc.alive and proc.core.attempt == 0 for proc in self.coordinators):
                self.start_coordinator(self.dead_attempts())
        else:
            current.wake_s = min(current.wake_s, self.now_s)
        if self.group is not None:
            for member in self.group.members:
                if member.wake_s > self.now_s:
                    member.die("found hanging")
            if any(not member.alive for member in self.group.members):
                self.group_broken(self.group)
        elif not self.pending_start:
            self.launch()

    def _bury(self, proc: CoordinatorProc) -> None:
        if proc is self.current:
            return
        proc.alive = False
        self._deliver(AttemptDead(attempt=proc.core.attempt))

    def _tell_dead(self) -> None:
        """Ray says which Coordinators are gone; not every one of them has been told at its start."""
        for attempt in self.dead_attempts():
            self._deliver(AttemptDead(attempt=attempt))
        if not self.ended:
            self.at(10.0, self._tell_dead)

    def dead_attempts(self) -> tuple[int, ...]:
        return self.dead_first + tuple(proc.core.attempt for proc in self.coordinators if not proc.alive and proc.core.attempt)

    def stop(self) -> None:
        self._deliver(StopAsked(reason="preemption", within_s=8.0))

    def renumbered(self, entry: LogEntry) -> LogEntry:
        return replace(entry, seq=len(self.storage.log) + 1)

    def sleep_now(self, proc: CoordinatorProc) -> bool:
        """The trap snaps: this Coordinator sleeps in the middle of it, and another one claims."""
        if proc is not self.current or self.healed:
            return False
        self.trap = ""
        proc.wake_s = self.now_s + 4.0 + 8.0 * self.random()
        self.start_coordinator(tuple(one for one in self.dead_attempts() if one != proc.core.attempt))
        return True

    def kill_early(self, group: Group) -> None:
        """A trainer dies soon after its group has staged its first piece."""
        if group is self.group and not self.healed:
            self.trap = ""
            victim = group.members[int(self.random() * len(group.members))]
            self.on(victim, 0.5 * self.random(), victim.die, "killed early")
