"""Restores through the ring: from host memory to fresh arrays in a GPU, as many times as there is more than the ring holds."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from raystate.arrays import gpu, ways
from raystate.arrays.gpus import Gpus
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.errors import RaystateError
from tests.gpu.conftest import ONTO, OTHER, SYNC, WAIT, StandIn
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
