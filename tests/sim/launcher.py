"""Who starts the worker groups, and what the script does that all of them run."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, cast

from raystate.core.formats.messages import (
    Finish,
    LeaveReply,
    Settings,
    StopAsked,
)
from tests.sim.coordinators import CoordinatorProc
from tests.sim.network import Network
from tests.sim.nodes import Node
from tests.sim.storage import Storage, Violation
from tests.sim.trainers import Group, TrainerProc

if TYPE_CHECKING:
    from tests.sim.world import World

LEAVE_AFTER = 2  # steps, once all is healed
LOOK_S = 2.0  # an elastic launcher looks so often whether there is room for more


class Launcher(Network):
    """The worker groups of a schedule, one after the other."""

    def __init__(self, storage: Storage, settings: Settings, rng: Random):
        super().__init__(storage, settings, rng)
        self.nodes: list[Node] = []
        self.dead_first: tuple[int, ...] = ()
        self.ended = False
        self.groups = 0
        self.pending_start = False
        self.rolling_back = False  # the next group goes back to an older step
        self.restoring_next = False  # the script restores at its next step
        self.leaving_at = -1
        self.final: LeaveReply | None = None
        self.is_elastic = False

    def start_coordinator(self, dead: tuple[int, ...]) -> None:
        proc = CoordinatorProc(cast("World", self), f"w{len(self.coordinators) + 1}", dead)
        self.coordinators.append(proc)
        self.on(proc, 0.1, proc.claim)

    def dead_attempts(self) -> tuple[int, ...]:
        return self.dead_first + tuple(proc.core.attempt for proc in self.coordinators if not proc.alive and proc.core.attempt)

    # ---------------------------------------------------------------- groups

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
            # A person goes back to an older step, and most often gives up the newer ones.
            steps = self._stored()
            if len(steps) > 1:
                group.want = steps[0]
                group.rollback = self.rolling_back or self.random() < 0.7
                if group.rollback:
                    self.floor = self.safe_step = -1
            self.rolling_back = False
        world = cast("World", self)
        group.members = [TrainerProc(world, group, node, rank) for rank, node in enumerate(nodes)]
        for member in group.members:
            self.on(member, 0.1 + 0.2 * self.random(), member.begin)
        self.at(30.0, self._hurry, group)
        if self.is_elastic:
            self.at(LOOK_S, self._look, group)

    def _look(self, group: Group) -> None:
        """Nodes that have come back are room for more ranks: the group is to make way, at one step."""
        if group is not self.group or self.healed or self.final is not None:
            return
        if sum(node.up for node in self.nodes) > len(group.members):
            self._deliver(StopAsked(reason="the run grows", within_s=None, group=group.name))
        self.at(LOOK_S, self._look, group)

    def _stored(self) -> list[int]:
        return sorted(set(self.storage.visible()) & {one.step for one in self.storage.tail.live})

    def _hurry(self, group: Group) -> None:
        """A launcher's own patience: a group that does not get to train is started again."""
        if group is self.group and any(member.stage not in ("train", "leave", "stopping") for member in group.members):
            self.group_broken(group)

    def group_broken(self, group: Group) -> None:
        if group is self.group and not self.pending_start and self.final is None:
            self.pending_start = True
            self.at(0.5 + self.random(), self.launch)

    # ---------------------------------------------------------------- the script

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
            self.leaving_at = step + LEAVE_AFTER
        leave = self.healed and step >= self.leaving_at
        if leave:
            for member in members:
                self.on(member, 0.1, member.leave)
            return
        chance = 1.0 if self.healed else self.random()
        if chance < 0.03 or (self.restoring_next and not self.healed):
            self.restoring_next = False
            self._restore_again(group)
            return
        again, caller = chance < 0.07 and step > 0, members[step % len(members)]
        if 0.07 <= chance < 0.14:
            self.on(caller, 0.1 * self.random(), caller.flush)
        elif 0.14 <= chance < 0.17:
            self.on(caller, 0.1 * self.random(), caller.delete)
        elif 0.17 <= chance < 0.22:
            self.on(caller, 0.1 * self.random(), caller.grow)
        for member in members:
            if again:
                self.on(member, 0.1 * self.random(), member.save, step, True)
            else:
                self.on(member, 0.4 + 0.4 * self.random(), member.save, step + 1)

    def _restore_again(self, group: Group) -> None:
        """The script restores in mid-training: the newest step, or an older one, most often for good."""
        steps = self._stored()
        want = steps[0] if len(steps) > 1 and self.random() < 0.5 else None
        rollback = want is not None and self.random() < 0.6
        group.called.clear()
        group.restored.clear()
        if want is not None:
            self.floor = self.safe_step = -1
        for member in group.members:
            self.on(member, 0.1 + 0.5 * self.random(), member.restore_again, want, rollback)

    # ---------------------------------------------------------------- the end

    def left(self, trainer: TrainerProc, reply: LeaveReply) -> None:
        if not self.healed:
            raise Violation("a rank has left before the end")
        self.final = reply
        trainer.die("left", clean=True)
        group, machine = trainer.group, trainer.machine
        if all(member.left for member in group.members):
            if reply.step not in self.storage.visible():
                raise Violation(f"close: step {reply.step} is said to be durable and is not visible")
            stable = self.true_stable.get(machine.lineage, -1)
            if reply.step < stable:
                raise Violation(f"close: step {stable} was complete in memory, but only step {reply.step} is durable")
            choice = self.choices.get(machine.lineage)
            stable = max(stable, -1 if choice is None else choice.step)
            if stable < machine.newest - 8:
                raise Violation(f"liveness: at step {machine.newest} only step {stable} is complete on all hosts")
            self.ended = True

    def finished(self, proc: CoordinatorProc, command: Finish) -> None:
        if self.storage.visible() or self.floor >= 0:
            if not self.healed:
                raise Violation(f"finished before the end: {command.reason}")
            return
        proc.alive = False  # it has let go of a run without a step: the next group makes another one
        self.start_coordinator(self.dead_attempts())
