import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystate.core.formats.tree import ArraySpec, LeafSpec, TreeSpec
from raystate.orbax.coverage import coverage_gaps


def tree_of(*specs: tuple[tuple[int, ...], tuple[int, ...]]) -> TreeSpec:
    leaves = [
        LeafSpec(path=("a", i), kind="array", array=ArraySpec(shape=shape, dtype="int8", chunk=chunk))
        for i, (shape, chunk) in enumerate(specs)
    ]
    return TreeSpec(item="state", leaves=(*leaves, LeafSpec(path=("n",), kind="scalar")))


def test_exact_coverage_has_no_gaps():
    tree = tree_of(((7, 4), (2, 4)), ((), ()), ((0, 3), (1, 3)))
    assert coverage_gaps(tree, [(0, (0, 0), (4, 4)), (0, (4, 0), (3, 4)), (1, (), ()), (2, (0, 0), (0, 3))]) == []


def test_what_is_missing_doubled_or_misplaced_is_named():
    tree = tree_of(((8,), (2,)), ((), ()), ((0,), (1,)))
    gaps = coverage_gaps(
        tree, [(0, (0,), (4,)), (0, (2,), (2,)), (0, (5,), (2,)), (1, (), ()), (1, (), ()), (3, (), ()), (9, (), ())]
    )
    text = "\n".join(gaps)
    assert "state/a.0: 2 of 4 chunks of shape (2,) missing, the first at (4,)" in text
    assert "state/a.0: 1 of 4 chunks of shape (2,) written more than once, the first at (2,)" in text
    assert "state/a.0: the box at (5,) of shape (2,) is not made of whole chunks" in text
    assert "state/a.1: 1 of 1 chunks of shape () written more than once" in text
    assert "state/a.2: no writer created this array" in text
    assert "leaf 3, which is no array" in text and "leaf 9" in text


def test_the_list_is_cut_and_says_so():
    assert coverage_gaps(tree_of(*[((2,), (1,))] * 30), [], limit=5)[-1] == "and 26 more"


def test_a_million_chunks_are_counted():
    tree = tree_of(((1_000_000, 4), (1, 4)))
    boxes = [(0, (start, 0), (1000, 4)) for start in range(0, 1_000_000, 1000)]
    assert coverage_gaps(tree, boxes) == []
    assert "1000 of 1000000 chunks" in coverage_gaps(tree, boxes[1:])[0]


@given(st.data())
def test_agrees_with_counting_chunk_by_chunk(data: st.DataObject):
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 5)))
    chunk = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 3)))
    starts = [range(0, size, piece) for size, piece in zip(shape, chunk, strict=True)]
    cell = st.tuples(*(st.sampled_from(list(steps)) for steps in starts))
    boxes = []
    for start in data.draw(st.lists(cell, max_size=12)):
        boxes.append((0, start, tuple(min(c, size - s) for s, c, size in zip(start, chunk, shape, strict=True))))
    count = np.zeros(shape, int)
    for _, start, size in boxes:
        count[tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))] += 1
    assert (coverage_gaps(tree_of((shape, chunk)), boxes) == []) == bool((count == 1).all())


@pytest.mark.parametrize("start", [(-2, 0), (6, 0), (0,)])
def test_boxes_outside_the_array_are_named(start: tuple[int, ...]):
    assert "the box at" in coverage_gaps(tree_of(((6, 2), (2, 2))), [(0, start, (2, 2)[: len(start)])])[0]
