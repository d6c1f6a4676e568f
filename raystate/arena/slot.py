"""One snapshot's place in shared memory, which describes itself.

A slot file is a header page, a table region and a data region, each starting on a page. The header names what is in the slot and
carries a checksum of itself and of the table; the data's checksums are in the table. It is invalidated before the first byte of the
data changes and written last. So a process that maps the file, at any time and after any death,
sees either a snapshot that was completed, or nothing.

A complete snapshot may be promised later, with other metrics and custom values. These lie at the end of the table region. A mark in the
second half of the header page names them, and is written after them: it counts or it does not.
"""

from __future__ import annotations

import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import google_crc32c
import numpy as np

from raystate.arena.files import FORMAT, PAGE_BYTES, create_file, open_regular, page_ceil
from raystate.core.formats.codec import dumps, loads
from raystate.core.formats.errors import CapacityError, RaystateError, StepNotFoundError
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.reports import Staged
from raystate.core.formats.tree import SlotTable
from raystate.machine.checksum import Bytes, crc32c

Role = Literal["host", "trainer", "reader"]

_MAGIC = b"raystat1"
_PREFIX = struct.Struct("<8sIII")  # magic, format, length of the JSON, crc32c of (format, length, JSON)
_HALF = PAGE_BYTES // 2  # of the header page: the header, then the mark
_MAX_UINT64 = 2**64 - 1  # no length and no checksum has more digits
_TOUCH_BYTES = 64 * 1024 * 1024  # per turn of a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotContent:
    """A complete snapshot as it lies in the slot. `data` is no copy: it is good until the slot is
    reused."""

    header: Staged
    own_table: bytes
    data: Bytes  # (header.nbytes,), read-only
    note: bytes = b""  # metrics and custom values of a later promise

    @property
    def table(self) -> bytes:
        """With what was promised."""
        if not self.note:
            return self.own_table
        metrics, custom = loads(tuple[dict[str, float], Any], self.note)
        return replace(SlotTable.from_bytes(self.own_table), metrics=metrics, custom=custom).to_bytes()


class Slot:
    """One slot, opened in a role. The trainer writes data and header, the host may only invalidate, a reader only reads."""

    def __init__(self, path: Path, *, index: int, table_bytes: int, data_bytes: int, role: Role):
        """Map the slot file.

        Args:
            table_bytes, data_bytes: capacities, whole pages.
        """
        self.index = index
        self.path = path
        self.table_capacity_bytes = table_bytes
        self.data_capacity_bytes = data_bytes
        self.role: Role = role
        self._filling = False
        size = slot_file_bytes(table_bytes, data_bytes)
        fd = open_regular(path, os.O_RDONLY if role == "reader" else os.O_RDWR)
        try:
            if os.fstat(fd).st_size != size:
                raise RaystateError(f"{path} has {os.fstat(fd).st_size} bytes, expected {size}", path=str(path))
            # The host's mapping of the data is read-only as well: no mistake of its own can damage what it guards.
            self._maps = [mmap.mmap(fd, size, access=mmap.ACCESS_WRITE if role == "trainer" else mmap.ACCESS_READ)]
            if role == "host":
                self._maps.append(mmap.mmap(fd, PAGE_BYTES, access=mmap.ACCESS_WRITE))
        finally:
            os.close(fd)
        self._body: Bytes | None = np.frombuffer(self._maps[0], np.uint8)

    # ------------------------------------------------------------ everybody

    def read_header(self) -> Staged | None:
        """What the slot holds; None if it holds nothing complete. Cheap: one page."""
        page = self._page()
        found = _parse(page)
        if found is None:
            return None
        return found[0] if _mark(page, found[0]) is None else replace(found[0], promised=True)

    def read(self) -> SlotContent | None:
        """The slot's snapshot with its table checked; None if there is none. The data's checksums are the caller's to check."""
        page = self._page()
        found = _parse(page)
        if found is None:
            return None
        header, table_len, table_crc = found
        if table_len > self.table_capacity_bytes or header.nbytes > self.data_capacity_bytes:
            return None
        body = self._mapped()
        table = body[PAGE_BYTES : PAGE_BYTES + table_len].tobytes()
        if crc32c(table) != table_crc:
            return None
        start = PAGE_BYTES + self.table_capacity_bytes
        note = b""
        if (mark := _mark(page, header)) is not None:
            note = body[start - min(mark[1], self.table_capacity_bytes) : start].tobytes()
            if crc32c(note) != mark[2]:
                return None
            header = replace(header, promised=True)
        if self._page()[:_HALF] != page[:_HALF]:
            return None
        data = body[start : start + header.nbytes]
        data.flags.writeable = False
        return SlotContent(header=header, own_table=table, data=data, note=note)

    # ------------------------------------------------------------ host and trainer

    def invalidate(self) -> None:
        """The slot holds nothing from now on. The bytes stay where they are."""
        if self.role == "reader":
            raise RaystateError(f"slot {self.path} is open for reading only")
        self._maps[-1][: _PREFIX.size] = bytes(_PREFIX.size)

    # ------------------------------------------------------------ trainer

    def begin(self) -> None:
        """Before the first byte changes: a snapshot that was here is gone."""
        if self.role != "trainer":
            raise RaystateError(f"slot {self.path} is open as {self.role}: only its trainer writes")
        self.invalidate()
        self._maps[0][_HALF : _HALF + _PREFIX.size] = bytes(_PREFIX.size)
        self._filling = True

    def fill(self) -> Bytes:
        """Begin, and what is to be written: see `data_mut`."""
        self.begin()
        return self.data_mut

    @property
    def data_mut(self) -> Bytes:
        """(data_capacity_bytes,) writable, page-aligned, between `begin` and `commit`. Drop the views before the arena closes."""
        if not self._filling:
            raise RaystateError(f"slot {self.path}: begin() comes before writing", path=str(self.path))
        start = PAGE_BYTES + self.table_capacity_bytes
        return self._mapped()[start : start + self.data_capacity_bytes]

    def check(self, header: Staged, table_bytes: int) -> None:
        """Whether `commit` with such a header and a table of `table_bytes` will fit. Ask before `begin`: the slot stays as it is.

        Raises:
            CapacityError: with `needed_bytes`, `available_bytes` and `limit` ("table", "data" or "header").
        """
        for what, size, capacity in (
            ("table", table_bytes, self.table_capacity_bytes),
            ("data", header.nbytes, self.data_capacity_bytes),
            ("header", len(_to_json(header, _MAX_UINT64, _MAX_UINT64)), _HALF - _PREFIX.size),
        ):
            if size > capacity:
                raise CapacityError(
                    f"step {header.step} of rank {header.rank}: the {what} has {size} bytes, its slot has room for {capacity}",
                    step=header.step,
                    rank=header.rank,
                    needed_bytes=size,
                    available_bytes=capacity,
                    limit=what,
                )

    def commit(self, header: Staged, table: bytes) -> None:
        """The data is in place: write the table, then the header, from which moment the slot holds this snapshot.

        Raises:
            CapacityError: what `check` says; the slot holds nothing then.
        """
        if not self._filling:
            raise RaystateError(f"slot {self.path}: begin() comes before commit()", path=str(self.path))
        self.check(header, len(table))
        self._maps[0][PAGE_BYTES : PAGE_BYTES + len(table)] = table
        self._put(0, _to_json(header, len(table), crc32c(table)))
        self._filling = False

    def promise(self, snapshot: SnapshotId, metrics: dict[str, float], custom: Any) -> None:
        """The complete snapshot is promised, with these metrics and custom values instead of its own. Its host may have it already: it
        sees the promise, or the slot is empty by then and nothing has changed.

        Raises:
            StepNotFoundError: the slot holds something else, or nothing.
            CapacityError: they don't fit beside the table; `limit` is "table".
        """
        found = _parse(self._page())
        if found is None or found[0].id != snapshot:
            raise StepNotFoundError(f"slot {self.path} does not hold step {snapshot.step} any more", step=snapshot.step)
        note, room = dumps((metrics, custom)), self.table_capacity_bytes - found[1]
        if len(note) > room:
            raise CapacityError(
                f"step {snapshot.step} of rank {found[0].rank}: metrics and custom values of a later save() have {len(note)} bytes, and "
                f"there is room for {room} beside those of the first",
                step=snapshot.step,
                rank=found[0].rank,
                needed_bytes=len(note),
                available_bytes=room,
                limit="table",
            )
        end = PAGE_BYTES + self.table_capacity_bytes
        self._maps[0][end - len(note) : end] = note
        self._put(_HALF, dumps((snapshot, len(note), crc32c(note))))

    def _put(self, start: int, text: bytes) -> None:
        shared = self._maps[0]
        shared[start + _PREFIX.size : start + _PREFIX.size + len(text)] = text
        shared[start : start + _PREFIX.size] = _PREFIX.pack(_MAGIC, FORMAT, len(text), _crc(text))

    # ------------------------------------------------------------ life

    @property
    def pages(self) -> Bytes:
        """All of the file."""
        return self._mapped()

    def touch(self) -> None:
        """Map every page into this process now, with several threads, so that the first snapshot doesn't pay for it."""
        touch_pages(self._mapped(), write=False)

    def close(self) -> list[mmap.mmap]:
        """Unmap. Returns the mappings that views still use; each goes when its last view does."""
        self._body = None
        self._filling = False
        maps, self._maps = self._maps, []
        return [mapping for mapping in maps if not _closed(mapping)]

    def _page(self) -> bytes:
        self._mapped()
        return self._maps[0][:PAGE_BYTES]

    def _mapped(self) -> Bytes:
        if self._body is None:
            raise RaystateError(f"slot {self.path} is closed", path=str(self.path))
        return self._body


def slot_file_bytes(table_bytes: int, data_bytes: int) -> int:
    """Size of a slot's file."""
    return PAGE_BYTES + page_ceil(table_bytes) + page_ceil(data_bytes)


def create_slot_file(path: Path, size_bytes: int) -> int:
    """Promise a slot's bytes: visible to everybody who adds up sizes, not reserved yet. Returns the descriptor."""
    return create_file(path, size_bytes)


def fill_slot_file(fd: int) -> None:
    """Reserve every page (an error now, never a signal later) and touch it once: fresh pages cost twenty times as much.

    Raises:
        OSError: ENOSPC, the file system is full.
    """
    size_bytes = os.fstat(fd).st_size
    os.posix_fallocate(fd, 0, size_bytes)
    touch_pages(np.frombuffer(mmap.mmap(fd, size_bytes), np.uint8), write=True)


def touch_pages(body: Bytes, *, write: bool) -> None:
    """Access one byte of every page, on several threads. `write`: set it to zero."""

    def visit(start: int) -> None:
        pages = body[start : start + _TOUCH_BYTES : PAGE_BYTES]
        if write:
            pages[...] = 0
        else:
            pages.max()

    threads = min(8, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="raystate-touch") as pool:
        for _ in pool.map(visit, range(0, body.size, _TOUCH_BYTES)):
            pass


def _closed(mapping: mmap.mmap) -> bool:
    try:
        mapping.close()
    except BufferError:  # somebody holds a view of it
        return False
    return True


def _parse(page: bytes) -> tuple[Staged, int, int] | None:
    try:
        return loads(tuple[Staged, int, int], _text(page, 0))
    except ValueError:  # there is none, or it is whole but not a header of this version
        return None


def _mark(page: bytes, header: Staged) -> tuple[SnapshotId, int, int] | None:
    """That of a later promise of this snapshot."""
    try:
        mark = loads(tuple[SnapshotId, int, int], _text(page, _HALF))
    except ValueError:
        return None
    return mark if mark[0] == header.id else None


def _text(page: bytes, start: int) -> bytes:
    magic, version, length, crc = _PREFIX.unpack_from(page, start)
    text = page[start + _PREFIX.size : start + _PREFIX.size + length]
    if magic != _MAGIC or version != FORMAT or length > _HALF - _PREFIX.size or _crc(text) != crc:
        return b""
    return text


def _to_json(header: Staged, table_len: int, table_crc: int) -> bytes:
    return dumps((header, table_len, table_crc))


def _crc(text: bytes) -> int:
    return google_crc32c.value(struct.pack("<II", FORMAT, len(text)) + text)
