"""Slots of shared memory as a trainer has them, without a HostActor; what fills them; and what is read back from them."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raystate.arena.slot import Slot, create_slot_file, fill_slot_file, slot_file_bytes
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.stage import copy
from raystate.arrays.tree import describe
from raystate.arrays.ways import Ways

TABLE_BYTES = 1 << 20


class TakenSlots(list[Slot]):
    """Slots, and what has to happen before they are unmapped."""

    def __init__(self) -> None:
        super().__init__()
        self.before_close: list[Callable[[], None]] = []


@contextmanager
def slots_of(count: int, data_bytes: int) -> Iterator[TakenSlots]:
    """Slots for so many bytes in /dev/shm, every page of them reserved and touched. Their names are gone at once: however this process
    ends, nothing of them stays."""
    data_bytes = -(-data_bytes // 4096) * 4096
    slots = TakenSlots()
    try:
        for number in range(count):
            with tempfile.TemporaryDirectory(prefix="raystate-bench-", dir="/dev/shm") as folder:
                path = Path(folder) / "slot"
                fd = create_slot_file(path, slot_file_bytes(TABLE_BYTES, data_bytes))
                try:
                    slots.append(Slot(path, index=number, table_bytes=TABLE_BYTES, data_bytes=data_bytes, role="trainer"))
                    path.unlink()
                    fill_slot_file(fd)
                finally:
                    os.close(fd)
            slots[-1].touch()
        yield slots
    finally:
        for call in slots.before_close:
            call()
        for slot in slots:
            slot.close()


@dataclass(eq=False, slots=True)
class Copied:
    """One snapshot on its way.

    Attributes:
        held_s: how long `hold` kept the training thread.
        copying_s: (begin, end) of the copy into the slot, once the step was computed; `time.perf_counter`.
    """

    held_s: float
    copying_s: tuple[float, float] = (0.0, 0.0)
    values: Any = ()
    crc32c: tuple[int, ...] = ()
    error: BaseException | None = None
    thread: threading.Thread | None = None

    def wait(self) -> None:
        """Until it is in its slot."""
        assert self.thread is not None
        self.thread.join()
        if self.error is not None:
            raise self.error

    @property
    def seconds(self) -> float:
        return self.copying_s[1] - self.copying_s[0]


class Snapshots:
    """Takes snapshots as raystate's trainer does: `hold` on the training thread, the copy on another.

    Attributes:
        saved: the newest one that `save` has begun.
    """

    def __init__(self, state: Any, slots: TakenSlots):
        self._slots, self._ways, self._taken = slots, Ways(), 0
        described = describe({"state": state})
        self.plan = described.plan
        slots.before_close += self._ways.attach([slot.pages for slot in slots])
        self._ways.foresee(described)  # as behind a trainer's restore_or_init
        self._ways.prepare(held=False)
        self.saved = Copied(0.0)

    def save(self, step: int, state: Any) -> None:
        """As a contestant does, see `Saver`; the step is not told apart."""
        del step
        self.saved = self.take(state)

    def wait(self) -> None:
        """Until it is in its slot."""
        self.saved.wait()

    def take(self, state: Any) -> Copied:
        """Begin one of the state as it will be when its step is computed."""
        begin_s = time.perf_counter()
        described = describe({"state": state}, previous=self.plan)
        slot = self._slots[self._taken % len(self._slots)]
        self._taken += 1
        held = self._ways.hold(described, slot.fill)
        found = Copied(time.perf_counter() - begin_s, values=described.values[0])
        last = state["step"] + 0  # not donated: it says when the step is computed

        def go() -> None:
            try:
                last.block_until_ready()
                begun_s = time.perf_counter()
                found.crc32c = copy(held, slot.fill())
                found.copying_s = (begun_s, time.perf_counter())
                self._ways.prepare(held=True)
            except BaseException as error:
                found.error = error

        found.thread = threading.Thread(target=go)
        found.thread.start()
        return found

    def restore(self, step: int, reference: Any) -> Any:
        """The newest snapshot, checked against its checksums, as arrays where the reference has them."""
        del step
        data = self._slots[(self._taken - 1) % len(self._slots)].data_mut[: self.plan.layout.data_bytes]
        spec = self.plan.layout.trees[0].with_values(self.saved.values)
        source = MemorySource([Holding(layout=self.plan.layout, data=data, crc32c=self.saved.crc32c)], "state")
        return restore_tree(reference, spec, source)

    def close(self) -> None:
        """The slots are somebody else's."""
