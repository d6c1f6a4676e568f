"""Simulated trainers: they join, restore, train in step with each other, and leave. Their decisions are core's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raystate.core.errors import RaystateError
from raystate.core.messages import (
    Ask,
    Failure,
    FlushAsked,
    FlushReply,
    Joined,
    JoinReply,
    LeaveAsked,
    LeaveReply,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    SnapshotId,
    Staged,
    TrainerWord,
    group_of,
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
        "asked",
        "choice",
        "clean",
        "connection",
        "group",
        "left",
        "machine",
        "name",
        "node",
        "number",
        "rank",
        "rollback",
        "set",
        "stage",
        "step",
        "stop_at",
        "want",
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
        self.connection = world.new_connection()
        self.name = f"t{self.connection}"
        self.set: SlotSet = node.new_set(self)
        self.number = 0  # of the last word that was written
        self.want = group.want
        self.rollback = group.rollback
        self.asked: tuple[SnapshotId, ...] = ()  # the promises of the flush or leave under way
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
            self.machine = Trainer(self.rank, len(self.group.members), reply.lineage, save_every_steps=self.world.save_every)
            self._speak(self.machine.word())
            self._ask_restore()
        elif kind is RestoreChoice:
            self.choice = reply
            assert self.machine is not None
            self.world.choices[reply.begins] = reply
            self.machine.begin(reply.begins, reply.base)
            self._speak(self.machine.word())
            if ask in self.world.from_current:
                self.world.check_choice(self, reply)
            self.world.on(self, 0.1 + 0.4 * self.world.random(), self._restore)
        elif kind is RestoreSettled:
            self._settled(reply)
        elif kind is FlushReply:
            self._flushed(reply)
        elif kind is LeaveReply:
            self.left = True
            if not reply.errors:
                self.world.check_promises(f"close of rank {self.rank}", self.asked)
            self.world.left(self, reply)
        elif kind is Failure:
            self.world.failures.append((self.rank, reply))
            self.die(f"{reply.error}: {reply.message}")

    def _ask_restore(self) -> None:
        machine = self.machine
        assert machine is not None
        self.stage = "restore"
        if machine.staging:  # a copy that is running comes to its end first
            self.world.on(self, 0.2, self._ask_restore)
            return
        self.world.wants[group_of(machine.lineage)] = self.want
        lineage, number = machine.lineage, self.number
        self.call(
            lambda ask: RestoreAsked(ask=ask, lineage=lineage, rank=self.rank, step=self.want, rollback=self.rollback, word=number)
        )

    def restore_again(self, want: int | None, rollback: bool) -> None:
        """The script calls restore in mid-training: what it has not staged yet is given up."""
        if self.stage == "train":
            self.want, self.rollback = want, rollback
            self._ask_restore()

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
            piece = None if node is None or not node.up else node.piece(rank, choice.step, choice.lineage, choice.again)
            if piece is None:
                ok, error = False, f"host {host} does not hold rank {rank}"
            else:
                lineage = piece.lineage
        elif choice.tier == "storage":
            if choice.step not in world.storage.visible():
                raise Violation(f"restore from storage of step {choice.step}, which is not visible")
        self.group.restored[self.rank] = (choice.tier, choice.step, lineage)
        self.call(lambda ask: RestoreTried(ask=ask, lineage=choice.begins, rank=self.rank, step=choice.step, ok=ok, error=error))

    def _settled(self, reply: RestoreSettled) -> None:
        assert self.machine is not None
        self.world.check_settled(self.group, self.machine.lineage, reply.step)
        self.machine.settled(ahead=reply.ahead, safe=reply.safe)
        self.step = max(0, reply.step)
        self.stage = "train"
        self.group.called[self.rank] = self.step
        self.world.step_done(self.group)

    # ---------------------------------------------------------------- training

    def _speak(self, word: TrainerWord) -> None:
        self.set.word = word
        self.number = word.number
        actor = self.node.actor
        if actor is not None and actor.alive:
            actor.poke()

    def save(self, step: int, force: bool = False) -> None:
        """One step is computed; save() is called."""
        machine, world = self.machine, self.world
        assert machine is not None
        if self.stage != "train":
            return
        try:
            out = self.set.word_out
            busy = machine.staging and world.random() < 0.5
            decision = machine.on_save(step, force=force, host_word=out, stager_busy=busy)
        except RaystateError as error:
            self.die(f"{type(error).__name__}: {error}")
            return
        self._speak(decision.word)
        if decision.wait:
            world.on(self, 0.3, self.save, step, force)
            return
        self.step = step
        if decision.action == "stage":
            assert decision.slot is not None
            self._begin_slot(decision.slot, step, decision.again, decision.promised)
        elif decision.action == "hold":
            world.on(self, 0.5, self._unhold, decision.again)
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

    def _unhold(self, again: int) -> None:
        machine = self.machine
        assert machine is not None
        taken = machine.take_slot(self.set.word_out) if self.stage != "restore" and again == self._held_again() else None
        if taken is not None:
            self._begin_slot(taken[0], taken[1], again, True)
        elif machine.held is not None and again == self._held_again():
            self.world.on(self, 0.5, self._unhold, again)

    def _held_again(self) -> int:
        """A copy that waits for a slot is of the newest save."""
        machine = self.machine
        assert machine is not None
        return machine.again if machine.held == machine.newest else -1

    def flush(self) -> None:
        """wait_until_finished(): the other ranks train on."""
        machine = self.machine
        assert machine is not None
        if self.stage != "train" or self.ask is not None:
            return
        if machine.staging or machine.held is not None:
            self.world.on(self, 0.4, self.flush)
            return
        self.asked = promised = machine.promises
        lineage, number = machine.lineage, self.number
        self.call(lambda ask: FlushAsked(ask=ask, lineage=lineage, rank=self.rank, promised=promised, word=number))

    def _flushed(self, reply: FlushReply) -> None:
        machine = self.machine
        assert machine is not None
        if not reply.errors:
            self.world.check_promises(f"flush of rank {self.rank}", self.asked)
        machine.told(self.asked, lost=reply.lost)

    def _begin_slot(self, slot: int, step: int, again: int, promised: bool) -> None:
        self.world.check_reuse(self, slot)
        self.set.content[slot] = None
        world = self.world
        slow = world.random()
        world.on(self, 0.1 + (2.5 if slow > 0.85 else 0.4) * slow, self._staged, slot, step, again, promised)

    def _staged(self, slot: int, step: int, again: int, promised: bool) -> None:
        machine = self.machine
        assert machine is not None
        piece = Staged(
            rank=self.rank,
            world=machine.world,
            lineage=machine.lineage,
            step=step,
            again=again,
            layout="L",
            promised=promised,
            nbytes=1,
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
        if not machine.is_safe and self.stage == "train":
            self.save(machine.newest, force=True)
            if self.stage != "train":
                return
        self.stage = "leave"
        if machine.staging or machine.held is not None or self.ask is not None:
            self.world.on(self, 0.6, self.leave)
            return
        machine.closing()
        self._speak(machine.word())
        self.asked = promised = machine.promises
        lineage, number = machine.lineage, self.number
        self.call(
            lambda ask: LeaveAsked(ask=ask, lineage=lineage, rank=self.rank, last=machine.kept, promised=promised, word=number)
        )
