from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from raystate.arena import HostArena, Slot, SlotSet, TrainerArena
from raystate.core.formats.errors import CapacityError, RaystateError, StepNotFoundError
from raystate.core.formats.messages import Staged
from raystate.core.formats.tree import SlotTable
from tests.arena.sets import Child, OpenHost

HEADER = Staged(lineage="1.1.abc", step=7, rank=0, world=2, layout="1234", promised=True, nbytes=10_000)


def pattern(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def fill(arena: TrainerArena, index: int, header: Staged = HEADER, table: bytes = b"table") -> np.ndarray:
    slot, data = arena.slots[index], pattern(header.nbytes, header.step)
    slot.begin()
    slot.data_mut[: data.size] = data
    slot.commit(header, table)
    return data


@pytest.fixture
def pair(open_host: OpenHost):
    host = open_host()
    held = host.allot(trainer="t1", data_bytes=10_000, table_bytes=100)
    with TrainerArena.attach(held.path, trainer="t1") as trainer:
        yield held, trainer


def test_a_committed_slot_is_read_by_the_host_and_by_a_reader(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    assert [slot.read() for slot in held.slots] == [None, None, None]
    data = fill(trainer, 1)
    for reader in (held, SlotSet.open(held.path)):
        content = reader.slots[1].read()
        assert content is not None
        assert (content.header, content.table) == (HEADER, b"table")
        assert content.data.shape == (10_000,) and np.array_equal(content.data, data)
        assert reader.slots[0].read() is None


def test_views_of_the_data_are_read_only_and_aligned(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    fill(trainer, 0)
    for slot in (held.slots[0], trainer.slots[0]):
        content = slot.read()
        assert content is not None and not content.data.flags.writeable
        assert content.data.ctypes.data % 4096 == 0
    hosts = held.slots[0].read()
    assert hosts is not None
    with pytest.raises(ValueError):
        hosts.data.flags.writeable = True  # the mapping itself cannot be written


def test_begin_makes_the_slot_empty_before_a_byte_changes(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    fill(trainer, 0)
    with pytest.raises(RaystateError, match="begin"):
        _ = trainer.slots[0].data_mut
    trainer.slots[0].begin()
    assert held.slots[0].read() is None and held.slots[0].read_header() is None
    trainer.slots[0].commit(replace(HEADER, step=8), b"")
    content = held.slots[0].read()
    assert content is not None and content.header.step == 8 and content.table == b""
    with pytest.raises(RaystateError, match="begin"):
        trainer.slots[0].commit(HEADER, b"")


def test_only_the_trainer_writes_and_only_host_and_trainer_invalidate(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    fill(trainer, 0)
    with pytest.raises(RaystateError, match="open as host"):
        held.slots[0].begin()
    with pytest.raises(RaystateError, match="reading only"):
        SlotSet.open(held.path).slots[0].invalidate()
    held.slots[0].invalidate()
    assert trainer.slots[0].read() is None


def test_what_does_not_fit_the_slot_is_refused_and_leaves_it_empty(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    for header, table, what in ((HEADER, b"x" * 5000, "table"), (replace(HEADER, nbytes=20_000), b"", "data")):
        trainer.slots[0].begin()
        with pytest.raises(CapacityError, match=f"step 7 of rank 0: the {what} has .* bytes, its slot has room for"):
            trainer.slots[0].commit(header, table)
        assert held.slots[0].read() is None


def test_what_fits_is_known_before_a_slot_is_touched(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    for side in (held, trainer):
        assert (side.data_capacity_bytes, side.table_capacity_bytes) == (12_288, 4096)
        assert (side.slots[0].data_capacity_bytes, side.slots[0].table_capacity_bytes) == (12_288, 4096)
    fill(trainer, 0, table=b"x" * 4096)
    slot = trainer.slots[0]
    slot.check(HEADER, 4096)
    for header, table_bytes, limit, needed in (
        (HEADER, 4097, "table", 4097),
        (replace(HEADER, nbytes=12_289), 0, "data", 12_289),
        (replace(HEADER, lineage="x" * 4096), 0, "header", None),
    ):
        with pytest.raises(CapacityError) as caught:
            slot.check(header, table_bytes)
        assert caught.value.limit == limit and caught.value.needed_bytes == (needed or caught.value.needed_bytes)
        assert caught.value.needed_bytes > caught.value.available_bytes and (caught.value.step, caught.value.rank) == (7, 0)
    content = held.slots[0].read()
    assert content is not None and content.header == HEADER


def test_a_header_of_the_largest_numbers_and_a_lineage_of_a_thousand_characters_fits(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    large = 2**63
    header = Staged(
        lineage=f"{large}.{large}.{'f' * 1000}", step=large, rank=large, world=large, layout="f" * 64, promised=False, nbytes=8
    )
    fill(trainer, 0, header)
    assert held.slots[0].read_header() == header


def test_a_whole_header_of_another_version_reads_as_empty(pair: tuple[SlotSet, TrainerArena], monkeypatch: pytest.MonkeyPatch):
    from raystate.arena import slot as module

    held, trainer = pair
    for text in (b"{}", b"[]", b"7", b'{"table_len":1,"table_crc32c":2,"lineage":"x"}', b'{"table_len":[],"table_crc32c":2}'):
        monkeypatch.setattr(module, "_to_json", lambda *_, text=text: text)
        fill(trainer, 0)
        assert held.slots[0].read_header() is None and held.slots[0].read() is None


def test_a_header_torn_at_any_byte_or_damaged_reads_as_empty(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    fill(trainer, 0)
    slot = held.slots[0]
    with slot.path.open("r+b", buffering=0) as file:
        whole = file.read(4096)
        end = len(whole.rstrip(b"\0"))
        for at in range(end):
            file.seek(0)
            file.write(whole[:at] + bytes(4096 - at))
            assert slot.read() is None
            file.seek(0)
            file.write(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
            assert slot.read() is None
        file.seek(0)
        file.write(whole)
        assert slot.read() is not None
        file.seek(4096 + 2)
        file.write(b"!")
        assert slot.read() is None and slot.read_header() == HEADER


TABLE = SlotTable(layout_ref="l", crc32c=(1, 2), metrics={"loss": 1.0}, custom="first")
CAPTURE = replace(HEADER, promised=False)
LATER = ({"loss": 0.5, "accuracy": 0.9}, {"note": "after the evaluation"})


def held_by(slot: Slot) -> tuple[bool, dict[str, float], object]:
    content, header = slot.read(), slot.read_header()
    assert content is not None and content.header == header
    table = SlotTable.from_bytes(content.table)
    assert (table.layout_ref, table.crc32c) == ("l", (1, 2))
    return content.header.promised, table.metrics, table.custom


def test_a_capture_that_is_promised_later_has_the_later_metrics(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    data = fill(trainer, 0, CAPTURE, TABLE.to_bytes())
    assert held_by(held.slots[0]) == (False, {"loss": 1.0}, "first")
    before = held.slots[0].read()
    trainer.slots[0].promise(CAPTURE.id, *LATER)
    assert held_by(held.slots[0]) == (True, *LATER)
    content = held.slots[0].read()
    assert content is not None and np.array_equal(content.data, data)
    assert before is not None and SlotTable.from_bytes(before.table).custom == "first"
    fill(trainer, 0, CAPTURE, TABLE.to_bytes())
    assert held_by(held.slots[0]) == (False, {"loss": 1.0}, "first"), "the promise goes with the capture"


def test_a_promise_torn_at_any_byte_does_not_count(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    fill(trainer, 0, CAPTURE, TABLE.to_bytes())
    trainer.slots[0].promise(CAPTURE.id, *LATER)
    slot = held.slots[0]
    with slot.path.open("r+b", buffering=0) as file:
        whole = file.read(4096)
        for at in range(2048, len(whole.rstrip(b"\0"))):
            for torn in (whole[:at] + bytes(4096 - at), whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]):
                file.seek(0)
                file.write(torn)
                assert held_by(slot) == (False, {"loss": 1.0}, "first")


def test_a_promise_of_what_is_not_there_or_of_too_much_changes_nothing(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    with pytest.raises(StepNotFoundError):
        trainer.slots[0].promise(CAPTURE.id, *LATER)
    fill(trainer, 0, CAPTURE, TABLE.to_bytes())
    with pytest.raises(StepNotFoundError):
        trainer.slots[0].promise(replace(CAPTURE, step=8).id, *LATER)
    with pytest.raises(CapacityError) as caught:
        trainer.slots[0].promise(CAPTURE.id, {}, "x" * 4096)
    assert caught.value.needed_bytes is not None and caught.value.needed_bytes > (caught.value.available_bytes or 0)
    assert held_by(held.slots[0]) == (False, {"loss": 1.0}, "first")
    held.slots[0].invalidate()
    with pytest.raises(StepNotFoundError):
        trainer.slots[0].promise(CAPTURE.id, *LATER)
    assert held.slots[0].read() is None


def test_modes(pair: tuple[SlotSet, TrainerArena]):
    held, trainer = pair
    trainer.put_layout(b"layout")
    for directory, _, files in os.walk(held.path.parent):
        assert stat.S_IMODE(os.stat(directory).st_mode) == 0o700
        for name in files:
            assert stat.S_IMODE(os.stat(os.path.join(directory, name)).st_mode) == 0o600, name


def test_every_page_is_reserved(pair: tuple[SlotSet, TrainerArena]):
    held, _ = pair
    for slot in held.slots:
        found = slot.path.stat()
        assert found.st_size == 4096 + 4096 + 12288 and found.st_blocks * 512 >= found.st_size


_DIES_MID_COPY = """
arena = TrainerArena.attach(sys.argv[1], trainer="t1")
slot = arena.slots[0]
slot.begin(); slot.data_mut[:] = 1
slot.commit(Staged(lineage="1.1.abc", step=1, rank=0, world=1, layout="l", promised=False, nbytes=10_000), b"good")
arena.trainer_cell.write(b"staged 1")
slot = arena.slots[1]
slot.begin()
print("copying", flush=True)
while True:
    slot.data_mut[:] = 2
"""


def test_a_trainer_killed_mid_copy_leaves_what_it_completed(host: HostArena, child: Child):
    held = host.allot(trainer="t1", data_bytes=10_000, table_bytes=100)
    assert host.trainer_state(held) == "expected"
    process, _ = child(_DIES_MID_COPY, held.path)
    assert host.trainer_state(held) == "attached"
    with pytest.raises(RaystateError, match="'t1' is attached"):
        host.remove_set(held)
    process.kill()
    process.wait()
    assert host.trainer_state(held) == "gone" and not host.trainer_alive(held)
    content = held.slots[0].read()
    assert content is not None and content.table == b"good" and bool((content.data == 1).all())
    assert held.slots[1].read() is None
    assert held.trainer_cell.read() == (1, b"staged 1")


def test_a_trainer_needs_no_host(host: HostArena, open_host: OpenHost):
    path = host.allot(trainer="t1", data_bytes=10_000, table_bytes=100).path
    host.close()
    with TrainerArena.attach(path, trainer="t1") as trainer:
        fill(trainer, 2)
        trainer.trainer_cell.write(b"word")
        adopted = open_host()
        assert adopted.trainer_state(adopted.sets[0]) == "attached"
    assert adopted.sets[0].slots[2].read_header() == HEADER
    assert adopted.sets[0].trainer_cell.read() == (1, b"word")


def test_close_keeps_the_lock_while_a_view_could_still_write(host: HostArena):
    held = host.allot(trainer="t1", data_bytes=10_000, table_bytes=100)
    trainer = TrainerArena.attach(held.path, trainer="t1")
    trainer.slots[0].begin()
    view = trainer.slots[0].data_mut
    assert trainer.close() is False
    assert host.trainer_state(held) == "attached"
    view[:] = 3
    del view
    assert host.trainer_state(held) == "gone"
    with pytest.raises(RaystateError, match="closed"):
        trainer.slots[0].read()


def test_close_unmaps(host: HostArena):
    held = host.allot(trainer="t1", data_bytes=10_000, table_bytes=100)
    trainer = TrainerArena.attach(held.path, trainer="t1")
    fill(trainer, 0)
    assert trainer.close() is True
    host.close()
    if Path("/proc/self/maps").exists():
        assert str(held.path) not in Path("/proc/self/maps").read_text()
