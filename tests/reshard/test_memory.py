"""Saved on one topology, restored on another, from the memory of the nodes: bit for bit, and of the others' no byte too much."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from raystate.core.formats.messages import HostId
from raystate.core.formats.tree import Layout
from tests.reshard.cases import Case, Leaf, Spec, publish
from tests.reshard.conftest import ALL, TOPOLOGIES
from tests.reshard.nodes import Nodes, Share
from tests.reshard.test_reshard import ARRAYS, cases

EXAMPLES = 30 if ALL else 6
SIZE = 96 * 96 * 4  # bytes of one array below
counter = itertools.count()


@pytest.fixture
def folder() -> Iterator[Path]:
    """In shared memory, with a short name: sockets lie in it."""
    made = Path(tempfile.mkdtemp(prefix="rs-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def hold(case: Case, old: Any, folder: Path, **options: Any) -> Nodes:
    """A snapshot of the case in the memory of one node for each process."""
    root = folder / str(next(counter))
    root.mkdir()
    old.hold(case, root)
    parts = sorted(root.glob("*.held"), key=lambda path: int(path.stem))
    return Nodes(root, [Share(*pickle.loads(path.read_bytes())) for path in parts], **options)


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(TOPOLOGIES, 2)), ids=str)
def test_any_topology_to_any_other(old: Any, new: Any, jobs: Any, folder: Path) -> None:
    """The same cases as through storage. Every second time the first node is lost, and others have copies of what it held."""
    lost = itertools.cycle([False, True])

    @settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(case=cases(math.prod(old), math.prod(new)))
    def check(case: Case) -> None:
        copies = next(lost) and old[0] > 1
        nodes = hold(case, jobs[old], folder, copies=copies)
        try:
            if copies:
                nodes.lose("node0")
            shares = jobs[new].reshard(case, nodes.order())
        finally:
            nodes.close()
        for share in shares:
            assert share["memory"] + share["peer"] == share["needed"], share
            assert share["storage"] == 0

    check()


def square(old: Spec, new: Spec, old_mesh: list[int], new_mesh: list[int]) -> Case:
    return Case(3, old_mesh, new_mesh, [Leaf([96, 96], "float32", old, new)] * ARRAYS)


def test_each_process_fetches_what_it_has_not_and_nothing_else(jobs: Any, folder: Path) -> None:
    """From 2 x 4 devices by rows to 3 x 2 by columns: each process needs a third, half of which lies on each of both nodes."""
    nodes = hold(square([["x", "y"], []], [[], ["x", "y"]], [2, 4], [3, 2]), jobs[2, 4], folder)
    try:
        shares = jobs[3, 2].reshard(square([["x", "y"], []], [[], ["x", "y"]], [2, 4], [3, 2]), nodes.order())
    finally:
        nodes.close()
    third = ARRAYS * SIZE // 3
    assert shares == [{"memory": third // 2, "peer": third // 2, "storage": 0, "needed": third}] * 3


def test_a_part_is_asked_of_another_node_when_one_does_not_have_it_intact(jobs: Any, folder: Path) -> None:
    """Two nodes, each with a copy of the other's. Own bytes that are damaged come from the other node, too."""
    case = square([["x", "y"], []], [[], []], [2, 4], [2, 4])
    nodes = hold(case, jobs[2, 4], folder, copies=True)
    try:
        there = jobs[1, 8].reshard(case, nodes.order())
        assert there == [{"memory": ARRAYS * SIZE, "peer": 0, "storage": 0, "needed": ARRAYS * SIZE}]
        damage(nodes, "node0", rank=0)
        damage(nodes, "node1", rank=1)
        shares = jobs[2, 4].reshard(case, nodes.order())
        assert shares == [{"memory": ARRAYS * SIZE // 2, "peer": ARRAYS * SIZE // 2, "storage": 0, "needed": ARRAYS * SIZE}] * 2
    finally:
        nodes.close()


@pytest.mark.parametrize("trouble", ["damaged", "silent", "garbling"])
def test_a_node_that_fails_is_replaced_by_another_holder(jobs: Any, folder: Path, trouble: str) -> None:
    """Three nodes, each with a copy of its neighbour's. The third needs what two others have, one of which gives nothing."""
    case = square([["x", "y"], []], [[], []], [3, 2], [3, 2])
    nodes = hold(case, jobs[3, 2], folder, copies=True)
    try:
        if trouble == "damaged":
            damage(nodes, "node0", rank=0)
        elif trouble == "silent":
            nodes.silent.add(HostId("node0"))
        else:
            nodes.garbling.add(HostId("node0"))
        shares = jobs[3, 2].reshard(case, nodes.order())
    finally:
        nodes.close()
    third = ARRAYS * SIZE // 3
    own = 1 if trouble == "damaged" else 2  # the first node has rank 0's part damaged, and rank 2's intact
    assert [share["memory"] for share in shares] == [own * third, 2 * third, 2 * third]
    assert all(share["memory"] + share["peer"] == share["needed"] == 3 * third for share in shares)
    asked = nodes.given[HostId("node0")]
    assert asked == 0 if trouble == "silent" else asked > 0


def damage(nodes: Nodes, host: str, rank: int) -> None:
    """Flip a bit of every array of that rank's piece on a node."""
    for path in (nodes.root / f"raystate-0-{host}").glob("set-*/slot-*"):
        raw = bytearray(path.read_bytes())
        share = nodes.shares[rank]
        start = raw.find(share.data.tobytes())
        if start < 0:
            continue
        for piece in Layout.from_bytes(share.layout).pieces:
            raw[start + piece.offset] ^= 1
        with open(path, "r+b") as file:
            file.write(raw)


def test_what_nobody_has_comes_from_storage_and_the_rest_from_memory(jobs: Any, folder: Path, tmp_path: Path) -> None:
    """One of three nodes is lost and has no copies; the same step is durable."""
    case = square([["x", "y"], []], [[], []], [3, 2], [2, 4])
    parts = tmp_path / "parts"
    parts.mkdir()
    jobs[3, 2].save(case, str(tmp_path / "run"), parts)
    publish(str(tmp_path / "run"), [pickle.loads(path.read_bytes()) for path in sorted(parts.iterdir())])
    nodes = hold(case, jobs[3, 2], folder, stored=str(tmp_path / "run"))
    order = nodes.order()
    try:
        nodes.lose("node2")  # after the choice: no one knows of it yet
        shares = jobs[2, 4].reshard(case, {**order, "nodes": ["node0", "node1"]})
        third = ARRAYS * SIZE // 3
        assert shares == [{"memory": third, "peer": third, "storage": third, "needed": 3 * third}] * 2
        with pytest.raises(AssertionError, match="no host gives what rank 2 held"):
            jobs[2, 4].reshard(case, {**order, "nodes": ["node0", "node1"], "stored": None})
    finally:
        nodes.close()


def test_values_of_ranks_of_their_own_are_dealt_out_if_they_are_equal(jobs: Any, folder: Path) -> None:
    leaves = [Leaf([48], "float32", [["x"]], [[]]), *[Leaf([6], "float32", None, None)] * (ARRAYS - 1)]
    case = Case(5, [3, 2], [2, 4], leaves)
    for own in (False, True):
        nodes = hold(dataclasses.replace(case, own=own), jobs[3, 2], folder)
        try:
            if own:
                with pytest.raises(AssertionError, match=r"ItemTopologyError.*different values of their own"):
                    jobs[2, 4].reshard(case, nodes.order())
            else:
                jobs[2, 4].reshard(case, nodes.order())
        finally:
            nodes.close()
