"""One simulated node: its arena, and its HostActor, whose decisions are core's `Host`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raystate.core.host import Host
from raystate.core.host_messages import (
    AlreadyExecuted,
    Connected,
    Disconnected,
    Empty,
    Execute,
    HostMemory,
    Kill,
    Look,
    Place,
    Refuse,
    Remember,
    SaidBye,
    SetFound,
    SetRead,
    Speak,
    Tell,
    Unlocked,
    WriteEnded,
)
from raystate.core.messages import HostId, HostWord, Staged, TrainerWord, Write, Written
from tests.sim.storage import Violation

if TYPE_CHECKING:
    from tests.sim.trainers import TrainerProc
    from tests.sim.world import World

SLOTS = 3
REPORT_INTERVAL_S = 0.25
HEARTBEAT_S = 3.5


class Proc:
    """A process: it may be dead, or asleep until `wake_s`."""

    __slots__ = ("alive", "wake_s")

    def __init__(self) -> None:
        self.alive = True
        self.wake_s = 0.0


class SlotSet:
    """The slots of one trainer, and the two words. They stay when a process dies."""

    __slots__ = ("content", "read", "trainer", "word", "word_out", "writing")

    def __init__(self) -> None:
        self.content: list[Staged | None] = [None] * SLOTS
        self.writing = [0] * SLOTS  # how many saves read the slot right now
        self.trainer: TrainerProc | None = None
        self.word: TrainerWord | None = None  # the trainer's
        self.word_out: HostWord | None = None  # the host's
        self.read: TrainerWord | None = None  # the last word that its HostActor has read

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
        self.sets: list[SlotSet] = []
        self.actor: HostProc | None = None
        self.memory = HostMemory()
        self.incarnations = 0

    def new_set(self, trainer: TrainerProc) -> SlotSet:
        """A set whose trainer is gone, else a new one: allotted to this one, with empty words."""
        one = next((one for one in self.sets if one.living is None), None)
        if one is None:
            one = SlotSet()
            self.sets.append(one)
            if len(self.sets) > 4:
                raise Violation(f"bounded memory: node {self.id} has {len(self.sets)} slot sets")
        one.trainer, one.word, one.word_out, one.read = trainer, None, None, None
        if self.actor is not None and self.actor.alive:
            self.actor.found(self.sets.index(one))
        return one

    def piece(self, rank: int, step: int, lineage: str, again: int) -> Staged | None:
        """The held piece of a rank, as a trainer finds it: by step, trusting that other lineages were discarded."""
        found: Staged | None = None
        for one in self.sets:
            for content in one.content:
                if content is not None and content.rank == rank and content.step == step:
                    if content.lineage == lineage and content.again == again:
                        return content
                    found = content
        return found


class HostProc(Proc):
    """A HostActor."""

    __slots__ = ("due", "incarnation", "known", "look_s", "machine", "node", "world", "writes")

    def __init__(self, world: World, node: Node):
        super().__init__()
        self.world = world
        self.node = node
        node.incarnations += 1
        self.incarnation = f"{node.id}i{node.incarnations}"
        memory = HostMemory() if "forgetful_host" in world.mutations else node.memory
        self.machine = Host(node.id, self.incarnation, memory, report_interval_s=REPORT_INTERVAL_S, heartbeat_s=HEARTBEAT_S)
        self.due = False
        self.look_s = float("inf")  # when it looks next
        self.known: dict[int, TrainerProc] = {}  # by connection
        self.writes: dict[str, Written | None] = {}

    def begin(self) -> None:
        for index, one in enumerate(self.node.sets):
            one.writing = [0] * SLOTS
            one.read = None
            self.found(index)
        self.look()

    def found(self, index: int) -> None:
        one = self.node.sets[index]
        trainer = "" if one.trainer is None else one.trainer.name
        self.feed(SetFound(index=index, trainer=trainer, word=one.word, contents=tuple(one.content), host_word=one.word_out))

    def feed(self, event: Any) -> None:
        if not self.alive:
            return
        for command in self.machine.handle(event, self.world.now_s):
            _DO[type(command)](self, command)
        self._look_later()

    def _look_later(self) -> None:
        next_s = self.machine.next_report_s
        if next_s < self.look_s - 1e-6:
            self.look_s = max(next_s, self.world.now_s + 0.05)
            self.world.on(self, self.look_s - self.world.now_s, self._on_time, self.look_s)

    def _on_time(self, due_s: float) -> None:
        if due_s == self.look_s:
            self.look_s = float("inf")
            self.look()

    def poke(self) -> None:
        """A trainer rings: look at the words soon."""
        if not self.due:
            self.due = True
            self.world.on(self, 0.05 + 0.25 * self.world.random(), self.look)

    def look(self) -> None:
        """Read the words, then the slots; meet who is there; find out who is not."""
        self.due = False
        for index, one in enumerate(self.node.sets):
            trainer = one.living
            if trainer is not None and trainer.machine is not None and trainer.connection not in self.known:
                self.known[trainer.connection] = trainer
                self.feed(
                    Connected(
                        connection=trainer.connection,
                        pid=trainer.connection,
                        rank=trainer.rank,
                        world=trainer.machine.world,
                        lineage=trainer.machine.lineage,
                        trainer=trainer.name,
                        set_index=index,
                    )
                )
            self._read(index, one)
        for index in self.machine.suspects:
            one = self.node.sets[index]
            if one.living is None:
                self.feed(Unlocked(index=index, contents=tuple(one.content)))
        self.feed(Look())

    def _read(self, index: int, one: SlotSet) -> None:
        if one.word is not None and one.word is not one.read:
            one.read = one.word
            self.feed(SetRead(index=index, word=one.word, contents=tuple(one.content)))

    def trainer_gone(self, trainer: TrainerProc) -> None:
        if trainer.connection not in self.known:
            return
        del self.known[trainer.connection]
        if trainer.clean:
            self.feed(SaidBye(connection=trainer.connection))
        index = self.node.sets.index(trainer.set)
        if trainer.set.trainer is trainer:
            self._read(index, trainer.set)
        self.feed(Disconnected(connection=trainer.connection))
        self.poke()

    # ---------------------------------------------------------------- what the machine asks for

    def _tell(self, command: Tell) -> None:
        self.world.tell(self, command.event)

    def _speak(self, command: Speak) -> None:
        self.node.sets[command.index].word_out = command.word

    def _empty(self, command: Empty) -> None:
        one = self.node.sets[command.index]
        if one.writing[command.slot]:
            self.world.violated(
                f"held slots: slot {command.slot} of {self.node.id} is emptied while it is being written: {command.reason}"
            )
        if "keep_slots" not in self.world.mutations:
            one.content[command.slot] = None

    def _remember(self, command: Remember) -> None:
        self.node.memory = command.memory

    def _kill(self, command: Kill) -> None:
        trainer = self.known.get(command.pid)
        if trainer is not None:
            trainer.die("ended by its HostActor")

    # ---------------------------------------------------------------- saving

    def _execute(self, command: Execute) -> None:
        order = command.order
        self.writes[order.save] = None
        content = {place: self.node.sets[place.index].content[place.slot] for place in command.places}
        for place in command.places:
            self.node.sets[place.index].writing[place.slot] += 1
        self.world.on(self, (0.1 + 2.0 * self.world.random()) * self.world.pace, self._wrote, order, content)

    def _wrote(self, order: Write, content: dict[Place, Staged | None]) -> None:
        error = ""
        tokens: dict[int, Any] = {}
        for place, began in content.items():
            one = self.node.sets[place.index]
            one.writing[place.slot] -= 1
            now = one.content[place.slot]
            if now is None or now != began:
                self.world.violated(f"held slots: save {order.save} reads {began}, and then {now}")
            else:
                tokens[place.rank] = ((now.lineage, now.again), now.step, now.rank)
        if self.world.storage.outage:
            error = "storage is out"
        else:
            self.world.storage.parts.setdefault(order.save, {})[self.node.id] = tokens
        self.feed(WriteEnded(save=order.save))
        self._say_written(order, error)

    def _refuse(self, command: Refuse) -> None:
        self.world.tell(self, Written(host=self.node.id, save=command.order.save, error=command.message))

    def _repeat(self, command: AlreadyExecuted) -> None:
        done = self.writes.get(command.order.save)
        if done is not None:
            self.world.tell(self, done)

    def _say_written(self, order: Write, error: str) -> None:
        self.writes[order.save] = done = Written(host=self.node.id, save=order.save, error=error)
        self.world.tell(self, done)


_DO: dict[type, Any] = {
    Tell: HostProc._tell,
    Speak: HostProc._speak,
    Empty: HostProc._empty,
    Remember: HostProc._remember,
    Kill: HostProc._kill,
    Execute: HostProc._execute,
    Refuse: HostProc._refuse,
    AlreadyExecuted: HostProc._repeat,
}
