"""The arena as the Host machine sees it: words and headers in, words and emptied slots out."""

from __future__ import annotations

import logging
from pathlib import Path

from raystate.arena import HostArena, Slot, SlotSet
from raystate.arena.files import read_form, write_json
from raystate.arena.layouts import has_layout, named_by
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.host_messages import Empty, Remember, SetFound, SetRead, SlotAddress, Speak
from raystate.core.formats.messages import Staged, TrainerWord
from raystate.core.formats.words import host_word_from_json, host_word_to_json, trainer_word_from_json

logger = logging.getLogger("raystate.host")

MEMORY = "memory.json"


class SlotStore:
    """One host's arena. Not thread-safe: the loop's lock guards it."""

    def __init__(self, arena: HostArena):
        self.arena = arena
        self._read: dict[int, int] = {}  # set -> number of the word that was read last
        self._to_remember: Remember | None = None  # there was no room for it

    def _set(self, index: int) -> SlotSet:
        return next(one for one in self.arena.sets if one.index == index)

    # ------------------------------------------------------------ reading

    def found(self, held: SlotSet) -> SetFound:
        """What lies in a set: first the words, then the slots."""
        self._read.pop(held.index, None)
        told = held.trainer_cell.read()
        word = self._word(held, told) if told is not None else None
        cell = held.host_cell.read()
        try:
            said = host_word_from_json(cell[1]) if cell is not None else None
        except ValueError as error:
            logger.warning("the host's word in %s can't be read: %s", held.path, error)
            said = None
        copies_of = held.info.copies_of if held.info.copies_of >= 0 else None
        return SetFound(
            index=held.index, trainer=held.trainer, word=word, contents=self._whole(held), host_word=said, copies_of=copies_of
        )

    def _whole(self, held: SlotSet) -> tuple[Staged | None, ...]:
        """A slot whose layout somebody has removed is torn.
        (test_vanished.test_a_slot_without_its_layout_is_not_adopted)"""
        refs = [named_by(slot) for slot in held.slots]
        is_whole = [ref is not None and has_layout(self.arena.path, ref) for ref in refs]
        return tuple(content if whole else None for content, whole in zip(_contents(held), is_whole, strict=True))

    def changes(self) -> list[SetRead]:
        """The sets whose trainers have written a new word."""
        if self._to_remember is not None:
            self.remember(self._to_remember)
        changed: list[SetRead] = []
        for held in self.arena.sets:
            told = held.trainer_cell.read()
            if told is None or told[0] == self._read.get(held.index):
                continue
            word = self._word(held, told)
            if word is not None:
                changed.append(SetRead(index=held.index, word=word, contents=_contents(held)))
        return changed

    def _word(self, held: SlotSet, told: tuple[int, bytes]) -> TrainerWord | None:
        number, data = told
        try:
            word = trainer_word_from_json(data)
        except ValueError as error:
            logger.warning("the trainer's word in %s can't be read: %s", held.path, error)
            return None
        self._read[held.index] = number
        return word

    def unlocked(self, index: int) -> SetRead | None:
        """The set's contents, if no process holds it or is on the way to it; else None."""
        held = self._set(index)
        if self.arena.trainer_alive(held):
            return None
        return SetRead(index=index, word=None, contents=self._whole(held))

    def is_attached(self, index: int) -> bool:
        """Whether a trainer holds the set's lock."""
        held = next((one for one in self.arena.sets if one.index == index), None)
        return held is not None and self.arena.trainer_state(held) == "attached"

    def slot(self, address: SlotAddress) -> Slot:
        return self._set(address.index).slots[address.slot]

    def set_of(self, address: SlotAddress) -> SlotSet:
        return self._set(address.index)

    def path(self, address: SlotAddress) -> str:
        return str(self._set(address.index).path)

    # ------------------------------------------------------------ what the machine asks for

    def speak(self, command: Speak) -> None:
        self._set(command.index).host_cell.write(host_word_to_json(command.word))

    def empty(self, command: Empty) -> None:
        self._set(command.index).slots[command.slot].invalidate()

    def remove(self, index: int, trainer: str) -> bool:
        """Give the memory of a trainer's set back; False: somebody still has it. One that is another's by now stays."""
        held = next((one for one in self.arena.sets if one.index == index and one.trainer == trainer), None)
        if held is None:
            return True
        try:
            self.arena.remove_set(held)
        except RaystateError:
            return False
        self._read.pop(index, None)
        return True

    def remember(self, memory: Remember) -> None:
        """Write down what has to outlive this HostActor; where there is no room, later: its other
        decisions must not wait. Killed before there is room, it recalls what was true before."""
        try:
            write_json(self._memory_path, memory)
        except (OSError, RaystateError) as error:
            if self._to_remember is None:
                logger.warning("this HostActor can't write what its successor needs to %s: %s", self._memory_path, error)
            self._to_remember = memory
        else:
            self._to_remember = None

    def recall(self) -> Remember:
        """What an earlier HostActor of this arena remembered."""
        return read_form(Remember, self._memory_path) or Remember()

    @property
    def _memory_path(self) -> Path:
        return self.arena.path / MEMORY


def _contents(held: SlotSet) -> tuple[Staged | None, ...]:
    """What its slots hold; None: nothing complete."""
    return tuple(content.header if content else None for content in [slot.read() for slot in held.slots])
