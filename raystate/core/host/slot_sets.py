"""What the slots of one host hold, who is reading it, and when its bytes may go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from raystate.core.formats.host_messages import Empty, HostCommand, RemoveSet, SetFound, SlotAddress
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.orders import Advice, Invalidate
from raystate.core.formats.reports import HostWord, Staged, TrainerWord
from raystate.core.host.slots import why_reusable

GIVEN_UP = "a restore has given it up"
TrainerState = Literal["expected", "attached", "ending", "gone"]


def trainer_state(*, locked: bool, came: bool, left: bool, runs: bool) -> TrainerState:
    """Who has a slot set. It is handed on, or removed, once its trainer is "gone"; what lies complete in it may be read before.

    A killed process lets go of its lock before its devices. Until it has ended, a transfer may still write to the slot that it was
    filling. (test_simulator.test_planted_bug_is_found, "slots are handed on by the lock alone")

    Args:
        locked: its process holds the set's lock.
        came: it has held it.
        left: it let go of it on purpose, with nothing under way.
        runs: its process has not ended, as far as can be known.
    """
    if locked:
        return "attached"
    if not came:
        return "expected" if runs else "gone"
    return "ending" if runs and not left else "gone"


@dataclass(slots=True)
class HeldSlot:
    """One slot: whose it is, what it holds, and how many read it."""

    granted: int = 0  # grant number; the trainer's while it is greater than the word's `done`
    content: Staged | None = None
    holds: int = 0
    doomed: bool = False  # to be emptied when the last hold is gone; it holds nothing any more for everybody else


@dataclass(slots=True)
class SetState:
    """The slots of one trainer, and the words that lie beside them."""

    index: int
    trainer: str
    slots: list[HeldSlot]
    given: int  # the later, the greater
    word: TrainerWord | None = None
    said: HostWord | None = None  # the host's word
    told: Advice | None = None  # what it was made of
    exited: bool = False  # its trainer's end has been told, or was none
    copies_of: int | None = None  # the rank whose pieces are copied into it from other hosts; None: it is a trainer's

    def end(self) -> None:
        """The end of its trainer is told now, or there is none to tell."""
        self.exited = True

    def done(self, slot: int) -> int:
        """The newest grant of the slot that its trainer has used up or handed back; 0: none."""
        return self.word.done[slot] if self.word is not None and slot < len(self.word.done) else 0

    def is_granted(self, slot: int) -> bool:
        """True while the slot is its trainer's: granted, and not used up or handed back."""
        return self.word is not None and self.slots[slot].granted > self.done(slot)

    def take_back(self) -> None:
        """Its trainer is gone: no slot is granted any more."""
        for number, slot in enumerate(self.slots):
            slot.granted = min(slot.granted, self.done(number))

    def contents(self) -> list[tuple[SlotAddress, Staged]]:
        """What may be read. A granted slot is left out: its trainer may be writing to it."""
        return [
            (SlotAddress(rank=slot.content.rank, index=self.index, slot=number), slot.content)
            for number, slot in enumerate(self.slots)
            if slot.content is not None and not self.is_granted(number)
        ]


class SlotSets:
    """All slot sets of a host.

    Args:
        restore: the newest restore whose discards are carried out.

    Attributes:
        sets: by index.
        out: where commands go; the machine's, for the event at hand.
    """

    def __init__(self, restore: Invalidate | None):
        self.restore = restore
        self.sets: dict[int, SetState] = {}
        self.out: list[HostCommand] = []
        self._given = 0

    def contents(self) -> list[tuple[SlotAddress, Staged]]:
        """What is held here and may be read."""
        return [held for one in self.sets.values() for held in one.contents()]

    def reported(self) -> tuple[Staged, ...]:
        """What is held here and may be read, each piece once."""
        return tuple({(content.rank, content.id): content for _, content in self.contents()}.values())

    def is_needed(self, index: int, advice: Advice | None) -> bool:
        """Whether a set without a trainer holds anything that a recovery or a save may need: else it may be removed."""
        one = self.sets.get(index)
        if one is None:
            return False
        if any(slot.holds for slot in one.slots):
            return True
        kept = [slot.content for slot in one.slots if slot.content is not None]
        return any(why_reusable(content, advice) is None for content in kept)

    # ---------------------------------------------------------------- what the shell has found

    def found(self, event: SetFound) -> None:
        """A set is there, perhaps handed on to another trainer."""
        old = self.sets.get(event.index)
        count = len(event.contents)
        self._given += 1
        one = SetState(
            index=event.index,
            trainer=event.trainer,
            slots=[HeldSlot() for _ in range(count)],
            given=self._given,
            word=event.word,
            copies_of=event.copies_of,
        )
        if old is not None:  # handed on: slots that are being read stay held
            for new, was in zip(one.slots, old.slots, strict=True):
                new.holds, new.doomed = was.holds, was.doomed
        if event.host_word is not None:
            one.said = event.host_word
            for slot, number in zip(one.slots, event.host_word.grants, strict=False):
                slot.granted = number
        self.sets[event.index] = one
        for replaced in self.sets.values():
            if replaced is not one and replaced.trainer == one.trainer and one.trainer:
                replaced.end()  # its trainer lives, with other slots
        self.take(one, event.contents)

    def take(self, one: SetState, contents: Iterable[Staged | None]) -> None:
        """Take what was read in the slots' headers. A granted slot counts as empty: its trainer may
        overwrite it at any moment."""
        for number, found in enumerate(contents):
            slot = one.slots[number]
            if slot.doomed or one.is_granted(number):
                slot.content = None
                continue
            slot.content = found
            if found is not None and self.restore is not None and not self.restore.spares(found.lineage, found.step):
                # Staged in a past that a restore has given up meanwhile.
                # (test_host.test_what_is_staged_late_in_a_past_that_was_given_up_is_discarded)
                self.discard(one, number)

    def drop_replaced(self, advice: Advice | None, is_connected: Callable[[SetState], bool]) -> None:
        """A trainer whose state has grown has other slots: the old ones go once their contents
        aren't needed.

        The old ones stay until the trainer has come with the new ones. `given` tells which are newer;
        their numbers don't, because a set may be handed on.
        (test_host.test_a_trainer_that_has_grown_keeps_its_old_slots_until_no_step_needs_them)
        """
        come = {one.trainer: one.given for one in self.sets.values() if one.trainer and is_connected(one)}
        for one in list(self.sets.values()):
            if one.given < come.get(one.trainer, 0) and not self.is_needed(one.index, advice):
                del self.sets[one.index]
                self.out.append(RemoveSet(index=one.index, trainer=one.trainer, reason=f"trainer {one.trainer} has larger slots"))

    def grant(self, one: SetState, advice: Advice) -> bool:
        """Give the trainer of this set the slots that it may reuse. Whether there were any."""
        granted = False
        for number, slot in enumerate(one.slots):
            # A reader has it, or its trainer may be writing to it.
            # (test_host.test_granted_and_held_slots_are_never_granted_again)
            if slot.holds or one.is_granted(number):
                continue
            reason = why_reusable(slot.content, advice)
            if reason is not None:
                slot.granted += 1
                slot.content = None
                self.out.append(Empty(index=one.index, slot=number, reason=reason))
                granted = True
        return granted

    # ---------------------------------------------------------------- what a restore gives up

    def give_up(self, order: Invalidate) -> None:
        """Discard what a restore has given up, from now on."""
        self.restore = order
        for one in self.sets.values():
            for number, slot in enumerate(one.slots):
                if slot.content is not None and not order.spares(slot.content.lineage, slot.content.step):
                    self.discard(one, number)

    def discard(self, one: SetState, number: int) -> None:
        """It holds nothing any more; its bytes go when no reader is left.
        (test_simulator.test_planted_bug_is_found, "discarded while it is read")"""
        slot = one.slots[number]
        slot.content = None
        if slot.holds:
            slot.doomed = True
        else:
            self._empty(one, number)

    def _empty(self, one: SetState, number: int) -> None:
        self.out.append(Empty(index=one.index, slot=number, reason=GIVEN_UP))

    # ---------------------------------------------------------------- readers

    def find(self, snapshot: SnapshotId, ranks: Iterable[int]) -> tuple[SlotAddress, ...]:
        """Where the pieces of these ranks are, as far as they are here; by rank."""
        found: dict[int, SlotAddress] = {}
        for address, content in self.contents():
            if content.id == snapshot:
                found.setdefault(address.rank, address)
        return tuple(found[rank] for rank in sorted(found.keys() & set(ranks)))

    def hold(self, addresses: Iterable[SlotAddress]) -> None:
        """A reader begins: the bytes stay."""
        for address in addresses:
            self.sets[address.index].slots[address.slot].holds += 1

    def let_go(self, addresses: Iterable[SlotAddress]) -> None:
        """A reader is done: if it was the last, bytes that were given up meanwhile go."""
        for address in addresses:
            one = self.sets.get(address.index)
            if one is None:
                continue
            slot = one.slots[address.slot]
            slot.holds -= 1
            if slot.doomed and not slot.holds:
                slot.doomed = False
                self._empty(one, address.slot)


def applies(order: Invalidate, restore: Invalidate | None) -> bool:
    """False for an Invalidate that was applied already or has been overtaken: it is only acknowledged."""
    return restore is None or order.stamp > restore.stamp
