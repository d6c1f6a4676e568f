"""Who gives what to a process that restores from memory: own memory first, no element twice, equal loads, and nobody who failed."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystate.core.formats.boxes import Box, cut, difference, intersection
from raystate.core.formats.names import HostId
from raystate.core.trainer.sharing import HERE, HeldPiece, WantedBox, share_out

SHAPE = (6, 5)
WHOLE = Box((0, 0), SHAPE)
ITEMSIZE = 4
HOSTS = [HostId(name) for name in "abcd"]


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(low, low + n) for low, n in zip(box.start, box.shape, strict=True))))


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    start = [draw(st.integers(0, n - 1)) for n in SHAPE]
    return Box(tuple(start), tuple(draw(st.integers(1, n - low)) for n, low in zip(SHAPE, start, strict=True)))


held = st.lists(
    st.tuples(boxes(), st.integers(0, 3), st.integers(0, 5), st.lists(st.sampled_from([HERE, *HOSTS]), unique=True).map(tuple)),
    max_size=8,
).map(lambda pieces: [HeldPiece(*piece) for piece in pieces])


def wants(box: Box, pieces: list[HeldPiece]) -> WantedBox:
    return WantedBox(number=7, box=box, itemsize=ITEMSIZE, held=pieces)


@given(pieces=held, wanted=boxes(), rank=st.integers(0, 9), most=st.integers(1, 60))
def test_every_element_is_taken_once_from_a_piece_that_has_it_or_is_missing(
    pieces: list[HeldPiece], wanted: Box, rank: int, most: int
):
    takes, missing = share_out([wants(wanted, pieces)], rank=rank, most_bytes=most)
    seen: list[tuple[int, ...]] = []
    for take in takes:
        assert intersection(take.box, take.held.box) == take.box
        assert take.host in take.held.hosts
        seen += elements(take.box)
    nowhere = set().union(*(elements(one.box) for one in missing))
    assert len(seen) == len(set(seen))
    assert set(seen) | nowhere == elements(wanted)
    somewhere = set().union(*(elements(one.box) for one in pieces if one.hosts))
    assert nowhere == elements(wanted) - somewhere


@given(pieces=held, wanted=boxes())
def test_own_memory_comes_first(pieces: list[HeldPiece], wanted: Box):
    takes, _ = share_out([wants(wanted, pieces)], rank=0, most_bytes=1 << 20)
    here = set().union(*(elements(one.box) for one in pieces if HERE in one.hosts))
    for take in takes:
        assert (take.host == HERE) == (elements(take.box) <= here)
        assert take.host == HERE or not elements(take.box) & here


def test_what_can_be_used_where_it_lies_comes_before_a_part_of_more():
    whole, exact = HeldPiece(WHOLE, 0, 0, (HERE,)), HeldPiece(Box((3, 0), (3, 5)), 1, 0, (HERE,))
    takes, _ = share_out([wants(exact.box, [whole, exact])], rank=0, most_bytes=1)
    assert [take.held for take in takes] == [exact]


@given(
    hosts=st.lists(st.sampled_from(HOSTS), min_size=1, unique=True),
    count=st.integers(1, 40),
    rank=st.integers(0, 20),
    most_rows=st.integers(1, 6),
)
def test_what_several_have_is_asked_of_all_alike(hosts: list[HostId], count: int, rank: int, most_rows: int):
    pieces = [HeldPiece(WHOLE, number, 0, (host,)) for number, host in enumerate(hosts)]
    row_bytes = SHAPE[1] * ITEMSIZE
    takes, _ = share_out([wants(WHOLE, pieces)] * count, rank=rank, most_bytes=most_rows * row_bytes)
    loads = [sum(take.box.size for take in takes if take.host == host) * ITEMSIZE for host in hosts]
    assert max(loads) - min(loads) <= most_rows * row_bytes


@given(hosts=st.integers(1, 4), processes=st.integers(1, 40))
def test_processes_begin_with_different_nodes(hosts: int, processes: int):
    """Each wants the same small array, which all nodes have."""
    pieces = [HeldPiece(WHOLE, 0, 0, tuple(HOSTS[:hosts]))]
    asked = [share_out([wants(WHOLE, pieces)], rank=rank, most_bytes=1 << 20)[0][0].host for rank in range(processes)]
    counts = [asked.count(host) for host in HOSTS[:hosts]]
    assert max(counts) - min(counts) <= 1


def test_what_was_asked_for_before_counts():
    pieces = [HeldPiece(WHOLE, 0, 0, (HOSTS[0], HOSTS[1]))]
    for rank in range(2):
        takes, _ = share_out([wants(WHOLE, pieces)], rank=rank, most_bytes=1 << 20, load={HOSTS[0]: 1})
        assert [take.host for take in takes] == [HOSTS[1]]


@given(box=boxes(), most=st.integers(0, 40))
def test_a_box_is_cut_into_parts_that_are_not_too_large(box: Box, most: int):
    parts = cut(box, most)
    assert all(part.size <= max(1, most) for part in parts)
    assert sum(part.size for part in parts) == box.size
    assert set().union(*map(elements, parts)) == elements(box)
    assert len(parts) <= 4 * math.ceil(box.size / max(1, most))


@pytest.mark.parametrize("box", [Box((), ()), Box((3,), (0,))])
def test_boxes_of_one_element_or_none(box: Box):
    assert cut(box, 1) == [box]
    if box.size:
        assert intersection(box, box) == box
        assert difference(box, box) == []
        takes, missing = share_out([wants(box, [HeldPiece(box, 0, 0, (HOSTS[0],))])], rank=0, most_bytes=1)
        assert [take.box for take in takes] == [box] and not missing
