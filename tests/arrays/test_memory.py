"""Boxes out of slots: any old sharding to any new one, damage, and gaps."""

import dataclasses

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource, UncoveredError
from raystate.arrays.restore import ReadRequest
from raystate.core.formats.boxes import Box, difference, intersection
from raystate.core.formats.errors import CorruptCheckpointError
from raystate.core.formats.tree import ArraySpec, Layout, LeafSpec, Piece, TreeSpec

ARRAY: np.ndarray = np.arange(12 * 10, dtype=np.int32).reshape(12, 10)


def _holding(boxes, array: np.ndarray = ARRAY, holder="rank 0", item="state"):
    spec = ArraySpec(shape=array.shape, dtype=array.dtype.name, chunk=(1,) * array.ndim)
    tree = TreeSpec(item=item, leaves=(LeafSpec(path=("skip",), kind="none"), LeafSpec(path=("p", "w"), kind="array", array=spec)))
    pieces: list[Piece] = []
    offset = 0
    for start, shape in boxes:
        nbytes = int(np.prod(shape)) * array.itemsize
        pieces.append(Piece(tree=0, leaf=1, start=start, shape=shape, offset=offset, nbytes=nbytes, owned=True))
        offset += -(-nbytes // 64) * 64
    data = np.zeros(offset, np.uint8)
    crc32c: list[int] = []
    for piece in pieces:
        content = np.ascontiguousarray(array[_slices(piece.start, piece.shape)]).reshape(-1).view(np.uint8)
        data[piece.offset : piece.offset + piece.nbytes] = content
        crc32c.append(google_crc32c.value(content.tobytes()))
    return Holding(layout=Layout(trees=(tree,), pieces=tuple(pieces)), data=data, crc32c=tuple(crc32c), holder=holder)


def _slices(start, shape):
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def _read(holdings, start, shape):
    of_ranks = [dataclasses.replace(holding, rank=rank) for rank, holding in enumerate(holdings)]
    return MemorySource(of_ranks, "state").read([ReadRequest(1, start, shape)])[0]


@st.composite
def boxes(draw, shape=ARRAY.shape):
    start, size = [], []
    for n in shape:
        low = draw(st.integers(0, n - 1))
        start.append(low)
        size.append(draw(st.integers(1, n - low)))
    return Box(tuple(start), tuple(size))


@given(a=boxes(), b=boxes())
def test_a_box_is_its_intersection_and_its_difference(a, b):
    count = np.zeros(ARRAY.shape, int)
    common = intersection(a, b)
    parts = [a] if common is None else [common, *difference(a, common)]
    for part in parts:
        count[_slices(*part)] += 1
    expected = np.zeros(ARRAY.shape, int)
    expected[_slices(*a)] = 1
    assert (count == expected).all()
    both = np.zeros(ARRAY.shape, bool)
    both[_slices(*a)] = True
    other = np.zeros(ARRAY.shape, bool)
    other[_slices(*b)] = True
    assert (both & other).any() == (common is not None)


@given(st.lists(boxes(), min_size=1, max_size=6), boxes())
def test_a_box_is_put_together_from_whatever_overlaps_or_refused(pieces, wanted):
    covered = np.zeros(ARRAY.shape, bool)
    for piece in pieces:
        covered[_slices(*piece)] = True
    half = len(pieces) // 2
    holdings = [_holding(pieces[:half]), _holding(pieces[half:])]
    if covered[_slices(*wanted)].all():
        assert np.array_equal(_read(holdings, *wanted), ARRAY[_slices(*wanted)])
    else:
        with pytest.raises(UncoveredError, match="p/w") as caught:
            _read(holdings, *wanted)
        assert all(not covered[_slices(*box)].any() for box in caught.value.missing)


def test_an_exact_piece_is_a_read_only_view():
    holding = _holding([((0, 0), (6, 10)), ((6, 0), (6, 10))])
    got = _read([holding], (6, 0), (6, 10))
    assert np.shares_memory(got, holding.data)
    assert not got.flags.writeable
    assert not np.shares_memory(_read([holding], (5, 0), (2, 10)), holding.data)


def _flip(holding, offset):
    holding.data[offset] ^= 1
    return holding


def test_a_damaged_piece_is_named_and_never_returned():
    holding = _flip(_holding([((0, 0), (6, 10)), ((6, 0), (6, 10))], holder="rank 3"), 17)
    assert np.array_equal(_read([holding], (6, 0), (6, 10)), ARRAY[6:])
    for start, shape in (((0, 0), (6, 10)), ((0, 0), (12, 10)), ((5, 0), (1, 1))):
        with pytest.raises(CorruptCheckpointError, match=r"p/w.*rank 3") as caught:
            _read([holding], start, shape)
        assert not isinstance(caught.value, UncoveredError)
        assert caught.value.pieces == [((0, 0), (6, 10))]


def test_a_damaged_piece_is_replaced_by_another_holders():
    bad = _flip(_holding([((0, 0), (12, 10))], holder="rank 0"), 17)
    good = _holding([((0, 0), (12, 10))], holder="rank 1")
    halves = _holding([((0, 0), (6, 10)), ((6, 0), (6, 10))])
    for other in (good, halves):
        assert np.array_equal(_read([bad, other], (0, 0), (12, 10)), ARRAY)
        assert np.array_equal(_read([bad, other], (2, 3), (7, 2)), ARRAY[2:9, 3:5])


def test_a_slot_that_is_too_short_is_damage():
    whole = _holding([((0, 0), (12, 10))])
    assert whole.data is not None
    short = Holding(layout=whole.layout, data=whole.data[:100], crc32c=whole.crc32c, holder="rank 0")
    with pytest.raises(CorruptCheckpointError, match="rank 0"):
        _read([short], (0, 0), (12, 10))


def test_each_piece_is_checked_once(monkeypatch):
    import raystate.arrays.memory as memory

    checked: list[int] = []
    real = memory.crc32c
    monkeypatch.setattr(memory, "crc32c", lambda data: checked.append(1) or real(data))
    source = MemorySource([_holding([((0, 0), (6, 10)), ((6, 0), (6, 10))])], "state")
    source.read([ReadRequest(1, (0, 0), (6, 10)), ReadRequest(1, (3, 0), (6, 10)), ReadRequest(1, (6, 0), (6, 10))])
    assert len(checked) == 2


def test_an_item_that_nobody_holds():
    with pytest.raises(UncoveredError, match="ema"):
        MemorySource([_holding([((0, 0), (12, 10))])], "ema").read([ReadRequest(1, (0, 0), (1, 1))])
