"""The world of one schedule: virtual time, the network, the processes, the launcher."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import replace
from random import Random
from typing import Any

from raystate.core.formats.messages import (
    AttemptDead,
    HostDown,
    LogEntry,
    Settings,
    Staged,
    StopAsked,
)
from tests.sim.coordinators import CoordinatorProc
from tests.sim.faults import COPY_FAULTS, FAULTS, PAIRS, RIVALS, STILL, announce, spring_copy_trap, stand_still
from tests.sim.launcher import Launcher
from tests.sim.nodes import HostProc, Node
from tests.sim.storage import BEFORE, Storage, Violation
from tests.sim.trainers import Group

ANNOUNCED = 4  # of so many seeds one announces the loss of a node
AWAY = 16  # and one loses sight of its storage, as it begins to commit
FEWEST_FAULTS = 3
HANGING = 8  # and in one a trainer hangs until the Coordinator ends it
MEASURED = 4  # and in one the snapshots' interval is what the ranks measure; in half of these that of durable saves, too
ELASTIC = 8  # and, with peer copies, in one the launcher asks for a larger group when a node has come back

_RUN = Settings(
    run="run",
    storage="sim",
    snapshot_every_steps=1,
    start_timeout_s=8.0,
    barrier_timeout_s=10.0,
    save_timeout_s=12.0,
    restore_timeout_s=20.0,
    host_timeout_s=6.0,
    idle_timeout_s=1000.0,
    replicas=0,
)


# replicas -> how many hosts there may be; 2: or more
HOSTS = {0: (1, 2, 2, 3, 3, 3), 1: (1, 2, 2, 3, 3, 4, 4), 2: (2, 3, 3, 4, 4, 5)}


class World(Launcher):
    """Everything of one schedule."""

    def __init__(
        self,
        seed: int,
        events: int,
        mutations: Collection[str],
        tracing: bool,
        replicas: int,
        rivals: bool,
        is_still: bool,
    ):
        self.seed = seed
        self.is_still = is_still
        self.faults = STILL if is_still else FAULTS
        if replicas and not is_still:
            self.faults = COPY_FAULTS | (PAIRS if replicas > 1 else {}) | (RIVALS if rivals else {})
        rng = Random(seed)
        hosts = rng.choice(HOSTS[min(replicas, 2)])
        storage = Storage(is_directory=rng.random() < 0.5)
        self.domains = rng.choice((0, 0, 2)) if replicas else 0  # failure domains of several nodes
        self.save_every = rng.choice((2, 3, 5))
        if replicas and rng.random() < 0.7:
            self.save_every = rng.choice((9, 40))  # what is only in memory matters more
        settings = replace(_RUN, save_every_s=4.0) if rng.random() < 0.2 else _RUN
        if seed % HANGING == HANGING - 2:
            settings = replace(settings, hang_timeout_s=6.0)
        if is_still:
            settings = replace(settings, hang_timeout_s=6.0)
        elif seed % MEASURED == 0:
            settings = replace(settings, snapshot_every_steps=None)
            if seed % (2 * MEASURED) == 0:
                settings = replace(settings, save_every_s=4.0, save_measured=True)
        if replicas:
            settings = replace(settings, replicas=replicas, copy_timeout_s=5.0)
        super().__init__(storage, settings, rng)
        self.mutations = frozenset(mutations)
        self.tracing = tracing
        self.trace: list[tuple[Any, ...]] = []
        self.count = 0
        self.events_wanted = events
        self.fault_count = 0
        self.pace = 1.0  # storage is faster when nothing is wrong any more: that keeps schedules short
        self.asks = 0
        self.connections = 0
        self.failures: list[Any] = []
        self.lost_acks = 0
        self.trap = ""  # the operation at which the next fault strikes
        self.folder_goes_away = seed % AWAY == 6 and not is_still
        self.lossy = 0.0 if is_still else self.lossy
        self.is_elastic = bool(replicas) and not is_still and seed % ELASTIC == ELASTIC - 1
        for index in range(hosts):
            self.add_node(index, 0)
        if rng.random() < 0.6:
            storage.before(self.save_every)
            self.dead_first = (1,)
            if rng.random() < 0.3:
                # An older snapshot is still in memory.
                for node in self.nodes:
                    one = node.add_set()
                    one.content[0] = Staged(
                        rank=node.index, world=hosts, lineage="1.0.before", step=self.save_every + 1, layout="L", promised=False
                    )
                    one.saved[0] = BEFORE

    # ---------------------------------------------------------------- time

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
            parts.append(self.current.core.story())
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

    def claimed(self, proc: CoordinatorProc) -> None:
        if self.current is None or proc is not self.current:
            self.current = proc

    def node_lost(self, node: Node) -> None:
        """Ray notices, mostly."""
        if self.random() < 0.7:
            self.at(0.3 + self.random(), self._deliver, HostDown(host=node.id, reason="the node is lost"))

    def superseded(self, proc: CoordinatorProc) -> None:
        proc.alive = False

    # ---------------------------------------------------------------- faults

    def plan(self) -> None:
        """Faults come at random times; afterwards all is healed and the run has to finish."""
        span_s = self.events_wanted * 0.08
        kinds = list(self.faults)
        for _ in range(FEWEST_FAULTS + int(2 * self.random())):
            kind = kinds[int(self.random() * len(kinds))]
            self.at(1.0 + span_s * self.random(), self._fault, kind)
        # Beside the others, so that all other seeds name the schedules that they always have.
        if self.seed % ANNOUNCED == 0 and not self.is_still:
            self.at(1.0 + span_s * self.random(), announce, self)
        if self.settings.hang_timeout_s is not None and not self.is_still:
            self.at(1.0 + span_s * self.random(), stand_still, self)
        self.at(span_s + 1.5, self.heal)

    def _fault(self, kind: str) -> None:
        if not self.healed:
            self.fault_count += 1
            self.faults[kind](self)

    def heal(self) -> None:
        self.healed = True
        self.pace = 0.3
        self.storage.outage = False
        self.lost_acks = 0
        for node in self.nodes:
            node.cut_until_s = node.full_until_s = node.stalled_until_s = 0.0
            if node.up and (node.actor is None or not node.actor.alive):
                self.start_actor(node)
            elif node.actor is not None:
                node.actor.wake_s = min(node.actor.wake_s, self.now_s)
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
                if member.wake_s > self.now_s and self.settings.hang_timeout_s is None:
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

    def stop(self) -> None:
        self._deliver(StopAsked(reason="preemption", within_s=8.0))

    def announce(self, node: Node, until_s: float) -> None:
        self._deliver(StopAsked(host=node.id, within_s=max(0.0, until_s - self.now_s), reason="preempted"))

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

    def copy_begins(self, source: Node, target: Node) -> None:
        """A transfer between two nodes is under way."""
        spring_copy_trap(self, source, target)

    def kill_early(self, group: Group) -> None:
        """A trainer dies soon after its group has staged its first piece."""
        if group is self.group and not self.healed:
            self.trap = ""
            victim = group.members[int(self.random() * len(group.members))]
            self.on(victim, 0.5 * self.random(), victim.die, "killed early")
