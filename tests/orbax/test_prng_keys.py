"""Typed PRNG keys through storage, both ways between raystate and stock Orbax: the key data bit for bit, and the implementation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from raystate.arrays.restore import restore_tree
from raystate.core.formats.errors import CorruptCheckpointError, ReferenceMismatchError
from raystate.core.formats.tree import TreeSpec
from raystate.orbax.step_metadata import parse_key_impls
from tests.orbax import from_state
from tests.orbax.conftest import run_stock
from tests.orbax.from_state import Source, reader_of
from tests.orbax.stock_keys import keyed, shown

IMPLS = {"key": "threefry2x32", "many.rbg": "rbg", "dropout.rngs.key": "threefry2x32"}


def publish(root: Path, tree: Any, step: int = 5) -> TreeSpec:
    return from_state.publish(root, {"state": tree}, step=step).trees[0]


def spread() -> Any:
    """The keyed state with its many keys over 8 devices."""
    tree = keyed()
    sharding = NamedSharding(jax.make_mesh((8,), ("x",)), PartitionSpec("x"))
    tree["many"]["rbg"] = jax.device_put(tree["many"]["rbg"], sharding)
    return tree


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("keys")
    publish(root, spread())
    return root


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stock")
    assert run_stock("stock_keys.py", {"write": str(root)})["expected"] == shown(keyed())
    return root


def test_stock_orbax_restores_our_keys_on_another_topology(ours: Path):
    got = run_stock("stock_keys.py", {"read": str(ours), "step": 5})
    assert got["expected"] == shown(keyed())
    assert sorted(got["read"]) == ["v0 with target", "v0 without target", "v1 with target"]
    for what, found in got["read"].items():
        assert found == got["expected"], what


def test_our_array_metadata_is_what_orbax_writes_for_the_same_tree(ours: Path, theirs: Path):
    def entries(path: Path) -> dict[str, Any]:
        raw = json.loads(path.read_bytes())["array_metadatas"]
        return {entry["array_metadata"]["param_name"]: entry["array_metadata"] for entry in raw}

    mine = entries(ours / "5/state/array_metadatas/process_0")
    stocks = entries(theirs / "v1/3/state/array_metadatas/process_0")
    assert {name: entry["ext_metadata"] for name, entry in mine.items()} == {
        name: entry["ext_metadata"] for name, entry in stocks.items()
    }
    assert mine["key"] == stocks["key"]

    def value_types(path: Path) -> Any:
        return {name: leaf["value_metadata"]["value_type"] for name, leaf in json.loads(path.read_bytes())["tree_metadata"].items()}

    assert value_types(ours / "5/state/_METADATA") == value_types(theirs / "v1/3/state/_METADATA")


@pytest.mark.parametrize(("layout", "item"), [("v0", "default"), ("v0_zarr3", "default"), ("v1", "state"), ("ours", "state")])
def test_keys_come_back_bit_equal_with_their_implementation(ours: Path, theirs: Path, layout: str, item: str):
    reader = reader_of(ours, 5) if layout == "ours" else reader_of(theirs / layout, 3)
    spec = reader.tree(item)
    assert {leaf.name: leaf.array.key_impl for leaf in spec.leaves if leaf.array and leaf.array.key_impl} == IMPLS
    expected = spread()
    got = restore_tree(expected, spec, Source(reader, item))
    assert shown(got) == shown(expected)
    assert got["many"]["rbg"].sharding == expected["many"]["rbg"].sharding
    assert jax.random.uniform(got["dropout"]["rngs"]["key"]) == jax.random.uniform(jax.random.key(7))
    with pytest.raises(ReferenceMismatchError, match=r"rbg"):
        restore_tree({**expected, "key": jax.random.key(3, impl="rbg")}, spec, Source(reader, item))


def test_our_step_reads_as_the_tree_that_was_described(tmp_path: Path):
    spec = publish(tmp_path, spread())
    assert reader_of(tmp_path, 5).tree("state") == spec


def test_the_rngs_of_an_nnx_dropout_go_on_where_they_were(tmp_path: Path):
    def model(seed: int) -> nnx.Dropout:
        return nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=seed), deterministic=False)

    ones = jax.numpy.ones((4, 64))
    saved = model(11)
    saved(ones)  # counts up
    publish(tmp_path, nnx.to_pure_dict(nnx.state(saved)))
    reader = reader_of(tmp_path, 5)
    resumed = model(0)
    reference = nnx.state(resumed)
    pure = restore_tree(nnx.to_pure_dict(reference), reader.tree("state"), Source(reader, "state"))
    nnx.replace_by_pure_dict(reference, pure)
    nnx.update(resumed, reference)
    after = np.asarray(saved(ones))
    assert np.array_equal(resumed(ones), after)
    assert not np.array_equal(model(11)(ones), after)  # the count came along, too


def test_metadata_of_other_processes_will_do_and_damage_is_named(ours: Path, tmp_path: Path):
    shutil.copytree(ours, tmp_path / "moved")
    folder = tmp_path / "moved/5/state/array_metadatas"
    (folder / "process_0").rename(folder / "process_3")
    tree = reader_of(tmp_path / "moved", 5).tree("state")
    assert {leaf.name for leaf in tree.leaves if leaf.array and leaf.array.key_impl} == set(IMPLS)
    (folder / "process_3").unlink()
    tree = reader_of(tmp_path / "moved", 5).tree("state")
    assert not any(leaf.array.key_impl for leaf in tree.leaves if leaf.array)  # plain uint32 data, as in an early Orbax's step
    for data in (b"", b"[]", b"{}", b'{"array_metadatas": [{}]}', b'{"array_metadatas": [1]}'):
        with pytest.raises(CorruptCheckpointError, match="this file"):
            parse_key_impls(data, "this file")
        (folder / "process_0").write_bytes(data)
        with pytest.raises(CorruptCheckpointError, match=r"state/array_metadatas/process_0 of step 5"):
            reader_of(tmp_path / "moved", 5).tree("state")
