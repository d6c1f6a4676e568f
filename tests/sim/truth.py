"""The invariants that need the whole picture: what hosts really hold, and what may be done with it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from raystate.core.coordinator.copying import Copying
from raystate.core.formats.messages import (
    Advice,
    Answer,
    Invalidate,
    RestoreChoice,
    SnapshotId,
    Staged,
    group_of,
    lineage_order,
)
from raystate.core.formats.settings import Settings
from raystate.core.host.slot_sets import GIVEN_UP
from tests.sim.coordinators import CoordinatorProc
from tests.sim.nodes import Node, SlotSet
from tests.sim.storage import Promised, Saved, Storage, Violation
from tests.sim.trainers import Group, TrainerProc

DOMAINS = ("d0", "d1")  # of several nodes
SLOW_S = 1.5  # a message takes no longer
NOT_STAGED = ("no host holds", "was not staged", "has no copy of it")


class Truth:
    """What is true in the world, whatever its Coordinators believe. `World` adds the processes."""

    def __init__(self, storage: Storage, settings: Settings):
        self.storage = storage
        self.settings = settings
        self.now_s = 0.0
        self.current: CoordinatorProc | None = None
        self.nodes_by_id: dict[str, Node] = {}
        self.callers: dict[Any, TrainerProc] = {}
        self.group: Group | None = None
        # (ask, the lineage that begins): whose choice it is, if an owner's
        self.from_current: dict[tuple[Any, str], CoordinatorProc] = {}
        self.staged_count: dict[SnapshotId, set[int]] = {}
        self.present = ""  # the line of training that has settled last
        self.parents: dict[str, tuple[Saved, int] | None] = {}  # line -> what it goes on from
        storage.is_given_up = self.is_given_up
        self.true_stable: dict[str, int] = {}
        self.skipped: set[tuple[str, int]] = set()
        self.worlds: dict[str, int] = {}
        self.choices: dict[str, RestoreChoice] = {}
        self.settled: list[tuple[tuple[int, int, str], str, int]] = []  # (by, lineage, step) of the restores that were settled
        self.wants: dict[str, int | None] = {}  # worker group -> the step that its trainers roll back to
        self.floor = -1  # what a recovery may not fall below
        self.floor_after_loss = False  # a node was lost since then
        self.went_on_from = ""  # the lineage of what was restored last: what came before it is not kept any longer
        self.safe_step = -1  # the newest that was called stable with all its copies: no loss of `safe_losses` nodes may take it
        self.safe_losses = 0
        self.safe_lineage = ""
        self.keepers: dict[tuple[SnapshotId, int], set[str]] = {}  # a snapshot's piece of a rank -> nodes that have ever held it
        self.judged: set[SnapshotId] = set()  # called stable

    def cut(self, node: Node) -> bool:
        """Out of reach for everybody."""
        return not node.up or node.cut_until_s > self.now_s

    def world_of(self, lineage: str) -> int:
        return self.worlds.get(lineage, 0)

    def count_copy(self, piece: Staged, node: Node) -> None:
        """The piece lies in that node's arena."""
        self.keepers.setdefault((piece.id, piece.rank), set()).add(node.id)

    def held_without(self, lost: Node) -> int:
        """The newest step that the other nodes hold in full and that the present line of training goes back to, -1: none."""
        found: dict[SnapshotId, set[int]] = {}
        for node in self.nodes_by_id.values():
            if node is lost or not self._may_be_relied_on(node):
                continue
            for content, saved, _ in node.held():
                is_older = lineage_order(content.lineage) < lineage_order(self.went_on_from)
                if not is_older and not self.is_given_up(saved, content.step):
                    found.setdefault(content.id, set()).add(content.rank)
        return max((key.step for key, ranks in found.items() if len(ranks) == self.worlds.get(key.lineage)), default=-1)

    def weaken(self, node: Node) -> None:
        """A node is lost or cut off. Memory promises what the other nodes hold, at least what had its copies; else only storage does."""
        if not self.settings.replicas:
            self.floor = -1
            return
        kept = self.held_without(node)
        if self.safe_step > max(kept, self.storage.durable()):
            raise Violation(f"copies: node {node.id} is lost, step {self.safe_step} had copies, and the others hold step {kept}")
        self.safe_losses -= 1
        if not self.safe_losses:
            self.safe_step = -1
        self.floor = min(self.floor, kept)
        self.floor_after_loss = True

    def check_stable(self, proc: CoordinatorProc, key: SnapshotId) -> None:
        """A snapshot is called stable only when it has its copies, unless the Coordinator has said that it can't have them."""
        if key.step < 0 or key in self.judged:
            return
        self.judged.add(key)
        copying = proc.core.snapshots.copying
        if not copying.is_on:
            return
        if is_bare(copying) or proc is not self.current:
            self.safe_step = -1
            return
        there, group = True, proc.core.joins.group
        staying = copying.domains.keys() - copying.leaving or copying.domains.keys()
        losses = min(self.settings.replicas, len(copying.domains) - 1, max(1, len(staying) - 1))
        for rank in range(self.world_of(key.lineage)):
            nodes = [self.nodes_by_id[host] for host in self.keepers.get((key, rank), set())]
            stay = sum(node.id in staying for node in nodes)
            own_stays = group is not None and group.hosts.get(rank) in staying
            if (
                len(nodes) < 1 + losses
                or stay < min(self.settings.replicas + own_stays, len(staying))
                or len({node.domain for node in nodes}) < 2 <= len({copying.domains[one] for one in staying} & {*DOMAINS})
            ):
                names = [f"{node.id} ({node.domain})" for node in nodes]
                gone = f"; {sorted(copying.leaving)} go away" if copying.leaving else ""
                raise Violation(
                    f"copies: step {key.step} of {key.lineage} is called stable, and rank {rank} is only on {names}{gone}"
                )
            there &= all(self._may_be_relied_on(node) and node.has(rank, key) for node in nodes)
        self.safe_lineage = key.lineage
        self.safe_losses = losses
        self.safe_step = key.step if there else -1  # a node may have gone while the Coordinator was told that it had its copies

    def check_emptied(self, node: Node, one: SlotSet, slot: int, why: str) -> None:
        """A copy of the line that trains now goes only once something newer is complete, or the step was skipped."""
        content, group = one.content[slot], self.group
        if (
            content is None
            or one.copies_of is None
            or group is None
            or why == GIVEN_UP
            or self.is_given_up(one.saved[slot], content.step)
        ):
            return
        mine = {member.machine.lineage for member in group.members if member.joined is not None}
        if content.lineage in mine and self.true_stable.get(content.lineage, -1) <= content.step:
            if (content.lineage, content.step) not in self.skipped:
                raise Violation(f"slot reuse: node {node.id} gives up its copy of {content}, and nothing newer is complete")

    def count_staged(self, piece: Staged, node: Node) -> None:
        key = piece.id
        ranks = self.staged_count.setdefault(key, set())
        ranks.add(piece.rank)
        self.count_copy(piece, node)
        self.worlds[piece.lineage] = piece.world
        if len(ranks) == piece.world:
            self.true_stable[piece.lineage] = max(piece.step, self.true_stable.get(piece.lineage, -1))

    def is_given_up(self, saved: Saved, step: int) -> bool:
        """The present line of training does not go back to it."""
        line, limit = self.present, 10**9
        while line:
            if saved == line:
                return step > limit
            parent = self.parents.get(line)
            if parent is None:
                break
            line, limit = parent
        return bool(self.present)

    def held_by_all(self, group: Group, saved: Saved, step: int) -> bool:
        """Each rank's piece lies in an arena whose HostActor can answer."""
        return all(any(node.holds(one.rank, step, saved) for node in self.nodes_by_id.values()) for one in group.members)

    def check_reuse(self, trainer: TrainerProc, slot: int) -> None:
        """A slot is overwritten only if its snapshot has been overtaken, or given up."""
        if trainer.set.writing[slot]:
            raise Violation(f"bounded slots: rank {trainer.rank} overwrites slot {slot} while it is being written to storage")
        content = trainer.set.content[slot]
        if content is not None:
            self.check_overtaken(trainer, content, "overwrites")

    def check_overtaken(self, trainer: TrainerProc, content: Staged, what: str) -> None:
        machine = trainer.machine
        mine = machine.lineage
        what = f"slot reuse: rank {trainer.rank} of {mine} {what} step {content.step} of {content.lineage}"
        if content.lineage == mine:
            if self.true_stable.get(mine, -1) > content.step or (mine, content.step) in self.skipped:
                return
            if trainer.stage == "restore" and trainer.want is not None and trainer.want < content.step:
                return  # all ranks have asked to go back behind it
            if trainer.stage == "restore" and trainer.want is None and self.storage.durable() > content.step:
                return  # another past has left a newer step, which they all go on from
            raise Violation(f"{what}: nothing newer is complete on all hosts")
        choice = self.choices.get(mine)
        if self.true_stable.get(mine, -1) >= 0:
            return
        if choice is None or (choice.lineage, choice.step) == (content.lineage, content.step):
            raise Violation(f"{what}, which it has restored or may have to (choice: {choice})")

    def emitted(self, proc: CoordinatorProc, command: Any) -> None:
        """Look at what a Coordinator says."""
        kind = type(command)
        if kind is Advice:
            advice = command
            if advice.durable_step >= 0 and advice.durable_step not in self.storage.ever_visible:
                raise Violation(f"durable means visible: step {advice.durable_step} is called durable and was never visible")
            stable = advice.stable
            self.check_stable(proc, SnapshotId(advice.lineage, stable))
            kept = {(one.lineage, one.step) for one in advice.keep} | {(advice.lineage, self.safe_step)}
            if is_bare(proc.core.snapshots.copying):
                if (self.safe_lineage, self.safe_step) not in kept:
                    self.safe_step = -1  # what was restored since then will not get copies, as has been said, and needs the room
                if self.floor_after_loss:
                    self.floor = -1  # the same for what the loss of a node has left
            if proc is self.current and stable > self.floor and self._all_there(proc, SnapshotId(advice.lineage, stable)):
                self.floor, self.floor_after_loss = stable, False
        if kind is Invalidate and proc is self.current and command.lineage:
            self.went_on_from = command.lineage
        if kind is Invalidate and command.lineage != self.safe_lineage:
            self.safe_step = -1  # two restores, one soon after the other: what the first began is gone on from, copies or not
            if self.wants.get(group_of(command.by)) is not None:
                self.floor = -1
        elif kind is Invalidate and self.wants.get(group_of(command.by)) is not None:
            self.floor = self.safe_step = -1  # a rollback gives up what is newer, whoever carries it to its end
        elif kind is Answer and type(command.reply) is RestoreChoice:
            caller = self.callers.get(command.ask)
            if caller is None or caller.joined is None or caller.ask is None or caller.ask.ask != command.ask:
                return  # it has its answer: a Coordinator that has slept says something that nobody hears any more
            if self.choices.get(command.reply.begins) != command.reply:
                self.choices[command.reply.begins] = command.reply
                if proc is self.current:
                    self.from_current[command.ask, command.reply.begins] = proc

    def _all_there(self, proc: CoordinatorProc, key: SnapshotId) -> bool:
        """The nodes that hold the snapshot's pieces are neither lost nor cut off."""
        snap = proc.core.memory.snaps.get(key)
        if snap is None or not snap.complete:
            return False
        nodes = self.nodes_by_id
        return all(
            host in nodes and self._may_be_relied_on(nodes[host]) and nodes[host].has(rank, key)
            for rank, held in snap.pieces.items()
            for host in held
        )

    def _may_be_relied_on(self, node: Node) -> bool:
        """It is there, and has not been silent for so long that it is about to be held for dead."""
        silent = self.now_s - node.heard_s >= self.settings.host_timeout_s - SLOW_S
        return not self.cut(node) and not silent and (node.actor is None or not node.actor.alive or node.actor.awake)

    def check_choice(self, caller: TrainerProc, choice: RestoreChoice) -> None:
        """Bounded loss: never behind storage, nor behind memory that one death can't have taken."""
        if choice.tier == "memory":
            self.check_given_up(choice)
        if caller.want is not None:
            if choice.step != caller.want:
                raise Violation(f"restore: step {caller.want} was asked, {choice.step} was chosen")
            self.floor, self.safe_step = choice.step, -1
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

    def all_asked(self, group: Group) -> None:
        """All ranks have asked for a restore: what all of them had staged by then is what it may not fall below."""
        stable = [one.newest_staged for one in group.members]
        if group.want is None and len(set(stable)) == 1 and stable[0] is not None and not group.misled:
            saved, step = stable[0]
            if self.held_by_all(group, saved, step) and not self.is_given_up(saved, step):
                self.floor = max(self.floor, step)

    def check_settled(self, trainer: TrainerProc, step: int) -> None:
        group, machine = trainer.group, trainer.machine
        lineage = machine.lineage
        tiers = set(group.restored.values())
        if len(tiers) > 1:
            raise Violation(f"one recovery: ranks of {lineage} have restored different things: {group.restored}")
        tier, restored, saved = next(iter(tiers))
        choice = self.choices.get(lineage)
        if choice is not None:
            made = (lineage_order(lineage), choice.lineage, step)
            if made not in self.settled:
                self.settled.append(made)
        if restored != step:
            raise Violation(f"one recovery: {lineage} settled on step {step} of {choice}, rank has {tiers}")
        if tier == "memory" and self.is_given_up(saved, step):
            raise Violation(f"given up: step {step} of {saved} is restored from memory, and {self.present} does not go back to it")
        if trainer.line not in self.parents:
            self.parents[trainer.line] = (saved, step) if tier != "none" else None
            self.present = trainer.line

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

    def check_promises(self, who: str, promised: Iterable[Promised]) -> None:
        """True means durable: what is not called lost was in storage, with the bytes of a try that counts."""
        for key, tries in promised:
            if not any((saved, key.step) in self.storage.ever_shown for saved in tries):
                raise Violation(f"true means durable: {who} is told that {key} ({tries}) is durable, and it never was in storage")

    def check_losses(self, trainer: TrainerProc, errors: Iterable[str], held: Iterable[tuple[SnapshotId, Saved]]) -> None:
        """Nobody is told that a rank has not staged what all have staged before the question, and still hold."""
        for key, saved in held:
            for text in errors:
                if re.search(rf"\bstep {key.step}\b", text) and any(sign in text for sign in NOT_STAGED):
                    if self.held_by_all(trainer.group, saved, key.step) and not self.is_given_up(saved, key.step):
                        raise Violation(f"old reports: rank {trainer.rank} is told {text!r}, but all ranks hold {key} ({saved})")


def is_bare(copying: Copying) -> bool:
    """Whether snapshots count now without copies that they should have."""
    return len(copying.domains) < 2 or not all(map(copying.is_waited_for, copying.domains))
