"""A step as raystate publishes it: read back by StepReader and, in another process, by stock Orbax; and damaged on purpose."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts

from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, StepNotFoundError
from raystate.core.formats.tree import Package
from raystate.orbax import array_reads
from raystate.orbax.coverage import coverage_gaps
from raystate.orbax.merge import GRAIN_HANDLER, build_files, merge_writers
from raystate.orbax.step_reader import StepReader
from raystate.orbax.writer import write_item
from raystate.storage import open_storage
from raystate.storage.names import save_of
from tests.orbax.conftest import run_stock
from tests.orbax.published import CUSTOM, JSON_ITEM, METRICS, SHARDING, kv_base, notes_tree, pieces, publish, state_tree
from tests.orbax.state_example import ARRAYS, SCALARS, array, bits
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    publish(root)
    return root


def reader_of(root: Path, step: str = "1200", **kw: Any) -> StepReader:
    return StepReader(open_storage(root), step, **kw)


def whole(reader: StepReader, item: str) -> dict[str, np.ndarray]:
    """Every array of an item, in one read."""
    leaves = [(i, leaf) for i, leaf in enumerate(reader.tree(item).leaves) if leaf.array is not None]
    parts = reader.read(item, [(i, (0,) * len(leaf.array.shape), leaf.array.shape) for i, leaf in leaves if leaf.array])
    return {leaf.name: part for (_, leaf), part in zip(leaves, parts, strict=True)}


# ---------------------------------------------------------------- stock Orbax


def test_stock_orbax_reads_it_bit_for_bit(root: Path):
    got = run_stock("stock_orbax.py", {"read": str(root), "step": 1200})["read"]
    assert len(got["done"]) == 7
    assert got["steps"] == [1200] and got["best_step"] == 1200
    assert got["metrics"] == METRICS and got["custom"] == CUSTOM and got["vocabulary"] == JSON_ITEM
    assert got["v1_params"]["dense.kernel"] == "((64, 32), 'float32')"
    # and Orbax sees what StepReader sees
    seen = {}
    kinds = {"scalar": "ScalarMetadata", "list": "list", "dict": "dict", "none": "NoneType"}
    for leaf in reader_of(root).tree("state").leaves:
        spec = leaf.array
        seen[leaf.name] = ["array", [*spec.shape], spec.dtype, [*spec.chunk]] if spec else [kinds[leaf.kind]]
    assert seen == got["metadata"]


def test_grain_reads_its_iterator(tmp_path: Path):
    grain = pytest.importorskip("grain")
    assert grain.checkpoint.CheckpointHandler.typestr() == GRAIN_HANDLER  # beside the merge, in one process
    iterator = iter(grain.MapDataset.range(100).shuffle(seed=7).to_iter_dataset())
    for _ in range(5):
        next(iterator)
    publish(tmp_path, iterators={"data": {0: json.dumps(iterator.get_state()).encode()}}, world=1)
    assert run_stock("stock_orbax.py", {"grain": str(tmp_path), "step": 1200})["grain"] == [int(next(iterator)) for _ in range(3)]


# ---------------------------------------------------------------- StepReader


def test_reader_finds_the_items(root: Path):
    reader = reader_of(root)
    assert reader.items() == {"data": "iterator", "notes": "arrays", "state": "arrays", "vocabulary": "json"}
    assert reader.state_item() == "state"
    assert reader.json("vocabulary") == JSON_ITEM
    assert reader.iterator_states("data") == ({0: b'{"next": 4}', 1: b'{"next": 5}'}, 2)
    assert reader.metrics() == METRICS
    assert reader.custom() == CUSTOM


def test_reader_gives_the_tree_that_was_saved(root: Path):
    reader = reader_of(root)
    saved, found = state_tree(), reader.tree("state")
    assert [(leaf.path, leaf.kind, leaf.array) for leaf in found.leaves] == [
        (leaf.path, leaf.kind, leaf.array) for leaf in saved.leaves
    ]
    assert {leaf.name: leaf.value for leaf in found.leaves if leaf.kind == "scalar"} == SCALARS
    assert all(leaf.array.sharding == SHARDING for leaf in found.leaves if leaf.array)
    values = {leaf.name: leaf.value for leaf in reader.tree("notes").leaves if leaf.kind in ("string", "scalar")}
    assert values == {"name": "größer", "tags.0": "a/b.c", "tags.1": "", "seen": 7, "flag": True}
    assert [leaf.array.typestr for leaf in reader.tree("notes").leaves if leaf.array] == ["np.ndarray"]


def test_reader_reads_bit_for_bit_and_never_the_stranger(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(array_reads, "BYTES_IN_FLIGHT", 1000)
    got = whole(reader_of(root), "state")
    assert {name: bits(value) for name, value in got.items()} == {name: bits(array(name)) for name in ARRAYS}
    assert bits(whole(reader_of(root), "notes")["odd"]) == bits(array("params.odd"))
    merged = ts.KvStore.open({"driver": "ocdbt", "base": kv_base(root / "1200/state")}).result().list().result()
    assert {key.decode().split("/")[0] for key in merged} == {*ARRAYS, *SCALARS}


def test_reader_reads_only_the_chunks_it_needs_each_once(root: Path):
    reader = reader_of(root)
    kernel = next(i for i, leaf in enumerate(reader.tree("state").leaves) if leaf.name == "params.dense.kernel")
    before = reader.bytes_read
    asked = [(kernel, (20, 2), (3, 4)), (kernel, (17, 9), (1, 1)), (kernel, (20, 2), (3, 4)), (kernel, (30, 0), (4, 16))]
    parts = reader.read("state", asked)
    full = array("params.dense.kernel")
    for (_, (row, column), (rows, columns)), part in zip(asked, parts, strict=True):
        assert bits(part) == bits(full[row : row + rows, column : column + columns])
    # three boxes lie in one chunk of 16 x 16; the fourth touches it and a second one
    assert reader.bytes_read - before == 2 * 16 * 16 * 4
    assert reader.read("state", [(kernel, (3, 3), (0, 5))])[0].shape == (0, 5)


def test_reader_refuses_boxes_outside_and_leaves_that_are_no_arrays(root: Path):
    reader = reader_of(root)
    names = [leaf.name for leaf in reader.tree("state").leaves]
    for request in ((names.index("params.odd"), (6, 0), (2, 3)), (names.index("params.odd"), (0,), (2,))):
        with pytest.raises(ConfigError, match=r"'params\.odd' of item 'state' of step 1200"):
            reader.read("state", [request])


def test_a_step_or_item_that_is_not_there_is_named(root: Path):
    with pytest.raises(StepNotFoundError, match="step 1300"):
        reader_of(root, "1300").items()
    with pytest.raises(StepNotFoundError, match="step 1300"):
        reader_of(root, "1300").tree("state")
    for read in (reader_of(root).tree, reader_of(root).json, reader_of(root).iterator_states):
        with pytest.raises(CorruptCheckpointError, match="'absent'"):
            read("absent")


# ---------------------------------------------------------------- damage


def damaged_copy(root: Path, tmp_path: Path, needle: bytes) -> Path:
    """A copy with one bit of `needle` flipped, wherever the save's own data files hold it."""
    copy = tmp_path / "damaged"
    shutil.copytree(root, copy)
    hits = 0
    for path in copy.glob("1200/state/ocdbt.process_a7*/d/*"):
        data = bytearray(path.read_bytes())
        if (at := data.find(needle)) >= 0:
            data[at + len(needle) // 2] ^= 1
            path.write_bytes(data)
            hits += 1
    assert hits == 1
    return copy


def test_a_flipped_bit_is_refused_by_us_and_by_stock_orbax(root: Path, tmp_path: Path):
    copy = damaged_copy(root, tmp_path, array("opt.0.mu")[16:32].tobytes())
    reader = reader_of(copy)
    leaf = next(i for i, leaf in enumerate(reader.tree("state").leaves) if leaf.name == "opt.0.mu")
    assert bits(reader.read("state", [(leaf, (0, 0), (16, 32))])[0]) == bits(array("opt.0.mu")[:16])  # another chunk is fine
    with pytest.raises(CorruptCheckpointError, match=r"'opt\.0\.mu' of item 'state' of step 1200.*DATA_LOSS") as caught:
        reader.read("state", [(leaf, (0, 0), (64, 32))])
    assert (caught.value.step, caught.value.item, caught.value.path) == (1200, "state", "opt.0.mu")
    said = run_stock("stock_orbax.py", {"damaged": [str(copy), str(root)]})["damaged"]
    assert "DATA_LOSS" in said[str(copy)] and said[str(root)] == ""


def test_a_missing_chunk_is_an_error_not_zeros(root: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(root, copy)
    base = kv_base(copy / "1200/state")
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    del store["zeros/c/1"]  # its values equal the fill value, which makes the loss hard to see
    with pytest.raises(CorruptCheckpointError, match=r"'zeros' of item 'state' of step 1200"):
        whole(reader_of(copy), "state")


# ---------------------------------------------------------------- the merge


def test_a_chunk_that_no_writer_wrote_stops_the_merge(tmp_path: Path):
    tree = state_tree()
    share = pieces(tree, 0, 1)
    zeros = next(i for i, leaf in enumerate(tree.leaves) if leaf.name == "zeros")
    share.remove(next(piece for piece in share if piece[:2] == (zeros, (8,))))
    [gap] = coverage_gaps(tree, [(leaf, start, data.shape) for leaf, start, data in share])
    assert gap == "state/zeros: 1 of 2 chunks of shape (8,) missing, the first at (8,)"
    write_item(kv_base(tmp_path), "a1k1h0", tree, share)
    with pytest.raises(CorruptCheckpointError, match="zeros has 1 of 2 chunks"):
        merge_writers(kv_base(tmp_path), ["a1k1h0"], save="a1k1", tree=tree)
    with pytest.raises(CorruptCheckpointError, match="writer a1k1h5 has left no manifest"):
        merge_writers(kv_base(tmp_path), ["a1k1h0", "a1k1h5"], save="a1k1", tree=tree)


def test_every_file_is_accounted_for(tmp_path: Path):
    """What lies in the step's folder is exactly the package's files and objects, and the stranger's."""
    folder, files, objects = publish(tmp_path, custom=["not", "a dict"])
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    strange = {name for name in there if "ocdbt.process_a6" in name}
    assert there == strange | set(files) | {found.name for found in objects}
    assert {"state/manifest.ocdbt", "state/_METADATA", "state/_sharding", "state/array_metadatas/process_0"} <= set(files)
    assert {"_CHECKPOINT_METADATA", "commit_success.txt", "state/commit_success.txt", "notes/_strings.json"} <= set(files)
    assert "data/process_1-of-2.json" in files and "metrics/metrics" in files and "vocabulary/metadata" in files
    assert not any(str(tempfile.gettempdir()).encode() in data for data in files.values())  # no path of ours is published
    assert all(found.writer.startswith("a7k1") and save_of(found.name) == "a7k1" for found in objects)
    package = Package(step=1200, save="a7k1", run="r", files=files, objects=tuple(objects))
    assert Package.from_bytes(package.to_bytes()) == package
    assert reader_of(tmp_path).custom() == ["not", "a dict"]


def test_the_merge_can_be_repeated_in_a_thread_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))  # of its own: other tests publish at the same time
    publish(tmp_path, 1)  # the first call starts jax's and TensorStore's own threads
    before = threading.active_count()
    with caplog.at_level(logging.WARNING):
        for step in (2, 3):
            thread = threading.Thread(target=publish, args=(tmp_path, step))
            thread.start()
            thread.join(timeout=PATIENCE_S)
            assert whole(reader_of(tmp_path, str(step)), "state")
    assert threading.active_count() <= before
    assert list(scratch.iterdir()) == []
    assert [record.getMessage() for record in caplog.records] == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"iterators": {"data": {0: b"{}"}}},
            r"^step 1200 can't be committed: item 'data' is an iterator, and save\(\) got none from rank 1 of 2; give it on every rank$",
        ),
        ({"json_items": {"state": 1}}, "'state' is reserved, no plain name, or given twice"),
        ({"json_items": {"metrics": 1}}, "'metrics' is reserved"),
        ({"json_items": {"x": object()}}, "'x' cannot be written as JSON"),
    ],
)
def test_what_cannot_be_merged_is_named_before_anything_is_written(tmp_path: Path, changes: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        publish(tmp_path, **changes)
    assert not (tmp_path / "1200/state/ocdbt.process_a7k1hc").exists()


def test_a_number_that_numpy_cannot_hold_names_the_leaf(tmp_path: Path):

    with pytest.raises(ConfigError, match=r"leaf 'seen' of item 'notes'.*no number"):
        build_files(1, "a1k1", [notes_tree()], [[True, "x", 2**80, "a", "b"]], {}, lambda item: kv_base(tmp_path / item))
