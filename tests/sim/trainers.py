"""Simulated trainers: they join, restore, train in step with each other, and leave. Their decisions are core's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raystate.core.errors import RaystateError
from raystate.core.messages import (
    Ask,
    Failure,
    Joined,
    JoinReply,
    LeaveAsked,
    LeaveReply,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    Staged,
    TrainerWord,
)
from raystate.core.trainer import Trainer
from tests.sim.storage import Violation

if TYPE_CHECKING:
    from tests.sim.world import World

from tests.sim.nodes import Node, Proc, SlotSet


class Group:
    """The trainers of one start of the worker group; a step's collective needs all of them."""

    __slots__ = ("acted", "called", "members", "name", "passed", "restored", "rollback", "want")

    def __init__(self, name: str):
        self.name = name
        self.members: list[TrainerProc] = []
        self.called: dict[int, int] = {}
        self.acted: dict[int, dict[int, int]] = {}  # proposal -> rank -> step at which it acted
        self.restored: dict[int, tuple[str, int, str]] = {}  # rank -> (tier, step, lineage) it has restored
        self.want: int | None = None
        self.rollback = False


class TrainerProc(Proc):
    """A trainer: joins, restores, trains, leaves."""

    __slots__ = (
        "ask",
        "choice",
        "clean",
        "group",
        "left",
        "machine",
        "node",
        "rank",
        "set",
        "stage",
        "step",
        "stop_at",
        "why",
        "world",
    )

    def __init__(self, world: World, group: Group, node: Node, rank: int):
        super().__init__()
        self.world = world
        self.group = group
        self.node = node
        self.rank = rank
        self.machine: Trainer | None = None
        self.set: SlotSet = node.new_set()
        self.set.trainer = self
        self.set.word = None
        self.ask: Any = None
        self.choice: RestoreChoice | None = None
        self.step = 0
        self.stage = "join"
        self.clean = False
        self.left = False
        self.stop_at: int | None = None
        self.why = ""

    # ---------------------------------------------------------------- life

    def die(self, why: str, *, clean: bool = False) -> None:
        if not self.alive:
            return
        self.alive = False
        self.clean = clean
        self.why = why
        world = self.world
        actor = self.node.actor
        if actor is not None and actor.alive:
            world.on(actor, 0.1 + 0.3 * world.random(), actor.trainer_gone, self)
        if not clean or self.stop_at is not None:
            world.group_broken(self.group)

    def call(self, build: Any) -> None:
        """Ask the Coordinator; asked again with the same name until it answers."""
        world = self.world
        world.asks += 1
        ask = Ask(f"q{world.asks}")
        self.ask = event = build(ask)
        world.callers[ask] = self
        self._send(event)

    def _send(self, event: Any) -> None:
        if self.ask is event:
            self.world.to_coordinator(self.node, event)
            self.world.on(self, 5.0, self._send, event)

    def begin(self) -> None:
        self.call(
            lambda ask: Joined(
                ask=ask,
                group=self.group.name,
                rank=self.rank,
                world=len(self.group.members),
                host=self.node.id,
                nonce=f"{self.group.name}r{self.rank}",
            )
        )

    def reply(self, ask: Any, reply: Any) -> None:
        if self.ask is None or self.ask.ask != ask:
            return
        self.ask = None
        kind = type(reply)
        if kind is JoinReply:
            self.machine = Trainer(
                self.rank, len(self.group.members), reply.lineage, save_every_steps=self.world.save_every, grants=self.set.grants
            )
            self._speak(self.machine.word())
            machine, group = self.machine, self.group
            self.stage = "restore"
            self.call(
                lambda ask: RestoreAsked(ask=ask, lineage=machine.lineage, rank=self.rank, step=group.want, rollback=group.rollback)
            )
        elif kind is RestoreChoice:
            self.choice = reply
            assert self.machine is not None
            self.world.choices[self.machine.lineage] = reply
            if ask in self.world.from_current:
                self.world.check_choice(self, reply)
            self.world.on(self, 0.1 + 0.4 * self.world.random(), self._restore)
        elif kind is RestoreSettled:
            self._settled(reply)
        elif kind is LeaveReply:
            self.left = True
            self.world.left(self, reply)
        elif kind is Failure:
            self.world.failures.append((self.rank, reply))
            self.die(f"{reply.error}: {reply.message}")

    def _restore(self) -> None:
        choice, machine = self.choice, self.machine
        assert choice is not None and machine is not None
        ok, error, lineage = True, "", ""
        world = self.world
        if choice.tier == "memory":
            # With another number of ranks each takes pieces of several old ranks; one is enough here.
            old = sorted(choice.hosts)
            rank, host = old[self.rank % len(old)]
            node = world.nodes_by_id.get(host)
            piece = None if node is None or not node.up else node.piece(rank, choice.step, choice.lineage)
            if piece is None:
                ok, error = False, f"host {host} does not hold rank {rank}"
            else:
                lineage = piece.lineage
        elif choice.tier == "storage":
            if choice.step not in world.storage.visible():
                raise Violation(f"restore from storage of step {choice.step}, which is not visible")
        self.group.restored[self.rank] = (choice.tier, choice.step, lineage)
        machine.restored(choice.step)
        self._speak(machine.word())
        self.call(lambda ask: RestoreTried(ask=ask, lineage=machine.lineage, rank=self.rank, step=choice.step, ok=ok, error=error))

    def _settled(self, reply: RestoreSettled) -> None:
        assert self.machine is not None
        self.world.check_settled(self.group, self.machine.lineage, reply.step)
        self.step = max(0, reply.step)
        self.stage = "train"
        self.group.called[self.rank] = self.step
        self.world.step_done(self.group)

    # ---------------------------------------------------------------- training

    def _speak(self, word: TrainerWord) -> None:
        self.set.word = word
        actor = self.node.actor
        if actor is not None and actor.alive:
            actor.poke()

    def save(self, step: int) -> None:
        """One step is computed; save() is called."""
        machine, world = self.machine, self.world
        assert machine is not None
        if self.stage != "train":
            return
        try:
            out = self.set.word_out
            decision = machine.on_save(step, host_word=out, stager_busy=bool(machine._staging) and world.random() < 0.5)
        except RaystateError as error:
            self.die(f"{type(error).__name__}: {error}")
            return
        self._speak(decision.word)
        if decision.wait:
            world.on(self, 0.3, self.save, step)
            return
        self.step = step
        if decision.action == "stage":
            assert decision.slot is not None
            self._begin_slot(decision.slot, step, decision.durable)
        elif decision.action == "hold":
            world.on(self, 0.5, self._unhold)
        else:
            world.skipped.add((machine.lineage, step))
        if decision.dropped is not None:
            world.skipped.add((machine.lineage, decision.dropped))
        world.check_acted(self, step, decision.stop)
        if decision.stop:
            self.stop_at = step
            self.stage = "stopping"
            world.on(self, 0.5, self._stopping, world.now_s + 6.0)
            return
        self.group.called[self.rank] = step
        world.step_done(self.group)

    def _stopping(self, until_s: float) -> None:
        out = self.set.word_out
        assert self.stop_at is not None
        if (out is not None and out.durable_step >= self.stop_at) or self.world.now_s >= until_s:
            self.die("interrupted", clean=True)
        else:
            self.world.on(self, 0.7, self._stopping, until_s)

    def _unhold(self) -> None:
        machine = self.machine
        assert machine is not None
        taken = machine.take_slot(self.set.word_out)
        if taken is not None:
            self._begin_slot(taken[0], taken[1], True)
        elif machine.held is not None:
            self.world.on(self, 0.5, self._unhold)

    def _begin_slot(self, slot: int, step: int, durable: bool) -> None:
        self.world.check_reuse(self, slot)
        self.set.content[slot] = None
        world = self.world
        slow = world.random()
        world.on(self, 0.1 + (2.5 if slow > 0.85 else 0.4) * slow, self._staged, slot, step, durable)

    def _staged(self, slot: int, step: int, durable: bool) -> None:
        machine = self.machine
        assert machine is not None
        piece = Staged(
            rank=self.rank, world=machine.world, lineage=machine.lineage, step=step, layout="L", durable=durable, nbytes=1
        )
        self.set.content[slot] = piece
        machine.staged(slot, step)
        self.world.count_staged(piece)
        if self.world.trap == "stage":
            self.world.kill_early(self.group)
        self._speak(machine.word())

    def leave(self) -> None:
        """close(): every save is staged, then all ranks leave."""
        machine = self.machine
        assert machine is not None
        self.stage = "leave"
        if machine.word().pending:
            self.world.on(self, 0.6, self.leave)
            return
        machine.closing()
        self._speak(machine.word())
        self.call(lambda ask: LeaveAsked(ask=ask, lineage=machine.lineage, rank=self.rank, step=machine.newest_kept))
