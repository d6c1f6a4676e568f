"""StepReader on what stock Orbax wrote: v0 and v1, zarr2 and zarr3, OCDBT or not. Notices a change of Orbax's formats."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raystate.core.formats.errors import CorruptCheckpointError
from raystate.orbax.step_metadata import parse_shardings, parse_step, parse_tree
from raystate.orbax.step_reader import StepReader
from raystate.storage import open_storage
from tests.orbax.state_example import ARRAYS, SCALARS, array, bits
from tests.patience import PATIENCE_S

LAYOUTS = {"v0": "default", "v0_plain": "default", "v1": "state"}
REPLACED = {"bits.f8", "bits.i4", "empty"}  # zeros((8,), float32): see stock_orbax.py


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    root = tmp_path_factory.mktemp("stock")
    program = Path(__file__).with_name("stock_orbax.py")
    asked = json.dumps({"write": str(root)})
    done = subprocess.run([sys.executable, program, asked], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return root, json.loads(done.stdout.splitlines()[-1])["write"]


def reader_of(root: Path, layout: str) -> StepReader:
    return StepReader(open_storage(root / layout), "3")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_bit_for_bit(written: tuple[Path, dict[str, Any]], layout: str):
    reader = reader_of(written[0], layout)
    item = reader.state_item()
    assert item == LAYOUTS[layout] and reader.items() == {item: "arrays"}
    leaves = [(i, leaf) for i, leaf in enumerate(reader.tree(item).leaves) if leaf.array is not None]
    parts = reader.read(item, [(i, (0,) * len(leaf.array.shape), leaf.array.shape) for i, leaf in leaves if leaf.array])
    for (_, leaf), part in zip(leaves, parts, strict=True):
        expected = np.zeros((8,), np.float32) if leaf.name in REPLACED else array(leaf.name)
        assert bits(part) == bits(expected), leaf.name
    assert {leaf.name for _, leaf in leaves} == set(ARRAYS)
    values = {leaf.name: leaf.value for leaf in reader.tree(item).leaves if leaf.value is not None}
    assert values == {**SCALARS, "text": "größer"}
    if layout != "v1":
        assert reader.metrics() == {"loss": 0.5} and reader.custom() == {"a": 1}
    else:
        assert reader.metrics() == {} and reader.custom() is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sees_the_tree_as_orbax_does(written: tuple[Path, dict[str, Any]], layout: str):
    kinds = {"scalar": "ScalarMetadata", "string": "StringMetadata", "list": "list", "dict": "dict", "none": "NoneType"}
    seen = {}
    for leaf in reader_of(written[0], layout).tree(LAYOUTS[layout]).leaves:
        spec = leaf.array
        seen[leaf.name] = ["array", [*spec.shape], spec.dtype, [*spec.chunk]] if spec else [kinds[leaf.kind]]
    assert seen == written[1][layout]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_finds_the_shardings(written: tuple[Path, dict[str, Any]], layout: str):
    for leaf in reader_of(written[0], layout).tree(LAYOUTS[layout]).leaves:
        if leaf.array is not None:
            assert leaf.array.sharding is not None
            sharding = json.loads(leaf.array.sharding)
            assert sharding["sharding_type"] == "NamedSharding" and sharding["axis_names"] == ["x", "y"]


@pytest.mark.parametrize("layout", ["v0", "v0_plain"])
def test_a_lost_chunk_file_of_stock_orbax_is_an_error(written: tuple[Path, dict[str, Any]], layout: str, tmp_path: Path):
    shutil.copytree(written[0] / layout, tmp_path / layout)
    item = tmp_path / layout / "3/default"
    if layout == "v0_plain":
        (item / "zeros/0").unlink()
    else:
        shutil.rmtree(item / "d")
    reader = reader_of(tmp_path, layout)

    def read() -> None:  # a lost file may be noticed with the tree already
        leaves = [leaf.name for leaf in reader.tree("default").leaves]
        reader.read("default", [(leaves.index("zeros"), (0,), (16,))])

    with pytest.raises(CorruptCheckpointError, match="step 3"):
        read()


def test_files_that_are_not_what_they_should_be_are_named():
    for parse in (parse_tree, parse_shardings, parse_step):
        for data in (b"", b"[]", b"\xff\xfe"):
            with pytest.raises(CorruptCheckpointError, match="this file"):
                parse(data, "this file")
    entry = {"key_metadata": [{"key": "a", "key_type": 2}], "value_metadata": {"value_type": "Novel"}}
    data = json.dumps({"tree_metadata": {"a": entry}}).encode()
    with pytest.raises(CorruptCheckpointError, match="unknown type 'Novel'"):
        parse_tree(data, "this file")
