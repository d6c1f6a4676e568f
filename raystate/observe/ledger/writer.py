"""Writing a run's ledger: in batches, on a thread of its own, and never more than a bounded number of objects and bytes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from raystate.core.formats.errors import RaystateError
from raystate.observe.ledger.lines import EVENTS, batch_in, batch_name, batch_of, is_batch
from raystate.observe.ledger.reader import read_ledger
from raystate.observe.ledger.thinning import thinned
from raystate.storage import ObjectInfo, Storage
from raystate.waits import GOODBYE_S, LOOK_EVERY_S, RETRY_FIRST_S, RETRY_LAST_S

logger = logging.getLogger("raystate.coordinator")

MOST_OBJECTS = 128
MERGED = 64  # the smallest ones, at a time
MOST_BYTES = 24 << 20
_THINNED = 8  # objects at a time
_MOST_WAITING = 5_000  # lines, while storage takes none
_REMEMBERED = 64 << 10  # bytes; an object that is larger is read again to be merged


@dataclass(slots=True)
class _Object:
    info: ObjectInfo
    data: bytes | None = None  # what lies there, if that is remembered


def _size(one: _Object) -> int:
    return one.info.size


class LedgerWriter:
    """Puts lines into storage: at most one object a second, and each within about a second.

    Of more than `MOST_OBJECTS` objects, those of earlier attempts among them, the smallest are merged into one. Of more than `MOST_BYTES`
    the largest object is made smaller: see `thinned`. An object is deleted only when what takes its place is there: what dies
    in between leaves lines twice, which readers drop. A superseded attempt that still writes does no harm: its names are its own.

    Args:
        storage: the run's.
        pause_s: between two objects.

    Attributes:
        earlier_restarts: of the trainers, that earlier attempts have noted; None: they have not been counted yet.
    """

    def __init__(self, storage: Storage, *, pause_s: float = LOOK_EVERY_S):
        self._storage = storage
        self._pause_s = pause_s
        self._attempt = 0
        self._number = 0
        self._waiting: list[bytes] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None  # while there is something to write, and for a pause after that
        self._objects: dict[str, _Object] | None = None  # by name; None: not looked yet
        self._lost = 0  # lines that were given up since storage took the last one
        self._is_told = False  # that storage takes none
        self.earlier_restarts: int | None = None

    def begin(self, attempt: int) -> None:
        """Lines that are noted from now on belong to this attempt."""
        self._attempt = attempt
        self.earlier_restarts = 0 if attempt <= 1 else None

    def note(self, line: bytes) -> None:
        """It is written soon. Returns at once."""
        with self._lock:
            if len(self._waiting) >= _MOST_WAITING:
                self._lost += 1
                return
            self._waiting.append(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raystate-ledger", daemon=True)
                self._thread.start()

    def close(self, timeout_s: float = GOODBYE_S) -> None:
        """Wait a moment for what is being written: the process ends now."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def put(self, lines: Sequence[bytes]) -> None:
        """Write them now, on this thread: for one that has no others. Raises RaystateError."""
        self._write(lines)
        self._tidy()

    # ------------------------------------------------------------ its thread

    def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            with self._lock:
                lines, self._waiting = self._waiting, []
                if not lines:
                    self._thread = None
                    return
            try:
                self._write(lines)
                pause_s = RETRY_FIRST_S
            except RaystateError as error:
                self._failed(error)
                with self._lock:
                    if self._closing.is_set():
                        self._thread = None
                        return
                    self._lost += max(0, len(lines) + len(self._waiting) - _MOST_WAITING)
                    self._waiting = [*lines, *self._waiting][:_MOST_WAITING]
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, RETRY_LAST_S)
                continue
            try:
                if self.earlier_restarts is None:
                    self._count_restarts()
                self._tidy()
            except RaystateError as error:  # next time: until then there is a little more than there should be
                logger.debug("the ledger could not be read or merged: %s", error)
            self._closing.wait(self._pause_s)

    def _count_restarts(self) -> None:
        found = read_ledger(self._storage, kinds=("recovery",))
        self.earlier_restarts = sum(one.attempt < self._attempt for one in found.lines)

    def _failed(self, error: RaystateError) -> None:
        level = logging.DEBUG if self._is_told else logging.WARNING
        logger.log(level, "the ledger could not be written: %s", error)
        self._is_told = True

    def _write(self, lines: Sequence[bytes]) -> None:
        if self._objects is None:
            found = [info for info in self._storage.list(EVENTS) if is_batch(info.name)]
            self._objects = {info.name: _Object(info) for info in found}
        self._create(self._objects, batch_of(self._attempt, list(lines)))
        if self._lost:
            logger.warning("%d lines of the ledger are lost: storage took none for too long", self._lost)
        self._is_told, self._lost = False, 0

    def _create(self, objects: dict[str, _Object], data: bytes) -> None:
        self._number += 1  # a try that failed may yet appear: never the same name with other lines
        name = batch_name(self._attempt, self._number)
        self._storage.create_or_same(name, data)
        info = ObjectInfo(name=name, size=len(data))
        objects[name] = _Object(info, data if len(data) <= _REMEMBERED else None)

    # ------------------------------------------------------------ few and small

    def _tidy(self) -> None:
        objects = self._objects
        if objects is None:
            return
        if len(objects) > MOST_OBJECTS:
            self._merge(objects, sorted(objects.values(), key=_size)[:MERGED])
        for _ in range(_THINNED):
            if sum(map(_size, objects.values())) <= MOST_BYTES:
                return
            self._thin(objects, max(objects.values(), key=_size))

    def _merge(self, objects: dict[str, _Object], those: Sequence[_Object]) -> None:
        lines: dict[bytes, None] = {}  # what a crash has left twice becomes one again
        merged: list[_Object] = []
        for one in those:
            found = self._lines(objects, one)
            if found is not None:
                lines |= dict.fromkeys(found)
                merged.append(one)
        if len(merged) > 1:
            self._put(objects, merged, batch_of(self._attempt, list(lines)))

    def _thin(self, objects: dict[str, _Object], one: _Object) -> None:
        lines = self._lines(objects, one)
        if lines is not None:
            self._put(objects, [one], batch_of(self._attempt, thinned(lines), replaces=one.info.name))

    def _put(self, objects: dict[str, _Object], old: Sequence[_Object], data: bytes) -> None:
        """In the place of these."""
        self._create(objects, data)
        for one in old:
            del objects[one.info.name]
        self._storage.delete_all([one.info for one in old])

    def _lines(self, objects: dict[str, _Object], one: _Object) -> list[bytes] | None:
        """None: it is gone, or it isn't whole, or not of this version. It is left alone from now on."""
        data = one.data if one.data is not None else self._storage.find(one.info.name)
        try:
            batch = batch_in(data or b"")
        except ValueError:
            batch = None
        if batch is None or not batch.is_whole:
            del objects[one.info.name]
            return None
        return batch.lines
