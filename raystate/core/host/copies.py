"""The copies that one host keeps of other hosts' pieces: which to fetch now, and into which slots.

The Coordinator's newest order says what is wanted; copies that wait for an older order are
forgotten. The host fetches, so a transfer has one end that decides. Each rank's copies lie in a
slot set of their own, under the same rules as a trainer's. From its header on a copy is reported,
found, written, discarded and reused like the piece that it was made of.
"""

from __future__ import annotations

from dataclasses import dataclass

from raystate.core.formats.host_messages import (
    CopyEnded,
    CopyMeasured,
    Empty,
    EndCopy,
    FetchCopy,
    FillCopy,
    HostCommand,
    RemoveSet,
    SlotAddress,
)
from raystate.core.formats.names import HostId, SnapshotId
from raystate.core.formats.orders import Advice, Copy
from raystate.core.host.slot_sets import GIVEN_UP, SetState, SlotSets
from raystate.core.host.slots import why_free, why_reusable


@dataclass(slots=True)
class _Transfer:
    source: HostId
    snapshot: SnapshotId
    rank: int
    address: SlotAddress | None = None  # once it has a slot, which is held until it ends


class Copies:
    """Transfers to this host, one at a time from each other host.

    Args:
        slot_sets: what the slots of this host hold.

    Attributes:
        out: where commands go; the machine's, for the event at hand.
        no_memory: why this host can't keep copies; "": it can.
    """

    def __init__(self, slot_sets: SlotSets):
        self._slot_sets = slot_sets
        self._order: Copy | None = None
        self._transfers: dict[int, _Transfer] = {}
        self._number = 0
        self._failed: set[int] = set()  # ranks, since the order came last
        self.out: list[HostCommand] = []
        self.no_memory = ""

    def ordered(self, order: Copy) -> None:
        """Take what the Coordinator wants now, unless something newer was ordered."""
        old = self._order
        if old is None or order.stamp >= old.stamp:
            self._order = order
            self._failed = set()

    def turn(self, advice: Advice | None) -> None:
        """Begin copies that are wanted, not here, and not under way; give unneeded sets back."""
        order = self._order
        if order is None:
            return
        for rank, source in order.pieces:
            busy = any(one.source == source or one.rank == rank for one in self._transfers.values())
            if (
                busy
                or rank in self._failed
                or self._why_not(order.snapshot, advice)
                or self._slot_sets.find(order.snapshot, (rank,))
            ):
                continue
            self._number += 1
            self._transfers[self._number] = _Transfer(source, order.snapshot, rank)
            self.out.append(FetchCopy(transfer=self._number, source=source, snapshot=order.snapshot, rank=rank))
        self._drop_unneeded(order, advice)

    def _why_not(self, snapshot: SnapshotId, advice: Advice | None) -> str:
        """Why no host needs a copy of it any more; "" if one may."""
        restore = self._slot_sets.restore
        if restore is not None and not restore.spares(snapshot.lineage, snapshot.step):
            return GIVEN_UP
        return (why_free(snapshot, advice) or "") if advice is not None else ""

    def _drop_unneeded(self, order: Copy, advice: Advice | None) -> None:
        wanted = {rank for rank, _ in order.pieces}
        filling = {one.address.index for one in self._transfers.values() if one.address is not None}
        measuring = {one.rank for one in self._transfers.values() if one.address is None}
        newest = {one.copies_of: one.index for one in self._slot_sets.sets.values()}
        for one in list(self._slot_sets.sets.values()):
            rank = one.copies_of
            if rank is None or one.index in filling or rank in measuring or self._slot_sets.is_needed(one.index, advice):
                continue
            if rank not in wanted or newest[rank] != one.index:
                del self._slot_sets.sets[one.index]
                reason = f"the copies of rank {rank} in it aren't needed any more"
                self.out.append(RemoveSet(index=one.index, trainer=one.trainer, reason=reason))

    # ---------------------------------------------------------------- one transfer

    def measured(self, event: CopyMeasured, advice: Advice | None) -> None:
        """Its set is known: give it a slot that may be reused."""
        transfer, one = self._transfers.get(event.transfer), self._slot_sets.sets.get(event.index)
        if transfer is None:
            return
        why = self._why_not(transfer.snapshot, advice)
        number = None if one is None or why else self._free_slot(one, advice)
        if one is None or number is None:
            self._drop(event.transfer, why or f"no slot is free for the copies of rank {transfer.rank}")
            return
        slot = one.slots[number]
        if slot.content is not None:
            slot.content = None
            self.out.append(Empty(index=one.index, slot=number, reason=f"a copy of step {transfer.snapshot.step} takes its place"))
        # Bytes are on their way into this slot: the next transfer must not get it.
        # (test_simulator.test_planted_bug_of_peer_copies_is_found, "copy's slot is given away")
        slot.holds += 1
        self.no_memory = ""
        transfer.address = SlotAddress(rank=transfer.rank, index=one.index, slot=number)
        self.out.append(FillCopy(transfer=event.transfer, address=transfer.address))

    @staticmethod
    def _free_slot(one: SetState, advice: Advice | None) -> int | None:
        free = [
            (slot.content is not None, number)
            for number, slot in enumerate(one.slots)
            if not slot.holds and why_reusable(slot.content, advice) is not None
        ]
        return min(free)[1] if free else None

    def ended(self, event: CopyEnded) -> None:
        """Its bytes are here: it counts from now on, unless it was given up meanwhile. Or nothing comes of it: then it is tried again
        when the order is repeated."""
        transfer = self._transfers.get(event.transfer)
        if transfer is None:
            return
        content, address = event.content, transfer.address
        if content is None or address is None:
            self._end(event.transfer)
            self._failed.add(transfer.rank)
            self.no_memory = event.error if event.no_memory else self.no_memory
        elif (content.id, content.rank) != (transfer.snapshot, transfer.rank):
            self._drop(event.transfer, f"host {transfer.source} has sent step {content.step} of rank {content.rank} instead")
        elif why := self._why_not(content.id, None):
            self._drop(event.transfer, why)
        else:
            self._end(event.transfer)
            self._slot_sets.sets[address.index].slots[address.slot].content = content
            self.out.append(EndCopy(transfer=event.transfer, address=address))

    def _drop(self, number: int, reason: str) -> None:
        transfer = self._end(number)
        assert transfer is not None
        self._failed.add(transfer.rank)
        self.out.append(EndCopy(transfer=number, reason=reason))

    def _end(self, number: int) -> _Transfer | None:
        transfer = self._transfers.pop(number, None)
        if transfer is not None and transfer.address is not None:
            self._slot_sets.let_go((transfer.address,))
        return transfer
