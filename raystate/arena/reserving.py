"""Reserving a new slot set: promised under the locks, and filled under none, since that takes half a second per GiB."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from raystate.arena.capacity import Need, check_capacity, lock_root, reservation_failed
from raystate.arena.files import SET_PREFIX, SLOT_PREFIX, remove_tree
from raystate.arena.slot import create_slot_file
from raystate.arena.slot_set import SetInfo, SlotSet, create_set, fill_slots
from raystate.core.formats.errors import RaystateError


class Reserving:
    """Makes the slot sets of one arena.

    Args:
        arena: its directory.
        guard: the arena's, held also to remove the directory: while this is held, it is gone or
            stays.
        is_open: whether the directory is this process's; asked under the guard.
        memory_threshold: see `capacity.check_capacity`.
    """

    def __init__(self, arena: Path, guard: threading.RLock, is_open: Callable[[], bool], memory_threshold: float | None):
        self._arena = arena
        self._guard = guard
        self._is_open = is_open
        self._memory_threshold = memory_threshold

    def reserve(self, info: SetInfo, need: Need, cap_bytes: int) -> SlotSet:
        """A new set, every page of it reserved and touched.

        Args:
            info: its index is the least that the set may have.
            cap_bytes: see `capacity.check_capacity`.

        Raises:
            CapacityError: it does not fit. RaystateError: the arena was closed meanwhile. Nothing was reserved.
        """
        root = self._arena.parent
        path: Path | None = None
        files: list[int] = []
        try:
            # Adding up and promising is one act for all hosts on this node; reserving takes longer, and is not.
            with lock_root(root):
                check_capacity(root, need, cap_bytes=cap_bytes, memory_threshold=self._memory_threshold)
                with self._guard:
                    self._check_open()
                    index = info.index
                    while os.path.lexists(self._arena / f"{SET_PREFIX}{index}"):  # being made, not ours, or left by a failure
                        index += 1
                    path = self._arena / f"{SET_PREFIX}{index}"
                    path.mkdir(mode=0o700)
                    for number in range(need.slots):
                        files.append(create_slot_file(path / f"{SLOT_PREFIX}{number}", need.slot_bytes))
            fill_slots(files)
            with self._guard:
                self._check_open()
                return create_set(path, replace(info, index=index))
        except BaseException as error:
            with self._guard:
                if path is not None and self._is_open():
                    remove_tree(path)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise reservation_failed(root, need, cap_bytes) from error
            if isinstance(error, OSError):
                raise RaystateError(f"slot set {path} could not be created: {error}", path=str(path)) from error
            raise
        finally:
            for fd in files:
                os.close(fd)

    def _check_open(self) -> None:
        if not self._is_open():
            raise RaystateError(f"the arena {self._arena} was closed: its run ends", path=str(self._arena))
