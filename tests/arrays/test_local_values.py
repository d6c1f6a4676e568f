"""What each process holds for itself: which leaves, how they are compared, what is said, and who gets which value back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource, UncoveredError, common_values
from raystate.arrays.restore import restore_tree
from raystate.arrays.stage import copy, hold
from raystate.arrays.tree import describe
from raystate.core.formats.errors import CorruptCheckpointError, ItemTopologyError
from raystate.core.formats.local_values import digest, disagreement, local_checksums
from raystate.core.formats.tree import Layout, SlotTable, TreeSpec

BASE = {"local": jnp.float32(3), "host": np.arange(4), "seed": 5, "name": "run", "flag": True, "key": jax.random.key(1)}
OTHER = {"local": jnp.float32(4), "host": np.arange(4)[::-1], "seed": 6, "name": "rún", "flag": 1, "key": jax.random.key(2)}


def saved(state, rank, world, item="state"):
    """(holding, table) of one rank's slot."""
    described = describe({item: state}, process_index=rank, process_count=world)
    data = np.zeros(described.layout.data_bytes, np.uint8)
    table = SlotTable(layout_ref="", crc32c=copy(hold(described), data), values=described.values)
    return Holding(layout=described.layout, data=data, crc32c=table.crc32c, rank=rank, holder=f"rank {rank}"), table


def checksums(state, rank, world=2):
    holding, table = saved(state, rank, world)
    return local_checksums(holding.layout, table)


# ---------------------------------------------------------------- which, and how they are compared


def test_the_layouts_of_ranks_with_arrays_of_their_own_are_equal():
    places = jax.devices()
    states = [{**BASE, "local": jax.device_put(jnp.arange(6.0), places[rank])} for rank in range(2)]
    plans = [describe({"state": state}, process_index=rank, process_count=2) for rank, state in enumerate(states)]
    assert plans[0].layout_hash == plans[1].layout_hash
    assert [piece.owned for piece in plans[0].layout.pieces] == [True] * len(plans[0].layout.pieces)
    assert [piece.owned for piece in plans[1].layout.pieces] == [False] * len(plans[1].layout.pieces)
    assert describe({"state": BASE}, process_index=0, process_count=1).layout_hash != plans[0].layout_hash


def test_one_process_alone_holds_nothing_for_itself():
    layout = describe({"state": BASE}, process_index=0, process_count=1).layout
    assert not any(leaf.array.local for leaf in layout.trees[0].leaves if leaf.array)


def test_the_fast_path_knows_how_many_processes_there_are():
    plan = describe({"state": BASE}, process_index=0, process_count=1).plan
    assert describe({"state": BASE}, process_index=0, process_count=2, previous=plan).plan is not plan
    assert describe({"state": BASE}, process_index=0, process_count=1, previous=plan).plan is plan


@pytest.mark.parametrize("name", BASE)
def test_equal_values_agree_and_each_other_value_is_named(name):
    same = {rank: checksums(dict(BASE), rank) for rank in range(2)}
    assert disagreement(same) == ""
    assert digest(same[0]) == digest(same[1])
    assert set(same[0]) == {f"state/{key}" for key in BASE}
    differing = {0: checksums(BASE, 0), 1: checksums({**BASE, name: OTHER[name]}, 1)}
    assert digest(differing[0]) != digest(differing[1])
    text = disagreement(differing)
    assert text.startswith(f"A leaf that each process holds for itself differs between ranks: state/{name} (rank 0 | rank 1). ")
    assert "global array" in text and "get_state" in text


def test_an_array_sharded_over_a_processs_own_devices_is_compared_as_a_whole():
    mesh = jax.make_mesh((8,), ("x",))

    def state(value):
        return {"w": jax.device_put(jnp.arange(16.0).at[13].set(value), NamedSharding(mesh, P("x")))}

    assert disagreement({0: checksums(state(1.0), 0), 1: checksums(state(1.0), 1)}) == ""
    assert "state/w" in disagreement({0: checksums(state(1.0), 0), 1: checksums(state(2.0), 1)})


@given(st.integers(2, 5000), st.integers(1, 300), st.integers(1, 50))
def test_the_text_stays_short(ranks, leaves, values):
    by_rank = {
        rank: {f"state/leaf{leaf}": (rank + leaf) % values for leaf in range(min(leaves, 3000 // min(ranks, 3000) + 1))}
        for rank in range(ranks)
    }
    text = disagreement(by_rank)
    assert (text == "") == (values == 1)
    assert len(text) < 2000


def test_ranks_are_grouped_by_value_and_a_few_are_named():
    by_rank = {rank: {"state/a": 0, "state/b": int(rank == 7)} for rank in range(64)}
    assert "state/b (ranks 0, 1, 2, 3 and 59 more | rank 7)" in disagreement(by_rank)
    by_rank = {rank: {f"state/{n}": rank for n in range(9)} for rank in range(6)}
    text = disagreement(by_rank)
    assert text.startswith(
        "9 leaves that each process holds for itself differ between ranks: state/0 (rank 0 | rank 1 | rank 2 | and 3 more values); "
    )
    assert "; and 4 more. " in text
    assert "state/a (rank 0 | rank 1)" in disagreement({0: {"state/a": 1}, 1: {}})


# ---------------------------------------------------------------- who gets which value back


def restored(holdings, tables, rank, world, names=("local", "host", "key")):
    tree: TreeSpec = holdings[0].layout.trees[0]
    spec = tree.with_values(tables[0].values[0])
    reference = {name: BASE[name] for name in names}
    return restore_tree(reference, spec, MemorySource(holdings, "state", rank=rank, world=world))


def same(got, state):
    def plain(name, value):
        return np.asarray(jax.random.key_data(value) if name == "key" else value)

    return all(np.array_equal(plain(name, value), plain(name, state[name])) for name, value in got.items())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_rank_gets_its_own_value_back(order):
    slots = [saved(BASE, 0, 2), saved(OTHER | {"flag": True}, 1, 2)]
    holdings, tables = zip(*(slots[rank] for rank in order), strict=True)
    assert same(restored(holdings, tables, 0, 2), BASE)
    assert same(restored(holdings, tables, 1, 2), OTHER)


def test_who_held_none_gets_any_of_equal_ones_and_nothing_of_others():
    holdings, tables = zip(*(saved(BASE, rank, 3) for rank in range(3)), strict=True)
    assert same(restored(holdings, tables, None, 3), BASE)
    with pytest.raises(UncoveredError, match=r"3 ranks held values of their own, only those of \[0, 2\]"):
        restored([holdings[0], holdings[2]], tables, 1, 3)
    assert same(restored(holdings[1:2], tables, 1, 3), BASE)
    other, _ = saved({**BASE, "host": OTHER["host"]}, 2, 3)
    with pytest.raises(
        ItemTopologyError, match=r"'state', host: 3 processes held different values.*Restore with 3 processes"
    ) as caught:
        restored([*holdings[:2], other], tables, None, 3)
    assert (caught.value.path, caught.value.saved_processes) == ("host", 3)
    assert same(restored([*holdings[:2], other], tables, None, 3, names=("local",)), BASE)


def test_a_damaged_value_comes_from_an_equal_holder_and_from_no_other():
    holdings, tables = zip(*(saved(BASE, rank, 2) for rank in range(2)), strict=True)
    holdings[1].data[:] ^= 1
    assert same(restored(holdings, tables, 1, 2), BASE)
    other, _ = saved(OTHER | {"flag": True}, 0, 2)
    with pytest.raises(CorruptCheckpointError, match="rank 1"):
        restored([other, holdings[1]], tables, 1, 2)


def test_numbers_and_strings_that_differ_are_not_dealt_out():
    layouts: list[Layout] = []
    values = []
    for rank, state in enumerate([BASE, BASE, {**BASE, "flag": False}]):
        holding, table = saved(state, rank, 3)
        layouts.append(holding.layout)
        values.append(table.values)
    assert common_values(layouts[0].trees, values[:2]) == values[0]
    with pytest.raises(ItemTopologyError, match=r"'state', flag: 3 processes"):
        common_values(layouts[0].trees, values)
