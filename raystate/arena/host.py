"""The host's side of the arena: it owns the files, says which trainer gets which slots, and outlives every trainer."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from raystate.arena import layouts
from raystate.arena.capacity import Need
from raystate.arena.copies import copies_bytes
from raystate.arena.files import (
    HOST_LOCK,
    LAYOUTS,
    META,
    SET_PREFIX,
    TRAINER_CELL,
    create_file,
    is_private_dir,
    leave_root,
    make_private_dir,
    page_ceil,
    remove_entry,
    remove_tree,
    write_json,
)
from raystate.arena.locks import FileLock
from raystate.arena.meta import ArenaMeta, lock_arena
from raystate.arena.processes import boot_id, mark_process
from raystate.arena.reserving import Reserving
from raystate.arena.slot import slot_file_bytes
from raystate.arena.slot_set import SetInfo, SlotSet, await_ends, release_all, seize, state_of, trainer_lock
from raystate.arena.vanished import missing_file
from raystate.arena.word import CELL_BYTES, WordCell
from raystate.core.formats.errors import ConfigError, RaystateError
from raystate.core.formats.words import MAX_SLOTS
from raystate.core.host.slot_sets import TrainerState


class HostArena:
    """One node's shared memory for one run. Methods may be called from several threads.

    Attributes:
        path: its directory.
        sets: all slot sets, by index; those of dead trainers and of an earlier HostActor too.
        first_index: the least of new sets: trainers may still name those of an arena that was removed.
        adopted: whether it was there already.
        notes: what was decided while opening and handing out, for the log.
        guard: held while the sets are read or changed. `allotting` is taken first, to allot one.
    """

    def __init__(self, path: Path, lock: FileLock, *, cap_bytes: int, memory_threshold: float | None):
        self.path = path
        self.cap_bytes = cap_bytes
        self.sets: list[SlotSet] = []
        self.first_index = 0
        self.adopted = False
        self.notes: list[str] = []
        self._lock = lock
        self._put: Counter[str] = Counter()  # layouts for slots that this host is filling itself
        self.guard = threading.RLock()
        self.allotting = threading.RLock()
        self._reserving = Reserving(path, self.guard, lambda: lock.held, memory_threshold)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        run: str,
        storage: str,
        node_id: str,
        cap_bytes: int,
        node_pid: int | None = None,
        memory_threshold: float | None = 0.95,
        timeout_s: float = 5.0,
    ) -> HostArena:
        """Create the arena at `path`, or adopt the one of a HostActor that is gone.

        Adopted is only the same format, run, storage, node and boot; anything else is removed, and the arena starts empty.

        Args:
            path: from `arena_path`; what its parent lies in exists.
            cap_bytes: the setting host_memory in bytes (`parse_memory`), over all arenas beside this one.
            node_pid: the node's own process (Ray: the raylet, a worker's parent). Once it is gone, `sweep` may take the arena.
            memory_threshold: share of the node's memory above which Ray kills workers; None: Ray's monitor is off.
            timeout_s: how long to wait for the holder, which may be about to die.

        Raises:
            RaystateError: another process has this arena open (`pid`), or the path is not this user's private directory.
        """
        path = Path(path)
        lock = lock_arena(path, timeout_s)
        arena = cls(path, lock, cap_bytes=cap_bytes, memory_threshold=memory_threshold)
        try:
            here = mark_process(os.getpid())
            lock.write(str(here.pid).encode())
            wanted = ArenaMeta(
                run=run,
                storage=storage,
                node_id=node_id,
                boot=boot_id(),
                host=here,
                node=mark_process(node_pid) if node_pid else None,
            )
            arena._adopt_or_empty(wanted)
            make_private_dir(path / LAYOUTS)
            write_json(path / META, wanted)
            arena.prune_layouts()  # of trainers that left while no HostActor was there
        except BaseException:
            arena.close()
            raise
        return arena

    # ------------------------------------------------------------ sets

    def allot(
        self,
        *,
        trainer: str,
        data_bytes: int,
        table_bytes: int,
        buffer_bytes: int = 0,
        slots: int = 3,
        rank: int | None = None,
        pid: int | None = None,
        copies: int = 0,
        replaced: bool = False,
        given: Callable[[SlotSet], None] = lambda _: None,
    ) -> SlotSet:
        """Give a trainer's incarnation a set of slots of its own, whose contents stay readable until it writes.

        A large enough set that no trainer has is handed on (see `replaced`), with empty words: if
        possible one with a snapshot of `rank`, then the smallest. A trainer that asks again gets
        its set again. Else a new one is reserved and touched: about half a second per GiB.

        A trainer that needs larger slots than it has asks again: it gets a second set, and the first stays its own, attached and
        readable, until it detaches. One that it never came for is not kept for it.

        Args:
            trainer: name of the incarnation, unique.
            data_bytes, table_bytes: what each slot must hold at least.
            buffer_bytes: what writing one of them to storage takes beside it; counted under the cap.
            copies: of other hosts' snapshots for each of its own: room is asked for with a trainer's first set, taken when they come.
            replaced: also hand on a set whose trainer lives, with larger slots. A step that lies there may be needed until every rank
                has staged it. If `trainer` has not yet, it will wait for slots that only its own copy would free.
            pid: the trainer's process on this node, so that a trainer that dies before it attaches doesn't keep its set.
            given: called with the set before anybody else can look at it as that trainer's.

        Raises:
            CapacityError: it does not fit; nothing was reserved, every set stays with its trainer.
            RaystateError: the arena is closed. ConfigError: more than `MAX_SLOTS` slots, of which a control word could not tell.
        """
        if not 1 <= slots <= MAX_SLOTS:
            raise ConfigError(f"snapshot_slots: 1 to {MAX_SLOTS} are possible, got {slots}", field="snapshot_slots", got=slots)
        need = _need(data_bytes, table_bytes, slots, buffer_bytes)
        least = data_bytes, table_bytes, slots, buffer_bytes
        with self.allotting:
            await_ends(lambda: {self.trainer_state(held) for held in self._large(least)})
            with self.guard:
                held = self._find(trainer, least, rank, pid, replaced=replaced)
                if held is not None:
                    given(held)
                    return held
                if not any(one.trainer == trainer for one in self.sets):
                    need = dataclasses.replace(need, copies_bytes=copies_bytes(self.sets, need, copies))
            held = self._create(trainer, need, data_bytes=data_bytes, table_bytes=table_bytes, pid=pid)
            with self.guard:
                self.sets.append(held)
                given(held)
            return held

    def _find(self, trainer: str, least: tuple[int, ...], rank: int | None, pid: int | None, *, replaced: bool) -> SlotSet | None:
        """A set that is the trainer's, or that it can have now."""
        fits = self._large(least)
        for held in fits:
            if held.trainer == trainer and self.trainer_state(held) != "gone":
                return held
        for held in self.sets:
            if held.trainer == trainer and self.trainer_state(held) == "expected":
                self.release(held)  # it asks for a larger one, so it won't come for this one
        for held in sorted(fits, key=lambda held: (not _has_rank(held, rank), held.info.data_bytes, held.index)):
            if self.trainer_state(held) != "gone" or (self._is_replaced(held) and not replaced):
                continue
            if self._hand_over(held, trainer, pid):
                return held
        return None

    def _large(self, least: tuple[int, ...]) -> list[SlotSet]:
        return [held for held in self.sets if held.info.copies_of < 0 and _is_as_large(held.info, least)]

    def _is_replaced(self, held: SlotSet) -> bool:
        """Whether its trainer lives, with other slots."""
        others = (one for one in self.sets if one is not held and one.trainer == held.trainer != "")
        return any(self.trainer_state(one) != "gone" for one in others)

    def make_copies(self, rank: int, source: SetInfo) -> SlotSet:
        """Reserve a set like the rank's own, `source`, for copies of its pieces: half a second per GiB. It counts once it is in `sets`.

        Raises:
            CapacityError: it does not fit; nothing was reserved.
        """
        need = _need(source.data_bytes, source.table_bytes, source.slots, source.buffer_bytes)
        return self._create("", need, data_bytes=source.data_bytes, table_bytes=source.table_bytes, pid=None, copies_of=rank)

    def trainer_state(self, held: SlotSet) -> TrainerState:
        """Who has it, see `core.host.slot_sets.trainer_state`."""
        with self.guard:
            return state_of(held.path, held.info)

    def trainer_alive(self, held: SlotSet) -> bool:
        """Whether the set's trainer lives or may still come."""
        return self.trainer_state(held) in ("attached", "expected")

    def release(self, held: SlotSet) -> bool:
        """Expect the set's trainer no longer: it died, or was told to go, before it attached. False: it is attached."""
        with self.guard:
            locks = seize(held.path)
            if locks is None:
                return False
            try:
                info = dataclasses.replace(held.info, trainer="", owner=None)
                info.write(held.path)  # first: there may be no room for it
                held.info = info
            finally:
                release_all(locks)
            return True

    def remove_set(self, held: SlotSet) -> None:
        """Give a set's memory back. Views of its slots stay readable until they are dropped.

        Raises:
            RaystateError: a trainer is attached to it.
        """
        with self.guard:
            locks = seize(held.path)
            if locks is None:
                raise RaystateError(f"slot set {held.path}: trainer {held.trainer!r} is attached to it", path=str(held.path))
            try:
                self.sets.remove(held)
                held.close()
                remove_tree(held.path)
            finally:
                release_all(locks)
            self.prune_layouts()

    # ------------------------------------------------------------ layouts

    def put_layout(self, data: bytes) -> str:
        """Keep a layout for a slot that this host fills itself; it stays until `let_go_layout`, and then for as long as a slot names it."""
        with self.guard:
            ref = layouts.put_layout(self.path, data)
            self._put[ref] += 1
            return ref

    def let_go_layout(self, ref: str) -> None:
        """The slot for which a layout was put names it now, or never will."""
        with self.guard:
            self._put[ref] -= 1
            self._put = +self._put

    def get_layout(self, ref: str) -> bytes:
        return layouts.get_layout(self.path, ref)

    def prune_layouts(self, keep: Collection[str] = ()) -> list[str]:
        """Remove the layouts that no slot names, that no attached trainer has put, and that this host does not keep; returns them.

        Safe at any time. Removing a set does it; do it when a trainer is gone, too.
        """
        with self.guard:
            return layouts.prune_layouts(self.path, self.sets, {*keep, *self._put})

    # ------------------------------------------------------------ life

    def missing(self, *others: Path) -> Path | None:
        """A file of the arena, or one of these others, that somebody has removed; None: all are there."""
        with self.guard:
            return missing_file(self.path, self._lock, self.sets, others) if self._lock.held else None

    def close(self, remove: bool = False) -> None:
        """Unmap and unlock; the files stay for the next HostActor.

        Args:
            remove: the run is over: remove all files too. A trainer that is attached keeps its pages, under no name, until it ends.
        """
        with self.guard:
            if not self._lock.held:
                return
            for held in self.sets:
                held.close()
            self.sets = []
            if remove:
                remove_tree(self.path, last=HOST_LOCK)
                leave_root(self.path.parent)
            self._lock.release()

    def __enter__(self) -> HostArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ inside

    def _adopt_or_empty(self, wanted: ArenaMeta) -> None:
        found = ArenaMeta.read(self.path)
        names = ("format", "run", "storage", "node_id", "boot")
        differ = "it was never finished" if found is None else ""
        if found:
            pairs = [(name, getattr(found, name), getattr(wanted, name)) for name in names]
            differ = ", ".join(f"{name} {got!r} is not {want!r}" for name, got, want in pairs if got != want)
        for entry in sorted(self.path.iterdir()):
            if entry.name == HOST_LOCK or (entry.name == META and found):
                continue
            if differ or (entry.name == LAYOUTS and not is_private_dir(entry)):
                remove_entry(entry)
            elif entry.name.startswith(SET_PREFIX):
                self._adopt_set(entry)
        self.sets.sort(key=lambda held: held.index)
        self.adopted = not differ
        if found:
            self.notes.append(
                f"removed the old arena: {differ}" if differ else f"adopted the arena with {len(self.sets)} slot sets"
            )

    def _adopt_set(self, path: Path) -> None:
        try:
            if not is_private_dir(path):
                raise RaystateError("it is not a private directory")
            held = SlotSet.open(path, role="host")
            if path.name != f"{SET_PREFIX}{held.index}":
                raise RaystateError(f"it says that it is set {held.index}")
            self.sets.append(held)
        except RaystateError as error:
            self.notes.append(f"removed {path.name}, which was never finished: {error}")
            remove_entry(path)

    def _hand_over(self, held: SlotSet, trainer: str, pid: int | None) -> bool:
        """Make the set `trainer`'s; False if somebody has come to hold it meanwhile."""
        locks = seize(held.path)
        if locks is None:
            return False
        try:
            with contextlib.closing(WordCell.open(held.path / TRAINER_CELL, writable=True)) as cell:
                cell.clear()
            held.host_cell.clear()
            new = trainer_lock(held.path, trainer)
            layouts.unmark_all(held.path)  # its slots name what is still needed
            for lock in locks:
                if lock.path == new:
                    lock.write(b"")
            with contextlib.suppress(FileExistsError):
                os.close(create_file(new))
            self.notes.append(f"handed slot set {held.index} of trainer {held.trainer!r}, who is gone, to {trainer!r}")
            info = dataclasses.replace(held.info, trainer=trainer, owner=mark_process(pid) if pid else None)
            info.write(held.path)  # first: there may be no room for it
            held.info = info
            for lock in locks:
                if lock.path != new:
                    lock.path.unlink(missing_ok=True)
        finally:
            release_all(locks)
        return True

    def _create(
        self, trainer: str, need: Need, *, data_bytes: int, table_bytes: int, pid: int | None, copies_of: int = -1
    ) -> SlotSet:
        info = SetInfo(
            index=max([self.first_index, *(held.index + 1 for held in list(self.sets))]),
            slots=need.slots,
            data_bytes=page_ceil(data_bytes),
            table_bytes=page_ceil(table_bytes),
            buffer_bytes=need.buffer_bytes,
            trainer=trainer,
            owner=mark_process(pid) if pid else None,
            copies_of=copies_of,
        )
        return self._reserving.reserve(info, need, self.cap_bytes)


def _need(data_bytes: int, table_bytes: int, slots: int, buffer_bytes: int) -> Need:
    slot_bytes = slot_file_bytes(table_bytes, data_bytes)
    return Need(slot_bytes=slot_bytes, slots=slots, other_bytes=2 * CELL_BYTES, buffer_bytes=buffer_bytes)


def _is_as_large(has: SetInfo, least: tuple[int, ...]) -> bool:
    return all(map(operator.ge, (has.data_bytes, has.table_bytes, has.slots, has.buffer_bytes), least))


def _has_rank(held: SlotSet, rank: int | None) -> bool:
    return rank is not None and any((header := slot.read_header()) and header.rank == rank for slot in held.slots)
