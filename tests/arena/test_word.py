from __future__ import annotations

import mmap
import struct
from pathlib import Path

import pytest

from raystate.arena import MAX_WORD_BYTES, WordCell
from raystate.arena.word import BUFFER_BYTES, CELL_BYTES
from raystate.core.formats.errors import RaystateError
from tests.arena.sets import Child


def _cell(content: bytes = b"") -> tuple[WordCell, mmap.mmap]:
    memory = mmap.mmap(-1, CELL_BYTES)
    memory[: len(content)] = content
    return WordCell(memory, writable=True), memory


def test_reads_back_what_was_written_and_counts():
    cell, memory = _cell()
    assert cell.read() is None
    for number, data in enumerate((b"a", b"", b"x" * MAX_WORD_BYTES, b"b"), start=1):
        assert cell.write(data) == number
        assert cell.read() == (number, data)
        assert WordCell(memory, writable=False).read() == (number, data)


def test_too_long_or_not_the_writer_is_refused():
    cell, memory = _cell()
    with pytest.raises(RaystateError, match=f"{MAX_WORD_BYTES} bytes, got {MAX_WORD_BYTES + 1}"):
        cell.write(b"x" * (MAX_WORD_BYTES + 1))
    with pytest.raises(RaystateError, match="only reads"):
        WordCell(memory, writable=False).write(b"x")


def test_a_new_writer_goes_on_counting_and_clear_hides_the_value():
    cell, memory = _cell()
    for _ in range(5):
        cell.write(b"old")
    successor = WordCell(memory, writable=True)
    successor.clear()
    assert cell.read() is None
    assert successor.write(b"new") == 7
    assert cell.read() == (7, b"new")


@pytest.mark.parametrize("written", [0, 1, 2, 5])
def test_writer_that_dies_at_any_byte_leaves_the_record_before(written: int):
    cell, memory = _cell()
    for number in range(written):
        cell.write(b"record %d" % number)
    before, last = memory[:], cell.read()
    cell.write(b"the next one, longer")
    after = memory[:]
    changed = [at for at in range(CELL_BYTES) if before[at] != after[at]]
    assert len({at // BUFFER_BYTES for at in changed}) == 1
    for order in (changed, changed[::-1], changed[::2] + changed[1::2]):
        torn = bytearray(before)
        for at in order[:-1]:
            torn[at] = after[at]
            reader, memory_now = _cell(bytes(torn))
            assert reader.read() == last
        # The successor writes over the torn one, and both are readable in turn.
        assert reader.write(b"fresh") == written + 1
        assert WordCell(memory_now, writable=False).read() == (written + 1, b"fresh")


def test_any_flipped_bit_is_refused():
    cell, memory = _cell()
    cell.write(b"first")
    cell.write(b"second")
    whole = memory[:]
    for at in (*range(16 + len(b"second")), *range(BUFFER_BYTES - 8, BUFFER_BYTES)):
        for bit in range(8):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            assert _cell(bytes(flipped))[0].read() == (1, b"first")


def test_a_reader_that_is_overtaken_between_the_buffers_does_not_go_back():
    cell, memory = _cell()
    cell.write(b"five")
    old = memory[:]
    cell.write(b"six")
    now = memory[:]
    torn = bytearray(old)
    torn[5] ^= 1  # the other buffer is being written

    class Overtaken:
        """What a slow copy of the cell may see: the odd buffer as it was, the even one half written; then the truth."""

        # Of each look the two heads come first, and then six parts; a second look at what was torn takes only the parts.
        views = [now] * 8 + [bytes(torn)] * 8 + [now] * 6

        def __getitem__(self, part: slice) -> bytes:
            return self.views.pop(0)[part]

    reader = WordCell(Overtaken(), writable=False)  # pyright: ignore[reportArgumentType]
    assert reader.read() == (2, b"six")
    assert reader.read() == (2, b"six")


def test_a_record_whose_head_is_seen_before_its_data_is_found_once_it_is_whole():
    """What has become visible first on another machine's processor: a head alone is not yet a record, and not for ever none."""
    cell, memory = _cell()
    cell.write(b"five")
    before = memory[:]
    cell.write(b"six")
    seen = bytearray(before)
    seen[:16] = memory[:16]  # the head of the newer record, whose number is even
    reader, view = _cell(bytes(seen))
    assert reader.read() == (1, b"five")
    view[:] = memory[:]
    assert reader.read() == (2, b"six")


_FAST_WRITER = """
cell = WordCell.open(sys.argv[1], writable=True)
number = 0
while True:
    number += 1
    size = 8 + number % 1993
    cell.write(number.to_bytes(8, "little") + bytes([number % 251]) * size)
    if number == 100:
        print("writing", flush=True)
"""


def test_never_a_mixture_and_never_backwards_while_another_process_writes(root: Path, child: Child):
    path = root / "cell"
    WordCell.create(path)
    writer, _ = child(_FAST_WRITER, path)
    cell, last, reads, seen = WordCell.open(path, writable=False), 0, 0, set[int]()
    while reads < 20_000 or len(seen) <= 100:  # on a busy machine the writer may get few turns
        reads += 1
        found = cell.read()
        assert found is not None
        seq, data = found
        number = struct.unpack_from("<Q", data)[0]
        assert number == seq >= last
        assert data[8:] == bytes([number % 251]) * (8 + number % 1993)
        last = seq
        seen.add(seq)
    writer.kill()  # wherever it is
    writer.wait()
    final = cell.read()
    assert final is not None and final[0] >= last
    assert WordCell.open(path, writable=True).write(b"successor") == final[0] + 1
