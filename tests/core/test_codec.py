"""The codec of all that is declared: values come back as they were, and an error names the field that does not fit."""

from __future__ import annotations

from typing import Any

import pytest

from raystate.core.formats.codec import decode, dumps, loads
from raystate.core.formats.entries import Fact, LiveStep
from raystate.core.formats.names import SnapshotId
from raystate.core.formats.tree import ArraySpec, DataObject, Layout, LeafSpec, Package, Piece, SlotTable, TreeSpec

ARRAY = ArraySpec(shape=(4, 2), dtype="bfloat16", chunk=(2, 2))
TREE = TreeSpec(
    item="state",
    leaves=(
        LeafSpec(path=("w", 0), kind="array", array=ARRAY),
        *(LeafSpec(path=("v", n), kind="scalar", value=value) for n, value in enumerate((1, 1.5, True))),
        LeafSpec(path=(), kind="none"),
    ),
)


@pytest.mark.parametrize(
    "value",
    [
        Layout(trees=(TREE,), pieces=(Piece(tree=0, leaf=0, start=(2, 0), shape=(2, 2), offset=0, nbytes=8, owned=True),)),
        SlotTable(layout_ref="l", crc32c=(1, 2), values=((1, "a", None),), files={"item": {"f": b"\0\xff"}}, custom=[{"a": 1}]),
        Package(step=1, save="s", run="r", files={"f": b""}, objects=(DataObject(name="d", size=1, crc32c=2, writer="w"),)),
        Fact(SnapshotId("1.1.a", 3), "why"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_comes_back_as_it_was_with_its_types(value: Any):
    found = loads(type(value), dumps(value))
    assert found == value and repr(found) == repr(value)


@pytest.mark.parametrize(
    ("kind", "raw", "said"),
    [
        (TreeSpec, {"item": "i", "leaves": [{"path": [1.5], "kind": "none"}]}, r"^TreeSpec\.leaves\.path: expected .*got 1.5"),
        (TreeSpec, {"item": "i", "leaves": [{"path": [], "kind": "tree"}]}, r"^TreeSpec\.leaves\.kind: expected "),
        (Package, {"files": {"f": "no base64"}}, r"^Package\.files: expected <class 'bytes'>"),
        (LiveStep, {"step": 1, "save": None, "metrics": {"loss": "x"}}, r"^LiveStep\.metrics: expected <class 'float'>"),
        (LiveStep, {"step": True, "save": None}, r"^LiveStep\.step: expected <class 'int'>, got true"),
        (LiveStep, {"step": 1}, r"^LiveStep: .*'save'"),
        (LiveStep, {"step": 1, "save": None, "colour": 1}, r"^LiveStep: unknown fields colour"),
        (Fact, [["1.1.a"], "why"], r"^Fact: expected .*SnapshotId"),
    ],
)
def test_an_error_names_the_field_that_does_not_fit(kind: type, raw: Any, said: str):
    with pytest.raises(ValueError, match=said):
        decode(kind, raw)


def test_fields_with_a_default_may_be_missing():
    assert decode(LiveStep, {"step": 1, "save": None}) == LiveStep(step=1, save=None)
