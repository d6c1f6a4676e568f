"""The slots and control words of one trainer, and who may write to them.

A set belongs to one incarnation of a trainer at a time. That trainer holds a shared lock on a file
of its own in the set. The lock ends with its process, also if it is killed. The host hands a set on
only while it holds every lock file of the set itself. So a trainer that slept through its own
replacement finds the set taken, and one that still maps the set keeps it.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raystate.arena.files import (
    FORMAT,
    HOST_CELL,
    SET_META,
    SET_PREFIX,
    SLOT_PREFIX,
    TRAINER_CELL,
    TRAINER_LOCK_PREFIX,
    create_file,
    is_private_dir,
    read_form,
    read_json,
    write_json,
)
from raystate.arena.locks import FileLock
from raystate.arena.processes import ProcessMark, is_gone, runs
from raystate.arena.slot import Role, Slot, fill_slot_file
from raystate.arena.word import WordCell
from raystate.core.formats.codec import decode, dumps
from raystate.core.formats.errors import RaystateError
from raystate.core.host.slot_sets import TrainerState, trainer_state
from raystate.machine.own_time import own_time
from raystate.machine.threads import map_in_threads
from raystate.waits import GOODBYE_S, SOON_S


@dataclass(frozen=True, slots=True, kw_only=True)
class SetInfo:
    """What `set.json` says. It is written last, so a set without it was never finished."""

    index: int
    slots: int
    data_bytes: int  # capacity of each slot, whole pages
    table_bytes: int
    buffer_bytes: int  # memory that writing one of its snapshots to storage takes beside it
    trainer: str  # the incarnation it was allotted to; "": no trainer has it
    owner: ProcessMark | None = None  # that trainer's process, if the request named it
    copies_of: int = -1  # the rank whose pieces are copied into it from other hosts; -1: it is a trainer's
    format: int = FORMAT

    def write(self, path: Path) -> None:
        write_json(path / SET_META, self)

    @classmethod
    def read(cls, path: Path) -> SetInfo | None:
        info = read_form(cls, path / SET_META)
        if info is None or info.format != FORMAT:
            return None
        return info if min(info.index, info.slots, info.data_bytes, info.table_bytes, info.buffer_bytes) >= 0 else None


class SlotSet:
    """A set of slots, opened in a role.

    Attributes:
        index: number within the arena.
        path: its directory; what a trainer attaches to.
        info: capacities, and whom it was allotted to when this object last looked.
        slots: in order of their index.
        trainer_cell: the word trainer -> host.
        host_cell: the word host -> trainer.
    """

    def __init__(self, path: Path, info: SetInfo, *, role: Role):
        self.path = path
        self.info = info
        self.index = info.index
        self.slots: list[Slot] = []
        self._cells: list[WordCell] = []
        try:
            for number in range(info.slots):
                self.slots.append(
                    Slot(
                        path / f"{SLOT_PREFIX}{number}",
                        index=number,
                        table_bytes=info.table_bytes,
                        data_bytes=info.data_bytes,
                        role=role,
                    )
                )
            for name, writer in ((TRAINER_CELL, "trainer"), (HOST_CELL, "host")):
                self._cells.append(WordCell.open(path / name, writable=role == writer))
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | ValueError):  # removed meanwhile, some of it is missing, or no descriptor is left
                raise RaystateError(f"slot set {path} cannot be opened: {error}", path=str(path)) from error
            raise
        self.trainer_cell, self.host_cell = self._cells

    @classmethod
    def open(cls, path: str | Path, *, role: Role = "reader") -> SlotSet:
        """Map a finished set, by default only to read what is in it (say, the slots of a trainer that is gone).

        Raises:
            RaystateError: there is no finished set of this format at `path`.
        """
        info = SetInfo.read(Path(path))
        if info is None:
            raise RaystateError(f"{path} is not a finished slot set of format {FORMAT}", path=str(path))
        return cls(Path(path), info, role=role)

    @property
    def trainer(self) -> str:
        return self.info.trainer

    @property
    def data_capacity_bytes(self) -> int:
        """What the data of each slot may have."""
        return self.info.data_bytes

    @property
    def table_capacity_bytes(self) -> int:
        """What the table of each slot may have."""
        return self.info.table_bytes

    @property
    def closed(self) -> bool:
        return not self._cells

    def close(self) -> list[mmap.mmap]:
        """Unmap everything. Returns the mappings that views still use; each goes when its last view does."""
        left = [mapping for slot in self.slots for mapping in slot.close()]
        for cell in self._cells:
            cell.close()
        self._cells = []
        return left


def fill_slots(slot_files: list[int]) -> None:
    """Reserve the slots of a new set: open files that have their sizes.

    Raises:
        OSError: the file system is full.
    """
    map_in_threads(fill_slot_file, slot_files, threads=len(slot_files), name="raystate-reserve")


def create_set(path: Path, info: SetInfo) -> SlotSet:
    """Finish a new set, whose slots are reserved: put the rest beside them."""
    for name in (TRAINER_CELL, HOST_CELL):
        WordCell.create(path / name)
    os.close(create_file(trainer_lock(path, info.trainer)))
    info.write(path)
    return SlotSet(path, info, role="host")


def trainer_lock(path: Path, trainer: str) -> Path:
    """The lock file of one incarnation in the set at `path`; any text can name a trainer."""
    return path / f"{TRAINER_LOCK_PREFIX}{hashlib.sha256(trainer.encode()).hexdigest()[:16]}"


def trainer_locks(path: Path) -> list[Path]:
    return sorted(path.glob(f"{TRAINER_LOCK_PREFIX}*"))


def attach_note(trainer: str, mark: ProcessMark, *, left: bool = False) -> bytes:
    """What a trainer leaves in its lock file: an empty one was never taken. `left`: it let go of the set on purpose."""
    return dumps({"trainer": trainer, "process": mark, "left": int(left)})


def read_note(path: Path) -> dict[str, Any] | None:
    return read_json(path)


def seize(path: Path) -> list[FileLock] | None:
    """Hold every trainer's lock of the set at `path`, or None if a trainer holds one. The caller releases them."""
    held: list[FileLock] = []
    for lock_path in trainer_locks(path):
        try:
            lock = FileLock.take(lock_path, shared=False)
        except (FileNotFoundError, RaystateError):  # gone, or no file: no trainer can hold that
            continue
        if lock is None:
            release_all(held)
            return None
        held.append(lock)
    return held


def state_of(path: Path, info: SetInfo) -> TrainerState:
    """Who has the set at `path`: see `core.host.slot_sets.trainer_state`."""
    locks = seize(path)
    if locks is not None:
        release_all(locks)
    lock_path = trainer_lock(path, info.trainer)
    if locks is not None and (not info.trainer or not lock_path.exists()):
        return "gone"
    note = read_note(lock_path)
    if note is None:
        came = lock_path.exists() and lock_path.stat().st_size > 0
        return trainer_state(locked=locks is None, came=came, left=False, runs=not (came or (info.owner and is_gone(info.owner))))
    try:
        living = runs(decode(ProcessMark, note.get("process")))
    except ValueError:
        living = False
    return trainer_state(locked=locks is None, came=True, left=bool(note.get("left")), runs=living)


def await_ends(states: Callable[[], set[TrainerState]]) -> None:
    """Until the processes of killed trainers have ended, while none of these sets could be handed on otherwise. No longer than its wait:
    a new trainer gets other slots then, if there is room for them."""
    deadline_s = own_time() + GOODBYE_S
    while own_time() < deadline_s and "ending" in (now := states()) and "gone" not in now:
        time.sleep(SOON_S)


def release_all(locks: list[FileLock]) -> None:
    for lock in locks:
        lock.release()


def finished_sets(path: Path) -> list[SlotSet]:
    """All finished slot sets of an arena, by name, to read what is in them."""
    found: list[SlotSet] = []
    for entry in sorted(path.glob(f"{SET_PREFIX}*")):
        with contextlib.suppress(RaystateError, OSError):  # not finished, or removed just now
            if is_private_dir(entry):
                found.append(SlotSet.open(entry))
    return found
