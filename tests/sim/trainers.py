"""Simulated trainers: they join, restore, train in step with each other, and leave. Their decisions are core's."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from raystate.core.formats.errors import RaystateError, StepOrderError
from raystate.core.formats.messages import (
    Ask,
    DeleteAsked,
    Failure,
    FlushAsked,
    FlushReply,
    Joined,
    JoinReply,
    LeaveAsked,
    LeaveReply,
    Reply,
    RestoreAsked,
    RestoreChoice,
    RestoreSettled,
    RestoreTried,
    SnapshotId,
    Staged,
    TrainerWord,
    group_of,
)
from raystate.core.trainer.machine import Trainer
from tests.sim import mistakes
from tests.sim.nodes import SLOTS, Node, Proc, SlotSet
from tests.sim.storage import BEFORE, TORN, Promised, Saved, Violation

if TYPE_CHECKING:
    from tests.sim.coordinators import CoordinatorProc
    from tests.sim.world import World


class Group:
    """The trainers of one start of the worker group; a step's collective needs all of them."""

    def __init__(self, name: str):
        self.name = name
        self.members: list[TrainerProc] = []
        self.called: dict[int, int] = {}
        self.acted: dict[int, dict[int, int]] = {}  # proposal -> rank -> step at which it acted
        self.restored: dict[int, tuple[str, int, Saved]] = {}  # rank -> (tier, step, whose bytes) it has restored
        self.want: int | None = None
        self.rollback = False
        self.asked: set[int] = set()  # ranks that have asked for the restore under way
        self.misled = False  # a Coordinator that had slept has sent it on: the owner of the run knows nothing of what it stages


class TrainerProc(Proc):
    """A trainer: joins, restores, trains, leaves."""

    def __init__(self, world: World, group: Group, node: Node, rank: int):
        super().__init__()
        self.world = world
        self.group = group
        self.node = node
        self.rank = rank
        self.joined: Trainer | None = None  # the machine of one that has
        self.connection = world.new_connection()
        self.name = f"t{self.connection}"
        self.set: SlotSet  # once its HostActor has allotted one
        self.number = 0  # of the last word that was written
        self.want = group.want
        self.rollback = group.rollback
        self.asked: tuple[SnapshotId, ...] = ()  # the promises of the flush or leave under way
        self.asked_held: list[tuple[SnapshotId, Saved]] = []  # what all ranks held when it asked
        self.asked_shown: list[SnapshotId] = []  # promises that had been in storage when it asked
        self.restores = 0
        self.leaving = False
        self.busy_until_s = 0.0
        self.promising: SnapshotId | None = None  # its capture is to be promised
        self.held: Saved | None = None  # whose copy waits on the device for a slot
        self.promised: list[Promised] = []  # what save() has returned True for
        self.newest_staged: tuple[Saved, int] | None = None
        self.deleting: tuple[int, str | None] = (-1, None)  # the step, and the save that is to go
        self.ask: Any = None
        self.choice: RestoreChoice | None = None
        self.chooser: CoordinatorProc | None = None  # that owned the run then; None: one that had slept
        self.step = 0
        self.stage = "join"
        self.clean = False
        self.left = False
        self.ends_s = 0.0  # its process has ended by then
        self.stop_at: int | None = None
        self.why = ""

    @property
    def machine(self) -> Trainer:
        """What it decides by."""
        assert self.joined is not None
        return self.joined

    @property
    def line(self) -> Saved:
        """What this script does from one restore to the next; the same on all ranks."""
        return f"{self.group.name}.{self.restores}"

    # ---------------------------------------------------------------- life

    def die(self, why: str, *, clean: bool = False) -> None:
        if not self.alive:
            return
        self.alive = False
        self.clean = clean
        self.why = why
        world = self.world
        if not clean and self.joined is not None and self.machine.staging:
            self._outlive_its_lock()
        actor = self.node.actor
        if actor is not None and actor.alive:
            world.on(actor, 0.1 + 0.3 * world.random(), actor.trainer_gone, self)
        if not clean or self.stop_at is not None:
            world.group_broken(self.group)

    def _outlive_its_lock(self) -> None:
        """The kernel lets go of its lock first. What a device writes to the slot under way may come until its process has ended."""
        later_s = 3.0 * Random(f"{self.world.seed} {self.name}").random()
        self.ends_s = self.world.now_s + later_s
        one, (slot, *_) = self.set, self.machine.slots.staging

        def write() -> None:
            one.saved[slot] = TORN

        self.world.at(later_s, write)

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
        actor = self.node.actor
        if actor is None or not actor.awake:  # it asks until somebody allots it slots
            self.world.on(self, 0.3, self.begin)
            return
        allotted = self.node.new_set(self, actor)
        if allotted is None:
            self.world.on(self, 0.3, self.begin)
            return
        self.set = allotted
        self.call(
            lambda ask: Joined(
                ask=ask,
                group=self.group.name,
                rank=self.rank,
                world=len(self.group.members),
                host=self.node.id,
            )
        )

    def reply(self, ask: Any, reply: Any) -> None:
        if self.ask is None or self.ask.ask != ask:
            return
        asked, self.ask = type(self.ask), None
        kind = type(reply)
        if kind is JoinReply:
            self.joined = Trainer(
                self.rank,
                len(self.group.members),
                reply.lineage,
                snapshot_every=self.world.settings.snapshot_every_steps,
                save_every_steps=self.world.save_every,
            )
            self._speak(self.machine.word())
            self._ask_restore()
        elif kind is RestoreChoice:
            self.choice, self.chooser = reply, self.world.from_current.get((ask, reply.begins))
            self.world.choices[reply.begins] = reply
            if self.chooser is not None:
                self.world.check_choice(self, reply)
            else:  # of a Coordinator that had been superseded: the hosts that didn't know it yet have discarded what it left behind
                self.world.floor = min(self.world.floor, reply.step)
            self.world.on(self, 0.1 + 0.4 * self.world.random(), self._restore)
        elif kind is RestoreSettled:
            self._settled(reply)
        elif asked is DeleteAsked:
            self._deleted(reply)
        elif kind is FlushReply:
            self._flushed(reply)
        elif kind is LeaveReply:
            self.left = True
            self._told(f"close of rank {self.rank}", reply.errors)
            self.world.left(self, reply)
        elif kind is Failure:
            if asked is LeaveAsked:
                self.world.check_losses(self, [reply.message], self.asked_held)
            self.world.failures.append((self.rank, reply))
            self.die(f"{reply.error}: {reply.message}")

    def _ask_restore(self) -> None:
        machine = self.machine
        self.stage = "restore"
        # A copy, or a call, that is under way comes to its end first.
        if machine.staging or self.promising is not None or self.ask is not None:
            self.world.on(self, 0.2, self._ask_restore)
            return
        self.group.asked.add(self.rank)
        if len(self.group.asked) == len(self.group.members):
            self.group.asked.clear()
            self.world.all_asked(self.group)
        self.restores += 1
        self.held = None
        self.newest_staged = None
        self.world.wants[group_of(machine.lineage)] = self.want
        lineage, number = machine.lineage, self.number
        self.call(
            lambda ask: RestoreAsked(ask=ask, lineage=lineage, rank=self.rank, step=self.want, rollback=self.rollback, word=number)
        )

    def restore_again(self, want: int | None, rollback: bool) -> None:
        """The script calls restore in mid-training: what it has not staged yet is given up."""
        if self.stage == "train":
            self.want, self.rollback = want, rollback
            self.group.want = want
            self._ask_restore()

    def _restore(self) -> None:
        choice, machine = self.choice, self.machine
        assert choice is not None
        ok, error, saved = True, "", BEFORE
        world = self.world
        if choice.tier == "memory":
            # With another number of ranks each takes pieces of several old ranks; one is enough here. Any host that holds it will do.
            rank, hosts = choice.holders[self.rank % len(choice.holders)]
            nodes = [node for host in hosts if (node := world.nodes_by_id.get(host)) is not None and node.up]
            pieces = [piece for node in nodes if (piece := node.piece(rank, choice.step, choice.lineage)) is not None]
            if not pieces:
                ok, error = False, f"hosts {list(hosts)} do not hold rank {rank}"
            else:
                saved = pieces[0]
        elif choice.tier == "storage":
            if choice.step in world.storage.visible():
                saved = world.storage.shown_bytes(choice.step)
            elif self.chooser is world.current:
                raise Violation(f"restore from storage of step {choice.step}, which is not visible")
            else:  # another one owns the run now, and may have retired it
                ok, error = False, f"step {choice.step} is not there"
        self.group.restored[self.rank] = (choice.tier, choice.step, saved)
        step, begins, lineage = choice.step, choice.begins, machine.lineage
        self.call(
            lambda ask: RestoreTried(
                ask=ask,
                lineage=lineage,
                rank=self.rank,
                step=step,
                begins=begins,
                ok=ok,
                error=error,
            )
        )

    def _settled(self, reply: RestoreSettled) -> None:
        assert self.choice is not None
        self.machine.begin(self.choice.begins, self.choice.origin)
        self.promised = []  # a restore ends them
        self.world.check_settled(self, reply.step)
        current = self.world.current
        self.group.misled = current is not None and reply.advice[0] < current.core.attempt
        self.machine.settled(ahead=reply.ahead, safe=reply.safe, saving=reply.saving)
        self._speak(self.machine.word())
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

    def enter(self, section: str, timeout_s: float) -> None:
        """A section with a time-out of its own begins."""
        self._speak(replace(self.machine.word(), section=section, section_s=timeout_s))

    def save(self, step: int, again: bool = False) -> None:
        """One step is computed; save() is called. `again`: the script saves the step once more, by force, and goes on."""
        if self._save(step, again):
            if again:
                self.world.on(self, 0.3 + 0.4 * self.world.random(), self.save, step + 1)
            elif self.stage == "train":
                self.group.called[self.rank] = step
                self.world.step_done(self.group)

    def _measure(self, step: int) -> None:
        """The intervals change every few steps, where they aren't numbers."""
        if self.world.settings.save_measured:
            self.machine.times.saves.cost_s = Random(f"{self.world.seed} {step // 3}").choice((None, None, None, 0.0, 30.0))
        if self.world.settings.snapshot_every_steps is None:
            times, costs = self.machine.times, Random(f"{self.world.seed} {step // 5}")
            times.step_s, times.snapshot_s = costs.uniform(0.5, 1.0), costs.choice((None, 0.001, 0.05, 0.1))

    def _save(self, step: int, force: bool) -> bool:
        """One call of save(); True if it has returned."""
        machine, world = self.machine, self.world
        if self.stage != "train":
            return False
        out = self.set.word_out
        busy = machine.staging and world.random() < 0.5
        if world.random() < 0.05:
            mistakes.make(machine, step, force, out, busy)
        late = machine.slots.late
        self._measure(step)
        try:
            decision = machine.on_save(step, force=force, host_word=out, stager_busy=busy)
        except StepOrderError:
            self.step = step
            return True  # the script goes on without: the steps of another past end somewhere
        except RaystateError as error:
            self.die(f"{type(error).__name__}: {error}")
            return False
        self._speak(decision.word)
        if decision.wait:
            if self.stage == "train" and not self.leaving:
                world.on(self, 0.3, self.save, step, force)
            return False
        self.step = step
        if decision.promised:
            self._promise(SnapshotId(machine.lineage, step))
        if decision.action == "stage":
            assert decision.slot is not None
            self._begin_slot(decision.slot, step, decision.promised, self.line)
        elif decision.action == "hold":
            self.held = self.line
            world.on(self, 0.5, self._unhold, self.line)
        elif decision.action == "promise":
            assert decision.slot is not None
            self._promise_slot(decision.slot, SnapshotId(machine.lineage, step))
        elif decision.action == "skip":
            world.on(self, 0.2 + world.random(), self._catch_up, step, self.line)
        elif not decision.ignored:
            world.skipped.add((machine.lineage, step))
        if late is not None and machine.slots.late != late:
            world.skipped.add((machine.lineage, late))
        if decision.dropped is not None:
            world.skipped.add((machine.lineage, decision.dropped.step))
        world.check_acted(self, step, decision.stop)
        if decision.stop:
            self.stop_at = step
            self.stage = "stopping"
            world.on(self, 0.5, self._stopping, world.now_s + 6.0)
        return True

    def _promise(self, key: SnapshotId) -> None:
        """The bytes that the line began with keep the promise of the same step, too."""
        _, restored_step, restored = self.group.restored.get(self.rank, ("", -1, BEFORE))
        self.promised.append((key, (restored, self.line) if restored_step == key.step else (self.line,)))

    def _stopping(self, until_s: float) -> None:
        out = self.set.word_out
        assert self.stop_at is not None
        if (out is not None and out.durable_step >= self.stop_at) or self.world.now_s >= until_s:
            self.die("interrupted", clean=True)
        else:
            self.world.on(self, 0.7, self._stopping, until_s)

    def _unhold(self, saved: Saved) -> None:
        machine = self.machine
        word = self.set.word_out
        if word is not None and word.failure is not None:
            self.die(f"{word.failure.error}: {word.failure.message}")
        if machine.slots.held is None or saved != self.held:
            return  # another one has taken its place, or a restore has given it up
        taken = machine.take_slot(self.set.word_out)
        if taken is not None:
            self._begin_slot(taken[0], taken[1], True, saved)
        else:
            self.world.on(self, 0.5, self._unhold, saved)

    def _catch_up(self, step: int, saved: Saved) -> None:
        """The loop stands still: what was skipped is snapshotted as soon as there is a slot."""
        machine = self.machine
        if machine.slots.late != step or machine.slots.held is not None or saved != self.line or self.leaving:
            return  # it has gone on
        taken = machine.take_slot(self.set.word_out)
        if taken is not None:
            self._begin_slot(taken[0], taken[1], False, saved)
        else:
            self.world.on(self, 0.5, self._catch_up, step, saved)

    def flush(self) -> None:
        """wait_until_finished(): the other ranks train on."""
        machine = self.machine
        if self.stage != "train" or self.ask is not None:
            return
        if machine.staging or machine.slots.held is not None or self.promising is not None:
            self.world.on(self, 0.4, self.flush)
            return
        promised = self._ask_about_promises()
        lineage, number = machine.lineage, self.number
        self.call(lambda ask: FlushAsked(ask=ask, lineage=lineage, rank=self.rank, promised=promised, word=number))

    def _ask_about_promises(self) -> tuple[SnapshotId, ...]:
        machine = self.machine
        self.asked = machine.promises.made
        asked = set(self.asked)
        forgotten = [key for key, _ in self.promised if key not in asked]
        if forgotten:
            raise Violation(f"true means durable: rank {self.rank} has promised {forgotten} and forgotten it")
        group = self.group
        self.asked_held = [(key, tries[-1]) for key, tries in self.promised if self.world.held_by_all(group, tries[-1], key.step)]
        shown = self.world.storage.ever_shown
        self.asked_shown = [key for key, tries in self.promised if any((saved, key.step) in shown for saved in tries)]
        return self.asked

    def _flushed(self, reply: FlushReply) -> None:
        machine = self.machine
        for key in self.asked_shown:
            if key in reply.lost:
                raise Violation(
                    f"false loss: rank {self.rank} is told that {key} is lost, and it had been in storage: {reply.errors}"
                )
        self._told(f"flush of rank {self.rank}", reply.errors, (*reply.lost, *reply.undecided))
        machine.promises.told(self.asked)

    def _told(self, who: str, errors: tuple[str, ...], named: tuple[SnapshotId, ...] = ()) -> None:
        """What was promised before the question is durable, or the answer says which is not."""
        asked = set(self.asked)
        if not errors or named:
            self.world.check_promises(who, [one for one in self.promised if one[0] in asked and one[0] not in named])
        self.world.check_losses(self, errors, self.asked_held)
        self.promised = [one for one in self.promised if one[0] not in asked]

    def delete(self) -> None:
        """delete(step) of a step that is there, or is not."""
        storage = self.world.storage
        if self.stage != "train" or self.ask is not None:
            return
        steps = storage.visible()
        step = steps[int(self.world.random() * len(steps))] if steps and self.world.random() < 0.9 else 1000
        self.deleting = (step, storage.shown_save(step))
        self.call(lambda ask: DeleteAsked(ask=ask, step=step))

    def _deleted(self, reply: Reply) -> None:
        step, save = self.deleting
        if type(reply) is FlushReply and save is not None and self.world.storage.shown_save(step) == save:
            raise Violation(f"delete: step {step} of {save} is said to be deleted and is visible")

    def grow(self) -> None:
        """The state has grown: larger slots, beside those that still hold something."""
        machine, node = self.machine, self.node
        if self.stage != "train" or machine.staging or self.promising is not None or self.set.large:
            return
        if node.actor is None or not node.actor.awake:
            return
        larger = node.larger_set(self, node.actor)
        if larger is not None:
            self.set = larger
            machine.new_slots(SLOTS)
            self._speak(machine.word())
            node.actor.meet(self)

    def _begin_slot(self, slot: int, step: int, promised: bool, saved: Saved) -> None:
        self.world.check_reuse(self, slot)
        self.set.content[slot] = None
        world = self.world
        slow = world.random()
        # One copy after the other.
        self.busy_until_s = max(self.busy_until_s, world.now_s) + 0.1 + (2.5 if slow > 0.85 else 0.4) * slow
        world.on(self, self.busy_until_s - world.now_s, self._staged, slot, step, promised, saved)

    def _staged(self, slot: int, step: int, promised: bool, saved: Saved) -> None:
        machine = self.machine
        piece = Staged(
            rank=self.rank,
            world=machine.world,
            lineage=machine.lineage,
            step=step,
            layout="L",
            promised=promised,
            nbytes=1,
        )
        self.set.content[slot] = piece
        self.set.saved[slot] = saved
        self.newest_staged = (saved, step)
        machine.staged(slot, step)
        self.world.count_staged(piece, self.node)
        if self.world.trap == "stage":
            self.world.kill_early(self.group)
        self._speak(machine.word())

    def _promise_slot(self, slot: int, key: SnapshotId) -> None:
        """Behind the copy that is under way; its HostActor may have emptied the slot by then."""
        machine = self.machine
        self.promising = key
        if slot in machine.slots.staging:
            self.world.on(self, 0.2, self._promise_slot, slot, key)
            return
        self.promising = None
        content = self.set.content[slot]
        if content is not None and content.id == key:
            self.set.content[slot] = replace(content, promised=True)
        else:
            machine.promises.broke(key, f"slot {slot} does not hold step {key.step} any more")
        self._speak(machine.word())

    def leave(self) -> None:
        """close(): every save is staged, then all ranks leave."""
        machine = self.machine
        self.leaving = True
        if self.stage == "train" and not machine.is_safe:
            returned = self._save(machine.newest, force=True)
            if self.stage != "train" or not self.alive:
                return
            if not returned:
                self.world.on(self, 0.3, self.leave)
                return
        self.stage = "leave"
        if machine.staging or machine.slots.held is not None or self.promising is not None or self.ask is not None:
            self.world.on(self, 0.6, self.leave)
            return
        machine.closing()
        self._speak(machine.word())
        promised = self._ask_about_promises()
        lineage, number = machine.lineage, self.number
        self.call(
            lambda ask: LeaveAsked(ask=ask, lineage=lineage, rank=self.rank, last=machine.kept, promised=promised, word=number)
        )
