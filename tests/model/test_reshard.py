"""A run that comes back with another number of ranks takes what it needs from the nodes that have it; one of them may die meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.messages import HostId
from raystate.restored import Restored
from tests.model.world import Rank, World

ARRAY_BYTES = 64 * 64 * 4


def init() -> dict[str, Any]:
    return {"w": np.zeros((64, 64), np.float32), "count": np.zeros(2, np.int16)}


def trained() -> dict[str, Any]:
    return {"w": np.arange(64 * 64, dtype=np.float32).reshape(64, 64), "count": np.full(2, 5, np.int16)}


NEEDED = ARRAY_BYTES + 4


@pytest.fixture
def world() -> Iterator[World]:
    made = World(3, ranks=4, nodes=4, save_every_steps=100)
    yield made
    made.close()


def play(world: World, ranks: int, group: str, script: Any) -> None:
    """A group of so many ranks from its start to its death."""
    world.ranks = ranks
    world.play(lambda rank: script(rank, rank.open(group)), ranks)


def save(world: World, *, durable: bool) -> None:
    """Two ranks, on the first two of four nodes; each has all of the state."""

    def script(rank: Rank, manager: Any) -> None:
        assert manager.restore(init()) is None
        assert manager.save(1, trained(), force=durable) == durable
        if durable:
            manager.wait_until_finished()
        while sum(staged.step == 1 for staged in world.held()) < 2:
            rank.rest(0.01)

    play(world, 2, "first", script)


def restore(world: World, ranks: int) -> dict[int, Restored]:
    got: dict[int, Restored] = {}

    def script(rank: Rank, manager: Any) -> None:
        got[rank.number] = manager.restore(init())

    play(world, ranks, "second", script)
    for one in got.values():
        assert one.step == 1
        assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(trained()), strict=True))
    return got


def test_more_ranks_take_it_from_both_nodes_alike(world: World):
    save(world, durable=False)
    got = restore(world, 4)
    for number, one in got.items():
        assert one.bytes_from == {"memory": NEEDED if number < 2 else 0, "peer": 0 if number < 2 else NEEDED, "storage": 0}
        assert one.tier == "peer", "the slowest that any rank needed"
    served = {host: sum(nbytes for other, _, nbytes in world.served if other == host) for host, _, _ in world.served}
    assert sum(served.values()) == 2 * NEEDED
    assert sorted(host for host, nbytes in served.items() if nbytes) == sorted(list(world.hosts)[:2])


def test_fewer_ranks_have_it_in_their_own_memory(world: World):
    save(world, durable=False)
    got = restore(world, 1)
    assert (got[0].tier, got[0].bytes_from) == ("memory", {"memory": NEEDED, "peer": 0, "storage": 0})


@pytest.mark.parametrize("back", [False, True])
def test_a_node_that_dies_meanwhile_is_not_asked_again(world: World, back: bool):
    """What its rank held another rank held, too, and the small files of the step are in storage; or its HostActor comes back."""
    save(world, durable=True)
    first = world.hosts[HostId("node00000000")]

    def dies() -> None:
        world.called = lambda: None
        first.crash()
        if back:
            world.at(1.0, first.start)

    world.called = dies
    got = restore(world, 4)
    assert all(one.bytes_from["storage"] == 0 for one in got.values())
    assert all(sum(one.bytes_from.values()) == NEEDED for one in got.values())
    assert got[2].tier == ("peer" if back else "storage")


def test_without_storage_a_node_that_dies_meanwhile_takes_the_snapshot_with_it(world: World):
    """Rank 0's iterators and values are nowhere else: the choice falls on something older, here on the beginning."""
    save(world, durable=False)
    first = world.hosts[HostId("node00000000")]
    world.called = first.crash

    def script(rank: Rank, manager: Any) -> None:
        manager.restore(init())

    with pytest.raises(
        CorruptCheckpointError, match=r"no step of the run can be restored: .* no host gives what rank 0 held of step 1"
    ):
        play(world, 4, "second", script)


def test_what_is_left_of_a_durable_step_is_taken_from_memory(world: World):
    """One of two nodes is lost before the choice, so that the snapshot is not complete: only small files are read from storage."""
    save(world, durable=True)
    world.hosts[HostId("node00000000")].lose()
    got = restore(world, 4)
    assert {number: one.bytes_from for number, one in got.items()} == {
        number: {"memory": NEEDED if number == 1 else 0, "peer": 0 if number == 1 else NEEDED, "storage": 0} for number in range(4)
    }
    assert got[0].tier == "storage"
