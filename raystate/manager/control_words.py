"""What a trainer and its node's HostActor tell each other through shared memory: one word each, beside the trainer's slots."""

from __future__ import annotations

import contextlib
import threading

from raystate.arena import TrainerArena
from raystate.core.formats.messages import HostWord, TrainerWord
from raystate.core.formats.words import host_word_from_json, trainer_word_to_json


class ControlWords:
    """Those in the arena that the trainer uses at present. Thread-safe.

    Attributes:
        lock: held while the arena changes. A signal handler may ask for a step while its thread holds it.
        arena: None: it has none yet, or none any more.
        set_index: of its slots; -1: none.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.arena: TrainerArena | None = None
        self.set_index = -1
        self._number = 0  # of the newest word
        self._host_seq = -1
        self._host_word: HostWord | None = None

    def move(self, arena: TrainerArena | None, set_index: int = -1) -> None:
        """Use this arena from now on, and let go of the one before."""
        with self.lock:
            old, self.arena, self.set_index = self.arena, arena, set_index
            self._host_seq, self._host_word = -1, None
            if old is not None and old is not arena:
                old.close()

    def close(self) -> None:
        """Let go of the arena at the end. An end that was interrupted is repeated: so the arena is known until it is closed."""
        with self.lock:
            if self.arena is not None:
                self.arena.close()
                self.arena = None

    @property
    def is_lost(self) -> bool:
        """Whether somebody has removed their file: no other process finds them."""
        return self.arena is not None and not self.arena.is_there

    def host_word(self) -> HostWord | None:
        """What the HostActor last told this trainer. A read of shared memory, decoded only when it has changed."""
        with self.lock:
            if self.arena is None:
                return None
            cell = self.arena.host_cell.read()
            if cell is not None and cell[0] != self._host_seq:
                self._host_seq = cell[0]
                with contextlib.suppress(ValueError):  # of another version, or damaged: the next one counts
                    self._host_word = host_word_from_json(cell[1])
            return self._host_word

    def is_granted(self) -> bool:
        """Whether the HostActor has granted this trainer slots."""
        return (word := self.host_word()) is not None and any(word.grants)

    def write(self, word: TrainerWord) -> None:
        """Tell the HostActor."""
        with self.lock:
            if self.arena is not None:
                self.arena.trainer_cell.write(trainer_word_to_json(word))
                self._number = word.number

    @property
    def number(self) -> int:
        """Of the newest word that the HostActor can read; 0: it reads none, also where somebody has
        removed the word's file. (test_vanished.test_nobody_waits_for_a_word_that_nobody_can_read)"""
        with self.lock:
            return 0 if self.arena is None or self.is_lost else self._number
