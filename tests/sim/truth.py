"""The invariants that need the whole picture: what hosts really hold, and what may be done with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raystate.core.messages import (
    Advise,
    Answer,
    Invalidate,
    RestoreChoice,
    SnapshotId,
    Staged,
    group_of,
    lineage_order,
)
from tests.sim.coordinators import CoordinatorProc
from tests.sim.nodes import Node
from tests.sim.storage import Storage, Violation
from tests.sim.trainers import Group, TrainerProc


class Truth:
    """What is true in the world, whatever its Coordinators believe. `World` adds the processes."""

    current: CoordinatorProc | None
    nodes_by_id: dict[str, Node]
    callers: dict[Any, TrainerProc]
    group: Group | None

    def __init__(self, storage: Storage):
        self.storage = storage
        self.from_current: set[Any] = set()  # asks whose choice was made by the Coordinator that owned the run then
        self.staged_count: dict[SnapshotId, set[int]] = {}
        self.true_stable: dict[str, int] = {}
        self.skipped: set[tuple[str, int]] = set()
        self.worlds: dict[str, int] = {}
        self.choices: dict[str, RestoreChoice] = {}
        self.settled: list[tuple[tuple[int, int, str], str, int]] = []  # (by, lineage, step) of the restores that were settled
        self.wants: dict[str, int | None] = {}  # worker group -> the step that its trainers roll back to
        self.floor = -1  # what a recovery may not fall below

    def cut(self, node: Node) -> bool:
        """Out of reach for everybody."""
        raise NotImplementedError

    def world_of(self, lineage: str) -> int:
        return self.worlds.get(lineage, 0)

    def count_staged(self, piece: Staged) -> None:
        key = piece.id
        ranks = self.staged_count.setdefault(key, set())
        ranks.add(piece.rank)
        self.worlds[piece.lineage] = piece.world
        if len(ranks) == piece.world and piece.step > self.true_stable.get(piece.lineage, -1):
            self.true_stable[piece.lineage] = piece.step

    def check_reuse(self, trainer: TrainerProc, slot: int) -> None:
        """A slot is overwritten only if its snapshot has been overtaken, or given up."""
        one = trainer.set
        content = one.content[slot]
        if one.writing[slot]:
            raise Violation(f"bounded slots: rank {trainer.rank} overwrites slot {slot} while it is being written to storage")
        if content is None:
            return
        machine = trainer.machine
        assert machine is not None
        mine = machine.lineage
        what = f"slot reuse: rank {trainer.rank} of {mine} overwrites step {content.step} of {content.lineage}"
        if content.lineage == mine:
            if self.true_stable.get(mine, -1) > content.step or (mine, content.step) in self.skipped:
                return
            if content.again < machine.again and self.true_stable.get(mine, -1) == content.step:
                return  # the step was saved once more
            raise Violation(f"{what}: nothing newer is complete on all hosts")
        choice = self.choices.get(mine)
        if self.true_stable.get(mine, -1) >= 0:
            return
        if choice is None or (choice.lineage, choice.step) == (content.lineage, content.step):
            raise Violation(f"{what}, which it has restored or may have to (choice: {choice})")

    def emitted(self, proc: CoordinatorProc, command: Any) -> None:
        """Look at what a Coordinator says."""
        kind = type(command)
        if kind is Advise:
            advice = command.advice
            if advice.durable_step >= 0 and advice.durable_step not in self.storage.ever_visible:
                raise Violation(f"durable means visible: step {advice.durable_step} is called durable and was never visible")
            stable = advice.stable[0]
            if proc is self.current and stable > self.floor and self._all_there(proc, SnapshotId(advice.lineage, *advice.stable)):
                self.floor = stable
        elif kind is Invalidate and self.wants.get(group_of(command.by)) is not None:
            self.floor = -1  # a rollback gives up what is newer, whoever carries it to its end
        elif kind is Answer and type(command.reply) is RestoreChoice:
            caller = self.callers.get(command.ask)
            if caller is None or caller.machine is None or caller.ask is None or caller.ask.ask != command.ask:
                return  # it has its answer: a Coordinator that has slept says something that nobody hears any more
            if self.choices.get(command.reply.begins) != command.reply:
                self.choices[command.reply.begins] = command.reply
                if proc is self.current:
                    self.from_current.add(command.ask)

    def _all_there(self, proc: CoordinatorProc, key: SnapshotId) -> bool:
        """The nodes that hold the snapshot's pieces are neither lost nor cut off."""
        snap = proc.core.memory.snaps.get(key)
        if snap is None or not snap.complete:
            return False
        nodes = self.nodes_by_id
        return all(host in nodes and not self.cut(nodes[host]) for held in snap.pieces.values() for host in held)

    def weaken(self) -> None:
        """A node is lost or cut off, and there are no peer copies: memory promises nothing any more, storage still does."""
        self.floor = -1

    def check_choice(self, caller: TrainerProc, choice: RestoreChoice) -> None:
        """Bounded loss: never behind storage, nor behind memory that one death can't have taken."""
        if choice.tier == "memory":
            self.check_given_up(choice)
        if caller.want is not None:
            if choice.step != caller.want:
                raise Violation(f"restore: step {caller.want} was asked, {choice.step} was chosen")
            self.floor = choice.step
            return
        durable = self.storage.durable()
        if choice.step < durable:
            raise Violation(f"bounded loss: step {choice.step} ({choice.tier}) is restored, step {durable} is durable")
        if choice.step < self.floor:
            raise Violation(f"bounded loss: step {choice.step} ({choice.tier}) is restored, step {self.floor} was stable")

    def check_given_up(self, choice: RestoreChoice) -> None:
        """What an earlier restore has given up does not come back."""
        order = lineage_order(choice.lineage)
        for by, lineage, step in self.settled:
            if order < by and not (choice.lineage == lineage and choice.step <= step):
                raise Violation(
                    f"given up: step {choice.step} of {choice.lineage} is restored, but lineage {by} had settled on step {step} of "
                    f"{lineage or 'storage'}"
                )

    def check_settled(self, group: Group, lineage: str, step: int) -> None:
        tiers = set(group.restored.values())
        if len(tiers) > 1:
            raise Violation(f"one recovery: ranks of {lineage} have restored different things: {group.restored}")
        tier, restored, source = next(iter(tiers))
        choice = self.choices.get(lineage)
        if choice is not None:
            made = (lineage_order(lineage), choice.lineage, step)
            if made not in self.settled:
                self.settled.append(made)
        if restored != step or (tier == "memory" and choice is not None and source != choice.lineage):
            raise Violation(f"one recovery: {lineage} settled on step {step} of {choice}, rank has {tiers}")

    def check_acted(self, trainer: TrainerProc, step: int, stop: bool) -> None:
        """All ranks stop at the same step."""
        acted = trainer.group.acted.setdefault(0, {})
        if stop:
            acted[trainer.rank] = step
        if acted:
            first = min(acted.values())
            passed = [one.rank for one in trainer.group.members if one.step >= first and one.rank not in acted]
            if (stop and step != first) or passed:
                raise Violation(
                    f"stop: rank {trainer.rank} is at step {step}, others have stopped at {acted}; past it without stopping: {passed}"
                )

    def check_promises(self, who: str, promised: Iterable[SnapshotId]) -> None:
        """True means durable: what nobody has called lost was in storage, with the bytes of that very call."""
        for key in promised:
            if key not in self.storage.ever_shown:
                raise Violation(f"true means durable: {who} is told that {key} is durable, and it never was in storage")
