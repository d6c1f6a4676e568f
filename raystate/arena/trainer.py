"""The trainer's side of the arena: it needs no host to be alive, and leaves behind everything that it completed."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

from raystate.arena import layouts
from raystate.arena.locks import FileLock
from raystate.arena.processes import mark_process
from raystate.arena.slot import Slot
from raystate.arena.slot_set import SetInfo, SlotSet, attach_note, read_note, trainer_lock
from raystate.arena.word import WordCell
from raystate.core.formats.errors import RaystateError

MARKED_LAYOUTS = 8  # so many of a trainer are kept although no slot names them: it may be about to


class TrainerArena:
    """One incarnation's hold on its slot set, from `attach` to `close` or to the end of the process."""

    def __init__(self, opened: SlotSet, lock: FileLock, trainer: str):
        self._set = opened
        self._lock = lock
        self._put: dict[str, None] = {}  # the last used is the last
        self._before_close: list[Callable[[], None]] = []
        self.trainer = trainer
        self.path = opened.path

    @classmethod
    def attach(cls, set_path: str | os.PathLike[str], *, trainer: str, timeout_s: float = 5.0) -> TrainerArena:
        """Take the set that the host allotted to this incarnation.

        Args:
            set_path: `SlotSet.path` as the host said it.
            trainer: the name that the set was allotted to, unique per incarnation.
            timeout_s: how long to wait for the host, which takes the lock for a moment when it looks.

        Raises:
            RaystateError: the set is not, or no longer, this trainer's; it was attached to before under this name; or it is gone.
        """
        path = Path(set_path)
        try:
            lock = FileLock.take(trainer_lock(path, trainer), shared=True, timeout_s=timeout_s)
        except FileNotFoundError:
            raise _not_yours(path, trainer) from None
        if lock is None:
            raise RaystateError(
                f"slot set {path}: the lock of trainer {trainer!r} was not free within {timeout_s:g} s",
                path=str(path),
                waited_s=timeout_s,
            )
        try:
            # Under the lock: the host hands a set on only while no trainer has it.
            info = SetInfo.read(path)
            if info is None or info.trainer != trainer:
                raise _not_yours(path, trainer)
            if note := read_note(lock.path):
                pid = note.get("process", {}).get("pid")
                raise RaystateError(
                    f"slot set {path}: process {pid} has attached as trainer {trainer!r}; ask the host for a set again",
                    path=str(path),
                    pid=pid,
                )
            lock.write(attach_note(trainer, mark_process(os.getpid())))
        except BaseException:
            lock.release()
            raise
        try:
            opened = SlotSet(path, info, role="trainer")
            for slot in opened.slots:
                slot.touch()
            return cls(opened, lock, trainer)
        except BaseException:
            _let_go(lock, trainer)
            raise

    @property
    def is_there(self) -> bool:
        """Whether others find this set. Its pages stay this trainer's if its files were removed."""
        return self._lock.is_there

    @property
    def slots(self) -> list[Slot]:
        return self._set.slots

    @property
    def data_capacity_bytes(self) -> int:
        """What the data of each slot may have. Larger data needs another set: ask the host for one and attach to it too."""
        return self._set.data_capacity_bytes

    @property
    def table_capacity_bytes(self) -> int:
        """What the table of each slot (checksums, items, metrics, custom) may have."""
        return self._set.table_capacity_bytes

    @property
    def trainer_cell(self) -> WordCell:
        """This trainer's own word: only it writes."""
        return self._set.trainer_cell

    @property
    def host_cell(self) -> WordCell:
        """The host's word to this trainer."""
        return self._set.host_cell

    def put_layout(self, data: bytes) -> str:
        """Keep a layout in the arena; returns the name that the slot's table has to say. It is kept while a slot names it, and while
        it is among the newest few that this trainer, attached, has put.

        Raises:
            RaystateError: the arena is gone, or its layouts were locked by another process for too long.
        """
        if self._set.closed:
            raise RaystateError(f"slot set {self.path} is closed: trainer {self.trainer!r} has detached", path=str(self.path))
        ref = layouts.layout_name(data)
        if ref not in self._put or not layouts.has_layout(self.path.parent, ref):  # somebody may have removed it
            layouts.put_layout(self.path.parent, data, slot_set=self.path)
        self._put.pop(ref, None)
        self._put[ref] = None
        for old in list(self._put)[:-MARKED_LAYOUTS]:
            layouts.unmark(self.path, old)
            del self._put[old]
        return ref

    def get_layout(self, ref: str) -> bytes:
        return layouts.get_layout(self.path.parent, ref)

    def before_close(self, calls: Iterable[Callable[[], None]]) -> None:
        """What has to happen before the slots are unmapped."""
        self._before_close += calls

    def close(self) -> bool:
        """Unmap the set and give its lock back.

        Returns:
            True if both happened. False while numpy views of a slot are alive: through one of
            them something could still be written. So the lock goes back when the last is dropped.
        """
        while self._before_close:
            self._before_close.pop()()
        lock, trainer, left = self._lock, self.trainer, self._set.close()
        if not left:
            _let_go(lock, self.trainer)
            return True
        waiting = {id(mapping) for mapping in left}

        def unmapped(number: int) -> None:
            waiting.discard(number)
            if not waiting:
                _let_go(lock, trainer)

        for mapping in left:
            _when_unmapped(mapping, unmapped)
        return False

    def __enter__(self) -> TrainerArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(lock: FileLock, trainer: str) -> None:
    """On purpose: nothing of this process writes to the slots any more, although it goes on."""
    if lock.held:
        lock.write(attach_note(trainer, mark_process(os.getpid()), left=True))
        lock.release()


def _when_unmapped(mapping: mmap.mmap, call: Callable[[int], None]) -> None:
    weakref.finalize(mapping, call, id(mapping)).atexit = False  # at exit the kernel releases the lock


def _not_yours(path: Path, trainer: str) -> RaystateError:
    info = SetInfo.read(path)
    if info is None:
        return RaystateError(f"slot set {path} does not exist (any more)", path=str(path), trainer=trainer)
    owner = f"trainer {info.trainer!r}" if info.trainer else "no trainer"
    return RaystateError(
        f"slot set {path} belongs to {owner}, not to {trainer!r}",
        path=str(path),
        trainer=trainer,
        got=info.trainer,
    )
