"""One simulated node: its arena and its HostActor, which runs core's own decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raystate.core.host import applies, carried_on, grant, host_word, is_discarded, is_granted, is_newer_advice, summarize
from raystate.core.messages import (
    Advice,
    EndTrainers,
    HostId,
    HostReported,
    HostSummary,
    HostUp,
    HostWord,
    Invalidate,
    Invalidated,
    Staged,
    TrainerExited,
    TrainerWord,
    Write,
    Written,
)
from raystate.core.slots import SlotView
from tests.sim.storage import Violation

if TYPE_CHECKING:
    from tests.sim.trainers import TrainerProc
    from tests.sim.world import World

SLOTS = 3


class Proc:
    """A process: it may be dead, or asleep until `wake_s`."""

    __slots__ = ("alive", "wake_s")

    def __init__(self) -> None:
        self.alive = True
        self.wake_s = 0.0


class SlotSet:
    """The slots of one trainer, and the two words. They stay when a process dies."""

    __slots__ = ("content", "grants", "holds", "said", "seen", "trainer", "views", "word", "word_out")

    def __init__(self) -> None:
        self.content: list[Staged | None] = [None] * SLOTS
        self.holds = [0] * SLOTS
        self.grants: tuple[int, ...] = (0,) * SLOTS
        self.trainer: TrainerProc | None = None
        self.word: TrainerWord | None = None  # the trainer's
        self.word_out: HostWord | None = None  # the host's
        self.views: list[SlotView] = []
        self.seen: Any = None  # what `views` were made of
        self.said: tuple[Any, Any] = (None, None)  # what `word_out` was made of


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
        self.advice: Advice | None = None
        self.incarnations = 0

    def new_set(self) -> SlotSet:
        """A set whose trainer is gone, else a new one."""
        for one in self.sets:
            if one.trainer is None or not one.trainer.alive:
                return one
        made = SlotSet()
        self.sets.append(made)
        if len(self.sets) > 4:
            raise Violation(f"bounded memory: node {self.id} has {len(self.sets)} slot sets")
        return made

    def piece(self, rank: int, step: int, lineage: str) -> Staged | None:
        """The held piece of a rank, as a trainer finds it: by step, trusting that other lineages were discarded."""
        found: Staged | None = None
        for one in self.sets:
            for content in one.content:
                if content is not None and content.rank == rank and content.step == step:
                    if content.lineage == lineage:
                        return content
                    found = content
        return found


class HostProc(Proc):
    """A HostActor."""

    __slots__ = ("advice", "attempt", "base", "dealt", "due", "exits", "incarnation", "node", "said", "seq", "world", "writes")

    def __init__(self, world: World, node: Node):
        super().__init__()
        self.world = world
        self.node = node
        node.incarnations += 1
        self.incarnation = f"{node.id}i{node.incarnations}"
        self.seq = 0
        self.advice: Advice | None = node.advice  # kept in the arena, as the words are
        self.base: Invalidate | None = None
        self.attempt = 0
        self.due = False
        self.exits: list[TrainerExited] = []
        self.writes: dict[str, Written | None] = {}
        self.said: tuple[Any, HostSummary] | None = None
        self.dealt: Any = None

    def begin(self) -> None:
        for one in self.node.sets:
            one.holds = [0] * SLOTS
            if one.trainer is not None and not one.trainer.alive and one.word is not None and one.trainer.machine is not None:
                # It died while this actor was down: nobody else will say so.
                self.trainer_gone(one.trainer)
        self.world.tell(self, HostUp(host=self.node.id, incarnation=self.incarnation))
        self.beat()

    def beat(self) -> None:
        self.report()
        self.world.on(self, 3.5, self.beat)

    def poke(self) -> None:
        """Report soon."""
        if not self.due:
            self.due = True
            self.world.on(self, 0.1 + 0.4 * self.world.random(), self.report)

    def _views(self) -> list[SlotView]:
        views: list[SlotView] = []
        for index, one in enumerate(self.node.sets):
            word = one.word if one.trainer is not None and one.trainer.alive else None
            made_of = (word, one.grants, *one.content, *one.holds)
            if made_of != one.seen:
                one.seen = made_of
                one.views = [
                    SlotView(
                        set_index=index,
                        slot_index=slot,
                        granted=is_granted(one.grants, word, slot),
                        content=one.content[slot],
                        holds=one.holds[slot],
                    )
                    for slot in range(SLOTS)
                ]
            views += one.views
        return views

    def report(self) -> None:
        self.due = False
        sets = self.node.sets
        words = [one.word for one in sets if one.word is not None and one.trainer is not None and one.trainer.alive]
        views = self._views()
        self.seq += 1
        last, made_of = self.said, (self.attempt, self.base, self.advice, *words, *views)
        if last is not None and made_of == last[0]:
            old = last[1]
            summary = HostSummary(
                host=old.host, incarnation=old.incarnation, seq=self.seq, staged=old.staged, trainers=old.trainers, base=old.base,
                advised=old.advised, proposal=old.proposal, attempt=old.attempt,
            )  # fmt: skip
        else:
            summary = summarize(
                self.node.id, self.incarnation, self.seq, views, words, base=self.base, advice=self.advice, attempt=self.attempt
            )
            self.said = (made_of, summary)
        self.world.tell(self, HostReported(summary=summary))
        self.deal(views)

    def deal(self, views: list[SlotView]) -> None:
        """Grant what may be reused, and write the host's words."""
        sets = self.node.sets
        living = [index for index, one in enumerate(sets) if one.word is not None and one.trainer is not None and one.trainer.alive]
        if not living:
            return
        made_of = (self.advice, *living, *views)
        if made_of == self.dealt:
            return
        self.dealt = made_of
        changed = grant([one.grants for one in sets], views, self.advice, living)  # type: ignore[arg-type]
        for index, grants in changed.items():
            sets[index].grants = grants
        self.speak()

    def speak(self) -> None:
        """Write the host's words anew where they would change."""
        for one in self.node.sets:
            if one.word is None or one.trainer is None or not one.trainer.alive:
                continue
            if one.said[0] is not one.grants or one.said[1] is not self.advice:
                one.said = (one.grants, self.advice)
                one.word_out = host_word(one.grants, self.advice)

    def take(self, attempt: int, command: Any) -> None:
        """A command of a Coordinator. Those of an older attempt than one has heard of are ignored."""
        if attempt < self.attempt:
            return
        if attempt > self.attempt:
            self.attempt = attempt
            for one in self.exits:
                self.world.tell(self, one)
        kind = type(command)
        if kind is Advice:
            if is_newer_advice(command, self.advice):
                self.node.advice = self.advice = carried_on(command, self.advice)
                self.speak()
                self.poke()
        elif kind is Invalidate:
            if applies(command, self.base):
                self.base = command
                for one in () if "keep_slots" in self.world.mutations else self.node.sets:
                    for slot, content in enumerate(one.content):
                        if content is not None and is_discarded(command, content.lineage, content.step):
                            one.content[slot] = None
            self.world.tell(self, Invalidated(host=self.node.id, lineage=command.lineage, step=command.step))
            self.poke()
        elif kind is Write:
            self._write(command)
        elif kind is EndTrainers:
            for one in self.node.sets:
                trainer = one.trainer
                if trainer is not None and trainer.alive and one.word is not None and one.word.lineage == command.lineage:
                    trainer.die("ended by its HostActor")

    # ---------------------------------------------------------------- saving

    def _write(self, order: Write) -> None:
        if order.save in self.writes:
            done = self.writes[order.save]
            if done is not None:
                self.world.tell(self, done)
            return
        self.writes[order.save] = None
        tokens: dict[int, tuple[str, int, int]] = {}
        held: list[tuple[SlotSet, int]] = []
        for one in self.node.sets:
            word = one.word if one.trainer is not None and one.trainer.alive else None
            for slot, content in enumerate(one.content):
                if content is None or is_granted(one.grants, word, slot) or content.rank not in order.ranks:
                    continue
                if content.step == order.step and content.lineage == order.lineage and content.rank not in tokens:
                    tokens[content.rank] = (content.lineage, content.step, content.rank)
                    held.append((one, slot))
        if len(tokens) < len(order.ranks):
            self._say_written(order, f"it holds ranks {sorted(tokens)} of {order.ranks}")
            return
        for one, slot in held:
            one.holds[slot] += 1
        self.world.on(self, (0.1 + 2.0 * self.world.random()) * self.world.pace, self._wrote, order, tokens, held)

    def _wrote(self, order: Write, tokens: dict[int, Any], held: list[tuple[SlotSet, int]]) -> None:
        error = ""
        for one, slot in held:
            one.holds[slot] -= 1
        if self.world.storage.outage:
            error = "storage is out"
        else:
            self.world.storage.parts.setdefault(order.save, {})[self.node.id] = tokens
        self._say_written(order, error)

    def _say_written(self, order: Write, error: str) -> None:
        self.writes[order.save] = done = Written(host=self.node.id, save=order.save, error=error)
        self.world.tell(self, done)

    # ---------------------------------------------------------------- its trainers

    def trainer_gone(self, trainer: TrainerProc) -> None:
        machine = trainer.machine
        if machine is None:
            return
        event = TrainerExited(
            host=self.node.id, lineage=machine.lineage, rank=trainer.rank, clean=trainer.clean, reason=trainer.why
        )
        self.exits.append(event)
        self.world.tell(self, event)
        self.poke()
