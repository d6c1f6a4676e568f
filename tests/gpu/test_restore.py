"""Restores: from host memory through the ring to fresh arrays in a GPU, and from storage into registered memory that is used again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import raystate
from raystate.arrays import gpu, landing, ways
from raystate.arrays.gpus import Gpus
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.boxes import Box, slices
from raystate.core.formats.errors import CorruptCheckpointError, RaystateError
from raystate.machine import cuda
from raystate.machine.aligned import aligned
from raystate.orbax import array_reads
from tests.gpu.conftest import COPY_BYTES, ONTO, OTHER, REGISTER, SYNC, WAIT, StandIn
from tests.gpu.states import slot, state, step, values


@pytest.fixture
def saved(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(state, a function that restores it from a slot)"""
    del gpus
    ways.of_restores.cache_clear()
    monkeypatch.setattr(gpu, "_LARGE_BYTES", 1 << 16)
    tree = state(0)
    described = describe({"state": tree})
    pages = slot(described)
    crc32c = copy(hold(described), pages)

    def restore() -> Any:
        holding = Holding(layout=described.layout, data=pages, crc32c=crc32c)
        spec = described.layout.trees[0].with_values(described.values[0])
        return restore_tree(jax.tree.map(_like, tree), spec, MemorySource([holding], "state"))

    yield tree, restore
    ways.of_restores.cache_clear()


def _like(array: jax.Array) -> Any:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _same(one: Any, other: Any) -> bool:
    first, second = values(one), values(other)
    return all(first[name].tobytes() == second[name].tobytes() for name in second)


def test_a_restored_state_is_what_was_saved_and_can_be_donated(saved: Any, standin: StandIn, gpus: Gpus):
    tree, restore = saved
    restored, again = restore(), restore()
    assert standin.calls(ONTO) and not standin.unregistered_copies and not gpus.lost
    assert _same(restored, tree) and all(restored[name].sharding == tree[name].sharding for name in tree)
    pointers = [
        shard.data.unsafe_buffer_pointer()
        for one in (restored, again)
        for name in ("large", "columns")
        for shard in one[name].addressable_shards
    ]
    assert len(set(pointers)) == len(pointers)
    stepped = step(restored)
    assert _same(again, tree) and _same(stepped, step(again))


@pytest.mark.parametrize("kinds", [[ONTO], [WAIT], list(range(OTHER + 1))], ids=["onto", "wait", "any"])
def test_each_call_may_fail_and_the_restored_state_is_whole(saved: Any, standin: StandIn, gpus: Gpus, kinds: list[int]):
    tree, restore = saved
    before = sum(map(standin.calls, kinds))
    restore()
    calls, faults = sum(map(standin.calls, kinds)) - before, 0
    for after in range(0, calls, max(1, calls // 8)):
        gpus.lost = ""
        standin.fail(*kinds, after=after)
        assert _same(restore(), tree), after
        standin.fail(times=0)
        faults += bool(gpus.lost)
    assert faults


def test_what_may_still_be_written_is_not_given_to_anyone(saved: Any, standin: StandIn, gpus: Gpus):
    tree, restore = saved
    standin.fail(WAIT, SYNC, times=1 << 30)
    assert _same(restore(), tree)  # by JAX, into other memory
    assert gpus.lost and not gpus.is_settled
    with pytest.raises(RaystateError):
        gpus.settle()
    standin.fail(times=0)
    gpus.settle()
    assert gpus.is_settled and np.isfinite(np.asarray(tree["large"])).all()


# ---------------------------------------------------------------- from storage


@pytest.fixture
def stored(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """(state, a function that loads it from storage)"""
    del gpus
    ways.of_restores.cache_clear()
    monkeypatch.setattr(gpu, "_LARGE_BYTES", 1 << 16)
    monkeypatch.setattr(landing, "LANDING_BYTES", 3 << 18)  # less than one array has
    tree = state(0)
    raystate.save(tmp_path / "step", tree)
    yield tree, lambda: raystate.load(tmp_path / "step", jax.tree.map(_like, tree))
    ways.of_restores.cache_clear()


def test_what_is_stored_lands_in_registered_memory_and_nowhere_else(
    stored: Any, standin: StandIn, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
):
    """No large array gets pages of its own, nothing goes through the ring, and the memory is given back."""
    tree, load = stored
    made: list[int] = []
    monkeypatch.setattr(array_reads, "aligned", lambda shape, dtype: made.append(math.prod(shape)) or aligned(shape, dtype))
    restored = load()
    assert standin.calls(ONTO) and not standin.unregistered_copies and not gpus.lost
    assert _same(restored, tree) and all(restored[name].sharding == tree[name].sharding for name in tree)
    assert not made and cuda.driver()._ring is None and not standin.registered_bytes
    assert _same(step(restored), step(load()))


@pytest.mark.parametrize("kinds", [[REGISTER], [ONTO], [WAIT], list(range(OTHER + 1))], ids=["register", "onto", "wait", "any"])
def test_each_call_may_fail_and_what_is_loaded_is_whole(stored: Any, standin: StandIn, gpus: Gpus, kinds: list[int]):
    tree, load = stored
    before = sum(map(standin.calls, kinds))
    load()
    calls, faults = sum(map(standin.calls, kinds)) - before, 0
    for after in range(0, calls, max(1, calls // 8)):
        gpus.lost = ""
        standin.fail(*kinds, after=after, times=3 if kinds == [REGISTER] else 1)  # smaller registrations are tried
        assert _same(load(), tree), after
        standin.fail(times=0)
        faults += bool(gpus.lost)
    assert bool(faults) == (kinds != [REGISTER])
    assert standin.registered_bytes in (0, cuda.RING * COPY_BYTES) and not standin.unregistered_copies


def test_a_damaged_byte_in_storage_is_refused_and_no_fault_of_the_gpu(stored: Any, standin: StandIn, gpus: Gpus, tmp_path: Path):
    _, load = stored
    largest = max((path for path in (tmp_path / "step").rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        load()
    assert not gpus.lost and gpus.is_settled and not standin.registered_bytes


def test_while_a_copy_may_read_from_there_the_memory_stays(stored: Any, standin: StandIn, gpus: Gpus):
    tree, load = stored
    standin.fail(WAIT, SYNC, times=1 << 30)
    assert _same(load(), tree)  # by JAX
    assert gpus.lost and standin.registered_bytes
    standin.fail(times=0)
    gpus.settle()
    registration, memory = landing._kept.pop()
    memory[:] = 0  # it is there
    registration.close()
    assert not standin.registered_bytes


@pytest.mark.parametrize("chunk", [(1, 1, 1), (2, 3, 5), (4, 6, 10)])
@pytest.mark.parametrize("most", [1, 7, 30, 60, 1000])
def test_a_large_box_is_cut_into_parts_that_lie_in_one_piece(chunk: tuple[int, ...], most: int):
    box = Box((1, 2, 3), (5, 7, 11))
    whole = np.arange(5 * 7 * 11).reshape(box.shape)
    parts = list(landing.rows_of(box, chunk, most))
    assert np.concatenate([whole[slices(part, box.start)].reshape(-1) for part in parts]).tolist() == whole.reshape(-1).tolist()
    assert all(part.size <= most for part in parts)
    if most == 1000:
        assert parts == [box]


def test_a_large_box_is_cut_between_chunks():
    parts = list(landing.rows_of(Box((3, 0), (20, 10)), (4, 10), 90))
    assert [(part.start[0], part.shape[0]) for part in parts] == [(3, 5), (8, 8), (16, 7)]
