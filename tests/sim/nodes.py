"""One simulated node: its arena, and its HostActor, whose decisions are core's `Host`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from raystate.core.formats.host_messages import (
    Connected,
    Disconnected,
    Empty,
    EndCopy,
    Examined,
    FetchCopy,
    FillCopy,
    Hold,
    HoldEnded,
    Kill,
    Remember,
    RemoveSet,
    SetFound,
    SetRead,
    SetRemoved,
    SlotAddress,
    Speak,
)
from raystate.core.formats.messages import (
    Event,
    HostId,
    HostOrder,
    HostWord,
    SnapshotId,
    Staged,
    Tick,
    TrainerWord,
    Write,
    Written,
    save_order,
)
from raystate.core.host import slot_sets
from raystate.core.host.machine import Host
from tests.sim.copying import Transfers
from tests.sim.storage import BEFORE, Saved, Token, Violation

if TYPE_CHECKING:
    from tests.sim.trainers import TrainerProc
    from tests.sim.world import World

SLOTS = 3
MAX_SETS = 5  # of a node
MAX_COPY_SETS = 5  # of a node, for one copy: of the present ranks, and of those before that a recovery may need
REPORT_INTERVAL_S = 0.4
HEARTBEAT_S = 3.5
LOOK_S = 1.0  # it reads all words so often, although nobody rings


class Proc:
    """A process: it may be dead, or asleep until `wake_s`."""

    def __init__(self) -> None:
        self.alive = True
        self.wake_s = 0.0


class SlotSet:
    """The slots of one trainer, and the two words. They stay when a process dies."""

    def __init__(self, index: int, large: bool, copies_of: int | None = None):
        self.index = index
        self.large = large  # for a state that has grown
        self.copies_of = copies_of
        self.content: list[Staged | None] = [None] * SLOTS
        self.saved: list[Saved] = [BEFORE] * SLOTS  # whose bytes `content` has, whatever its header says
        self.writing = [0] * SLOTS  # how many saves read the slot right now, or transfers write it
        self.trainer: TrainerProc | None = None
        self.word: TrainerWord | None = None  # the trainer's
        self.word_out: HostWord | None = None  # the host's
        self.read: TrainerWord | None = None  # the last word that its HostActor has read

    def state(self, now_s: float) -> slot_sets.TrainerState:
        """Who has it."""
        trainer = self.trainer
        if trainer is None:
            return "gone"
        return slot_sets.trainer_state(locked=trainer.alive, came=True, left=trainer.clean, runs=now_s < trainer.ends_s)

    @property
    def living(self) -> TrainerProc | None:
        return self.trainer if self.trainer is not None and self.trainer.alive else None


class Node:
    """One machine with its arena."""

    def __init__(self, world: World, index: int, generation: int):
        self.world = world
        self.index = index
        self.id = HostId(f"h{index}g{generation}")
        self.up = True
        self.cut_until_s = 0.0  # its network is cut until then
        self.heard_s = 0.0  # when it sent the last message that came through
        self.full_until_s = 0.0  # it has no memory for copies until then
        self.stalled_until_s = 0.0  # transfers to it stand still until then
        self.sets: dict[int, SlotSet] = {}
        self.made = 0  # sets
        self.actor: HostProc | None = None
        self.memory = Remember()
        self.incarnations = 0

    def add_set(self, *, large: bool = False, copies_of: int | None = None) -> SlotSet:
        one = self.sets[self.made] = SlotSet(self.made, large, copies_of)
        self.made += 1
        copies = len(self.sets) - len(self.own_sets)
        if len(self.own_sets) > MAX_SETS or copies > MAX_COPY_SETS * max(1, self.world.settings.replicas):
            raise Violation(f"bounded memory: node {self.id} has {len(self.own_sets)} slot sets, and {copies} for copies")
        return one

    @property
    def own_sets(self) -> list[SlotSet]:
        """Those of trainers."""
        return [one for one in self.sets.values() if one.copies_of is None]

    @property
    def domain(self) -> str:
        """What it is lost together with."""
        domains = self.world.domains
        return f"d{self.index % domains}" if domains else ""

    def new_set(self, trainer: TrainerProc, actor: HostProc) -> SlotSet | None:
        """A set whose trainer is gone, else a new one: allotted to this one, with empty words. None: to be asked for again soon."""
        states = [(one.state(self.world.now_s), one) for one in self.own_sets if not one.large]
        one = next((one for state, one in states if state == "gone"), None)
        if one is None:
            if any(state == "ending" for state, _ in states):
                return None
            self.sweep()
            one = self.add_set()
        self._allot(one, trainer, actor)
        return one

    def larger_set(self, trainer: TrainerProc, actor: HostProc) -> SlotSet | None:
        """The trainer's state has grown: a second set beside the first; None: there is no room."""
        self.sweep()
        if len(self.own_sets) >= MAX_SETS - 1:
            return None
        one = self.add_set(large=True)
        actor.read(trainer.set)
        self._allot(one, trainer, actor)
        return one

    @staticmethod
    def _allot(one: SlotSet, trainer: TrainerProc, actor: HostProc) -> None:
        one.trainer, one.word, one.word_out, one.read = trainer, None, None, None
        actor.found(one)

    def sweep(self) -> None:
        """Remove the sets of dead trainers that nobody needs."""
        actor = self.actor
        if actor is None or not actor.awake:
            return
        for one in [one for one in self.own_sets if one.state(self.world.now_s) == "gone" and len(self.own_sets) > 2]:
            if not actor.machine.is_needed(one.index):
                del self.sets[one.index]
                actor.feed(SetRemoved(index=one.index))

    @property
    def reachable(self) -> bool:
        """It can answer now."""
        return not self.world.cut(self) and self.actor is not None and self.actor.awake

    def piece(self, rank: int, step: int, lineage: str) -> Saved | None:
        """The held piece of a rank, as a trainer finds it: by step, trusting that other lineages were discarded."""
        found: Saved | None = None
        for content, saved, _ in self.held():
            if content.rank == rank and content.step == step:
                if content.lineage == lineage:
                    return saved
                found = saved
        return found

    def held(self) -> Iterator[tuple[Staged, Saved, SlotSet]]:
        """By the headers of the slots, and whose bytes it really is."""
        for one in self.sets.values():
            for content, saved in zip(one.content, one.saved, strict=True):
                if content is not None:
                    yield content, saved, one

    def has(self, rank: int, key: SnapshotId) -> bool:
        """A header in the arena says so."""
        return any(content.rank == rank and content.id == key for content, _, _ in self.held())

    def holds(self, rank: int, step: int, saved: Saved) -> bool:
        """These very bytes are in the arena, and it can answer."""
        return self.reachable and any((one.rank, one.step, theirs) == (rank, step, saved) for one, theirs, _ in self.held())


class HostProc(Proc):
    """A HostActor."""

    def __init__(self, world: World, node: Node):
        super().__init__()
        self.world = world
        self.node = node
        node.incarnations += 1
        self.incarnation = f"{node.id}i{node.incarnations}"
        memory = Remember() if "forgetful_host" in world.mutations else node.memory
        self.machine = Host(
            node.id, self.incarnation, memory, report_interval_s=REPORT_INTERVAL_S, heartbeat_s=HEARTBEAT_S, domain=node.domain
        )
        self.begun = False
        self.due = False
        self.look_s = float("inf")  # when it looks next
        self.looked_s = -LOOK_S
        self.known: dict[int, tuple[TrainerProc, int]] = {}  # by connection; with the set that it has named
        self.writes: dict[str, Written | None] = {}
        self.executed: set[str] = set()  # saves
        self.attempt = 0  # newest that it has heard of
        self.transfers = Transfers(world, self)

    @property
    def awake(self) -> bool:
        return self.alive and self.begun and self.wake_s <= self.world.now_s

    def begin(self) -> None:
        self.begun = True
        for one in list(self.node.sets.values()):
            one.writing = [0] * SLOTS
            one.read = None
            self.found(one)
        self.look()

    def found(self, one: SlotSet) -> None:
        trainer = "" if one.trainer is None else one.trainer.name
        self.feed(
            SetFound(
                index=one.index,
                trainer=trainer,
                word=one.word,
                contents=tuple(one.content),
                host_word=one.word_out,
                copies_of=one.copies_of,
            )
        )

    def feed(self, event: Any) -> None:
        if not self.alive:
            return
        commands = self.machine.handle(event, self.world.now_s)
        if isinstance(event, HostOrder | Write):
            self._check_order(event, commands)
        for command in commands:
            if isinstance(command, Event):
                self.world.tell(self, command)
            else:
                _DO[type(command)](self, command)
        if type(event) is Write and not any(type(one) is Hold for one in commands):
            done = self.writes.get(event.save)  # it was given before
            if done is not None:
                self.world.tell(self, done)
        self._look_later()

    def _check_order(self, order: Any, commands: list[Any]) -> None:
        attempt = order.attempt if type(order) is not Write else save_order(order.save)[0]
        deeds = (one for one in commands if type(one) in _DEEDS and not (type(one) is Hold and one.refused))
        if attempt < self.attempt and any(deeds):
            self.world.violated(f"one writer: {self.node.id} knows attempt {self.attempt} and follows {order}: {commands}")
        self.attempt = max(self.attempt, attempt)

    def _look_later(self) -> None:
        next_s = self.machine.next_report_s
        if next_s < self.look_s - 1e-6:
            self.look_s = max(next_s, self.world.now_s + 0.05)
            self.world.on(self, self.look_s - self.world.now_s, self._on_time, self.look_s)

    def _on_time(self, due_s: float) -> None:
        if due_s == self.look_s:
            self.look_s = float("inf")
            if self.world.now_s - self.looked_s >= LOOK_S:
                self.look()
            else:
                self.feed(_TICK)

    def poke(self) -> None:
        """A trainer rings: look at the words soon."""
        if not self.due:
            self.due = True
            self.world.on(self, 0.05 + 0.25 * self.world.random(), self.look)

    def look(self) -> None:
        """Read the words, then the slots; meet who is there; find out who is not."""
        self.due = fed = False
        self.looked_s = self.world.now_s
        for one in list(self.node.sets.values()):
            trainer = one.living
            if trainer is not None and trainer.set is one and self.known.get(trainer.connection) != (trainer, one.index):
                if trainer.joined is not None:
                    self.meet(trainer)
            fed |= self.read(one)
        for index in self.machine.suspects:
            one = self.node.sets[index]
            if one.living is None:
                fed = True
                self.feed(SetRead(index=index, word=None, contents=tuple(one.content)))
        if not fed:
            self.feed(_TICK)

    def meet(self, trainer: TrainerProc) -> None:
        """A trainer says who it is, and which slots it has."""
        self.known[trainer.connection] = (trainer, trainer.set.index)
        self.feed(
            Connected(
                connection=trainer.connection,
                pid=trainer.connection,
                rank=trainer.rank,
                world=trainer.machine.world,
                lineage=trainer.machine.lineage,
                trainer=trainer.name,
                set_index=trainer.set.index,
            )
        )

    def read(self, one: SlotSet) -> bool:
        if one.word is None or one.word is one.read:
            return False
        one.read = one.word
        self.feed(SetRead(index=one.index, word=one.word, contents=tuple(one.content)))
        return True

    def trainer_gone(self, trainer: TrainerProc) -> None:
        if trainer.connection not in self.known:
            return
        del self.known[trainer.connection]
        if trainer.set.trainer is trainer and self.node.sets.get(trainer.set.index) is trainer.set:
            self.read(trainer.set)
        self.feed(Disconnected(connection=trainer.connection, said_bye=trainer.clean))
        self.poke()

    # ---------------------------------------------------------------- what the machine asks for

    def _speak(self, command: Speak) -> None:
        self.node.sets[command.index].word_out = command.word

    def _empty(self, command: Empty) -> None:
        one = self.node.sets[command.index]
        if one.writing[command.slot]:
            self.world.violated(
                f"held slots: slot {command.slot} of {self.node.id} is emptied while it is being written: {command.reason}"
            )
        if "keep_slots" not in self.world.mutations:
            self.world.check_emptied(self.node, one, command.slot, command.reason)
            one.content[command.slot] = None

    def _remember(self, command: Remember) -> None:
        self.node.memory = command

    def _kill(self, command: Kill) -> None:
        if command.examine is None:
            self._end(command)
        else:
            self.world.on(self, 0.5 * self.world.random(), self._examined, command)

    def _examined(self, command: Kill) -> None:
        assert command.examine is not None
        self.feed(Examined(connection=command.examine, stack="in a collective"))
        self._end(command)

    def _end(self, command: Kill) -> None:
        known = self.known.get(command.pid)
        if known is not None:
            known[0].die("ended by its HostActor")

    def _remove_set(self, command: RemoveSet) -> None:
        one = self.node.sets.pop(command.index)
        if any(one.writing):
            self.world.violated(
                f"held slots: set {command.index} of {self.node.id} is removed while it is being written: {command.reason}"
            )
        trainer = one.living
        if trainer is not None:
            for content in one.content:
                if content is not None:
                    self.world.check_overtaken(trainer, content, "removes")

    # ---------------------------------------------------------------- saving

    def _execute(self, command: Hold) -> None:
        order = command.order
        assert order is not None
        if command.refused is not None:
            self.world.tell(self, Written(host=self.node.id, save=order.save, error=command.refused.message))
            return
        if order.save in self.executed:
            self.world.violated(f"at most once: {self.node.id} executes save {order.save} again")
        self.executed.add(order.save)
        self.writes[order.save] = None
        content = {address: self.node.sets[address.index].content[address.slot] for address in command.addresses}
        for address in command.addresses:
            self.node.sets[address.index].writing[address.slot] += 1
        self.world.on(self, (0.1 + 2.0 * self.world.random()) * self.world.pace, self._wrote, order, content)

    def _wrote(self, order: Write, content: dict[SlotAddress, Staged | None]) -> None:
        error = ""
        tokens: dict[int, Token] = {}
        for address, began in content.items():
            one = self.node.sets[address.index]
            one.writing[address.slot] -= 1
            now = one.content[address.slot]
            if now is None or began is None or now.id != began.id:
                self.world.violated(f"held slots: save {order.save} reads {began}, and then {now}")
            else:
                tokens[address.rank] = (one.saved[address.slot], now.step, now.rank)
        if self.world.storage.outage:
            error = "storage is out"
        else:
            self.world.storage.parts.setdefault(order.save, {})[self.node.id] = tokens
        self.feed(HoldEnded(reader=order.save))
        self._say_written(order, error)

    def _say_written(self, order: Write, error: str) -> None:
        self.writes[order.save] = done = Written(host=self.node.id, save=order.save, error=error)
        self.world.tell(self, done)


_DO: dict[type, Any] = {
    Speak: HostProc._speak,
    Empty: HostProc._empty,
    Remember: HostProc._remember,
    Kill: HostProc._kill,
    Hold: HostProc._execute,
    RemoveSet: HostProc._remove_set,
    FetchCopy: lambda proc, command: proc.transfers.fetch(command),
    FillCopy: lambda proc, command: proc.transfers.fill(command),
    EndCopy: lambda proc, command: proc.transfers.end(command),
}
_TICK = Tick()
_DEEDS = frozenset({Kill, Hold, Empty, FetchCopy})  # what an order of a superseded attempt may not lead to
