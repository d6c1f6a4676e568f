"""Transfers between simulated HostActors: late, lost, doubled, cut off in the middle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raystate.core.formats.host_messages import (
    CopyEnded,
    CopyMeasured,
    EndCopy,
    FetchCopy,
    FillCopy,
    SlotAddress,
)
from raystate.core.formats.messages import Staged
from tests.sim.storage import BEFORE, Saved

if TYPE_CHECKING:
    from tests.sim.nodes import HostProc, SlotSet
    from tests.sim.world import World

DEADLINE_S = 6.0  # of one transfer


@dataclass(slots=True, kw_only=True)
class Transfer:
    """One under way to this host."""

    order: FetchCopy
    began_s: float
    address: SlotAddress | None = None
    piece: tuple[Staged, Saved] = field(default=(None, BEFORE))  # type: ignore[assignment]


class Transfers:
    """Those to one HostActor; they end with its process."""

    def __init__(self, world: World, proc: HostProc):
        self.world = world
        self.proc = proc
        self.under_way: dict[int, Transfer] = {}

    def fetch(self, command: FetchCopy) -> None:
        """Ask the source how large the piece is."""
        self.under_way[command.transfer] = Transfer(order=command, began_s=self.world.now_s)
        sources = [one for one in self.under_way.values() if one.order.source == command.source]
        if len(sources) > 1:
            self.world.violated(f"copies: {len(sources)} transfers from {command.source} to {self.proc.node.id} at once")
        self.world.on(self.proc, 0.05 + 0.2 * self.world.random(), self._measure, command.transfer)

    def _source(self, one: Transfer) -> tuple[Staged, Saved, SlotSet] | None:
        node = self.world.nodes_by_id.get(one.order.source)
        if node is None or not node.reachable or self.world.cut(self.proc.node):
            return None
        wanted = (one.order.snapshot, one.order.rank)
        return next((held for held in node.held() if (held[0].id, held[0].rank) == wanted), None)

    def _measure(self, number: int) -> None:
        world, node, one = self.world, self.proc.node, self.under_way[number]
        found = self._source(one)
        if found is None:
            self._fail(number, f"{one.order.source} does not answer, or does not hold it")
            return
        sets = [held for held in node.sets.values() if held.copies_of == one.order.rank and held.large >= found[2].large]
        if not sets and node.full_until_s > world.now_s:
            self._fail(number, "no memory", no_memory=True)
            return
        target = max(sets, key=lambda held: held.index) if sets else node.add_set(large=found[2].large, copies_of=one.order.rank)
        if not sets:
            self.proc.found(target)
        one.piece = found[:2]
        self.proc.feed(CopyMeasured(transfer=number, index=target.index))

    def fill(self, command: FillCopy) -> None:
        """The bytes are on their way into the slot."""
        world, one = self.world, self.under_way[command.transfer]
        target = self.proc.node.sets[command.address.index]
        if target.writing[command.address.slot] or target.content[command.address.slot] is not None:
            world.violated(f"held slots: a copy goes to {command.address} of {self.proc.node.id}, which is in use")
        one.address = command.address
        target.writing[command.address.slot] += 1
        world.copy_begins(world.nodes_by_id[one.order.source], self.proc.node)
        slow = world.random()
        world.on(self.proc, 0.1 + (3.0 if slow > 0.9 and not world.healed else 0.3) * slow, self._fill, command.transfer)

    def _fill(self, number: int) -> None:
        world, one = self.world, self.under_way.get(number)
        if one is None:
            return
        if self.proc.node.stalled_until_s > world.now_s:
            if world.now_s - one.began_s >= DEADLINE_S:
                self._fail(number, "it takes too long")
            else:
                world.on(self.proc, 1.0, self._fill, number)
            return
        found = self._source(one)
        if found is None or found[:2] != one.piece:
            if "copy_anything" in world.mutations and found is None:
                one.piece = (one.piece[0], BEFORE)
                self.proc.feed(CopyEnded(transfer=number, content=one.piece[0]))
                return
            self._fail(number, "it is not there any more")
            return
        if not world.healed and world.random() < 0.05:
            self._fail(number, "the bytes don't match their checksums")
            return
        event = CopyEnded(transfer=number, content=one.piece[0])
        self.proc.feed(event)
        if world.random() < 0.05:
            self.proc.feed(event)  # once more

    def end(self, command: EndCopy) -> None:
        """The header is written, or nothing comes of it."""
        one = self._end(command.transfer)
        if command.address is None:
            return
        target = self.proc.node.sets[command.address.index]
        target.content[command.address.slot], target.saved[command.address.slot] = one.piece
        self.world.count_copy(one.piece[0], self.proc.node)

    def _fail(self, number: int, error: str, *, no_memory: bool = False) -> None:
        self._end(number)
        self.proc.feed(CopyEnded(transfer=number, error=error, no_memory=no_memory))

    def _end(self, number: int) -> Transfer:
        one = self.under_way.pop(number)
        if one.address is not None and one.address.index in self.proc.node.sets:
            self.proc.node.sets[one.address.index].writing[one.address.slot] -= 1
        return one
