"""What a HostActor sees to in its arena beside its trainers: that its files are there, and that what is not needed goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from raystate.arena import HostArena
from raystate.runtime.host import stacks
from raystate.runtime.host.slot_store import SlotStore
from raystate.waits import LOOK_EVERY_S, PRUNE_EVERY_S


class Upkeep:
    """All of it is done under the arena's lock.

    Args:
        arena, store: its files.
        door: one that lies there, too.
        vanished: somebody has removed that file. Called once.
        clock: monotonic seconds.
    """

    def __init__(
        self, arena: HostArena, store: SlotStore, door: Path, vanished: Callable[[Path], None], clock: Callable[[], float]
    ):
        self._arena = arena
        self._store = store
        self._door = door
        self._vanished = vanished
        self._clock = clock
        self._has_vanished = False
        self._files_s = clock()
        self._prune_s = clock() + PRUNE_EVERY_S
        self._to_remove: set[tuple[int, str]] = set()

    def has_vanished(self) -> bool:
        """Whether files of the arena have been removed."""
        self._files_s = self._clock() + LOOK_EVERY_S
        if not self._has_vanished and (gone := self._arena.missing(self._door)) is not None:
            self._has_vanished = True
            self._vanished(gone)
        return self._has_vanished

    def finds_vanished(self) -> bool:
        """As `has_vanished`, if it is time to look."""
        return self._clock() >= self._files_s and self.has_vanished()

    def remove(self, index: int, trainer: str) -> None:
        """Remove a slot set, now or as soon as that is possible."""
        if not self._store.remove(index, trainer):
            self._to_remove.add((index, trainer))

    def tidy(self) -> None:
        self._to_remove = {one for one in self._to_remove if not self._store.remove(*one)}
        if self._clock() >= self._prune_s:  # a state whose tree changes leaves a layout behind each time
            self._prune_s = self._clock() + PRUNE_EVERY_S
            self._arena.prune_layouts()
            stacks.sweep(self._arena.path)
