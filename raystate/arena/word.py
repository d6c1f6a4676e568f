"""A small record in shared memory with one writer and any number of readers, in any state of health.

Two buffers take turns. A record is whole if its checksum and both copies of its number agree. So a
reader never sees a mixture, and a writer that dies in mid-record leaves the one before it.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

import google_crc32c

from raystate.arena.files import create_file, open_regular
from raystate.core.formats.errors import RaystateError
from raystate.core.formats.words import MAX_WORD_BYTES

BUFFER_BYTES = 32 * 1024
CELL_BYTES = 2 * BUFFER_BYTES

_HEAD = struct.Struct("<QII")  # number, length, crc32c of (number, length, payload)
_TAIL = struct.Struct("<Q")  # number again, at the buffer's end
_TAIL_AT = BUFFER_BYTES - _TAIL.size
_CLEARED = 0xFFFFFFFF  # as length: no value, but the numbers go on
_TRIES = 10_000  # of a reader that is overtaken by the writer each time


class WordCell:
    """One record of up to `MAX_WORD_BYTES` bytes. Only one process (and one thread of it at a time) may write; everybody may read."""

    def __init__(self, buffer: mmap.mmap, *, writable: bool):
        """Use `CELL_BYTES` of a shared mapping; fresh zeros are a cell that was never written."""
        self._buffer = buffer
        self._writable = writable
        self._newest_seq = 0  # that this reader or writer has seen: an older one is never returned after it
        self._heads = b""  # as they were when the record below was found to be whole, and the newest
        self._found: tuple[int, bytes | None] | None = None

    @classmethod
    def create(cls, path: Path) -> None:
        fd = create_file(path)
        try:
            os.posix_fallocate(fd, 0, CELL_BYTES)
        finally:
            os.close(fd)

    @classmethod
    def open(cls, path: Path, *, writable: bool) -> WordCell:
        fd = open_regular(path, os.O_RDWR if writable else os.O_RDONLY)
        try:
            if os.fstat(fd).st_size != CELL_BYTES:
                raise RaystateError(f"{path} has {os.fstat(fd).st_size} bytes, expected {CELL_BYTES}", path=str(path))
            return cls(mmap.mmap(fd, CELL_BYTES, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ), writable=writable)
        finally:
            os.close(fd)

    def write(self, data: bytes) -> int:
        """Replace the record; returns its number. The record before it stays readable until this one is whole."""
        if len(data) > MAX_WORD_BYTES:
            raise RaystateError(f"a control word holds {MAX_WORD_BYTES} bytes, got {len(data)}", got=len(data))
        return self._write(data, len(data))

    def clear(self) -> None:
        """Readers see no value, as before the first write."""
        self._write(b"", _CLEARED)

    def read(self) -> tuple[int, bytes] | None:
        """The newest whole record as (number, data); None if there is none. Numbers never go back for one reader."""
        found = self._newest()
        if found is None or found[1] is None:
            return None
        return found[0], found[1]

    def close(self) -> None:
        self._buffer.close()

    def _write(self, data: bytes, length: int) -> int:
        if not self._writable:
            raise RaystateError("this process only reads this control word")
        found = self._newest()
        seq = (found[0] if found else 0) + 1
        at = (seq % 2) * BUFFER_BYTES
        head = _HEAD.pack(seq, length, _crc(seq, length, data))
        # The order is for the eye; the checksum alone decides whether a record is whole.
        self._buffer[at + _TAIL_AT : at + BUFFER_BYTES] = _TAIL.pack(seq)
        self._buffer[at + _HEAD.size : at + _HEAD.size + len(data)] = data
        self._buffer[at : at + _HEAD.size] = head
        self._newest_seq = seq
        return seq

    def _copy(self, turn: int) -> bytes:
        """Head, data and tail of one buffer. Only what its length says is copied: most words are short."""
        at = turn * BUFFER_BYTES
        head = self._buffer[at : at + _HEAD.size]
        data = self._buffer[at + _HEAD.size : at + _HEAD.size + _size(_HEAD.unpack(head)[1])]
        return head + data + self._buffer[at + _TAIL_AT : at + BUFFER_BYTES]

    def _newest(self) -> tuple[int, bytes | None] | None:
        # A record has its number and its checksum in its head: while both heads are what they were, there is no newer one.
        heads = self._buffer[: _HEAD.size] + self._buffer[BUFFER_BYTES : BUFFER_BYTES + _HEAD.size]
        if heads == self._heads:
            return self._found
        before: list[bytes] = []
        for _ in range(_TRIES):
            raw = [self._copy(turn) for turn in (0, 1)]
            records = [record for turn in (0, 1) if (record := _parse(raw[turn], turn)) is not None]
            newest = max(records, default=None, key=lambda record: record[0])
            if newest is not None and newest[0] >= self._newest_seq:
                self._newest_seq = newest[0]
                if all(_HEAD.unpack_from(one)[0] <= newest[0] for one in raw):  # else a newer one is about to be whole
                    self._heads, self._found = b"".join(one[: _HEAD.size] for one in raw), newest
                return newest
            if raw == before:  # no process writes now: a torn record stays torn
                return newest
            before = raw
        return None


def _parse(raw: bytes, turn: int) -> tuple[int, bytes | None] | None:
    """The record in a copy of head, data and tail; None if they don't agree."""
    seq, length, crc = _HEAD.unpack_from(raw)
    data = raw[_HEAD.size : -_TAIL.size]
    if seq == 0 or seq % 2 != turn or _TAIL.unpack(raw[-_TAIL.size :])[0] != seq:
        return None
    if len(data) != _size(length) or crc != _crc(seq, length, data):
        return None
    return seq, (None if length == _CLEARED else data)


def _size(length: int) -> int:
    """Bytes of data in a record of that length; a torn length may be any number."""
    return 0 if length == _CLEARED else min(length, MAX_WORD_BYTES)


def _crc(seq: int, length: int, data: bytes) -> int:
    return google_crc32c.value(struct.pack("<QI", seq, length) + data)
