"""`reader.metadata()`: a tree with an object for each array, that tells how and where it is stored."""

from __future__ import annotations

import pickle
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1
from orbax.checkpoint.experimental.v1._src.serialization.numpy_leaf_handler import NumpyShapeDtype as Numpy
from typer.testing import CliRunner

import raystate
from raystate.cli import app
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError, ReferenceMismatchError, StepNotFoundError
from raystate.core.formats.tree import ArraySpec
from raystate.inspection.boxes import boxes_of
from raystate.orbax import kv
from raystate.orbax.stored import stored_values
from raystate.transfer import import_steps, open_source
from tests.model.world import Rank, World
from tests.orbax.published import CUSTOM, METRICS, SHARDING, committed
from tests.orbax.state_example import array, bits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step 7 with its package."""
    root = tmp_path_factory.mktemp("run")
    committed(root, 7)
    return root


def test_metadata_is_a_tree_with_objects(run: Path):
    found = raystate.Reader(run).metadata()
    assert (found.step, found.save, found.path) == (7, "a1k7", f"file://{run}/7"), "the newest"
    assert found.items == ("data", "notes", "state", "vocabulary")
    assert dict(found.kinds) == {"data": "iterator", "notes": "arrays", "state": "arrays", "vocabulary": "json"}
    assert (found.metrics, found.custom) == (METRICS, CUSTOM)
    assert found.began_at is not None and found.committed_at is not None
    assert datetime(2025, 1, 1, tzinfo=UTC) < found.began_at <= found.committed_at
    kernel = found.trees["state"]["params"]["dense"]["kernel"]
    assert (kernel.shape, kernel.dtype, kernel.ndim, kernel.nbytes) == ((64, 32), np.float32, 2, 64 * 32 * 4)
    assert (kernel.name, kernel.path, kernel.item) == ("params.dense.kernel", ("params", "dense", "kernel"), "state")
    assert kernel.sharding == {"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"} and SHARDING
    assert found.trees["state"]["params"]["dense"]["bias"].dtype == ml_dtypes.bfloat16
    assert found.trees["state"]["n"] == 3 and isinstance(found.trees["state"]["opt"], list)
    assert found.arrays()["params.dense.kernel"] is kernel and "notes:odd" in found.arrays()
    sizes = jax.tree.map(lambda leaf: leaf.nbytes if hasattr(leaf, "nbytes") else 0, found.trees["state"])
    assert sizes["params"]["dense"]["kernel"] == kernel.nbytes
    with pytest.raises(ConfigError, match=r"no item 'stat' of arrays; there is \['notes', 'state'\]"):
        found.arrays("stat")


def test_an_array_tells_how_it_is_stored(run: Path):
    kernel = raystate.metadata(run).arrays()["params.dense.kernel"]
    stored = kernel.stored()
    chunks = {f"params.dense.kernel/c/{i}/{j}" for i in range(4) for j in range(2)}
    assert kernel.chunk == (16, 16) and stored.keys.keys() == {*chunks, "params.dense.kernel/zarr.json"}
    assert stored.writers == ("a1k7h0", "a1k7h1") and kernel.has_checksums()
    database = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{run}/7/state/"}).result()
    assert {key: len(database[key]) for key in stored.keys} == {key: one.nbytes for key, one in stored.keys.items()}
    files = {one.file for key, one in stored.keys.items() if key in chunks}
    assert all((run / "7/state" / file).is_file() for file in files)


def test_an_array_s_spec_and_values(run: Path):
    for name, one in raystate.metadata(run).arrays("state").items():
        assert bits(one.read()) == bits(array(name)), name
        assert bits(ts.open(one.spec()).result().read().result()) == bits(array(name)), name
    kernel = raystate.metadata(run).arrays()["params.dense.kernel"]
    np.testing.assert_array_equal(kernel.read((3, 4), (2, 5)), array("params.dense.kernel")[3:5, 4:9])
    np.testing.assert_array_equal(kernel.read((60, 30)), array("params.dense.kernel")[60:, 30:])
    for start, shape in (((0,), None), ((0, 0), (65, 1)), ((-1, 0), (1, 1))):
        with pytest.raises(ConfigError):
            kernel.read(start, shape)


def test_metadata_travels(run: Path):
    kernel = pickle.loads(pickle.dumps(raystate.metadata(run))).arrays()["params.dense.kernel"]
    np.testing.assert_array_equal(kernel.read(), array("params.dense.kernel"))


def test_what_is_gone_or_damaged_since_is_told_apart(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    kernel = raystate.metadata(tmp_path / "run").arrays()["params.dense.kernel"]
    for data in (tmp_path / "run/7/state").rglob("d/*"):
        data.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"params\.dense\.kernel"):
        kernel.read()
    shutil.rmtree(tmp_path / "run/7")
    with pytest.raises(StepNotFoundError, match=r"step 7 .* was retired meanwhile"):
        kernel.read()


def test_keys_of_a_deep_database(tmp_path: Path):
    """Of several levels of nodes, which have the beginnings of their keys in common."""
    base = {"driver": "file", "path": f"{tmp_path}/"}
    spec = {"driver": "ocdbt", "base": base, "config": {"max_decoded_node_bytes": 600, "max_inline_value_bytes": 10}}
    store = kv.open_store(spec)
    for number in range(60):
        store.write(f"params.layer_{number:03d}/c/0", b"x" * number).result()
    folder = kv.open_store(base)
    found = stored_values(folder, folder)
    assert {key: one.nbytes for key, one in found.items()} == {f"params.layer_{n:03d}/c/0": n for n in range(60)}
    assert all(bool(one.file) == (one.nbytes > 10) for one in found.values())


@pytest.mark.parametrize(
    ("shape", "chunk"), [((7, 5), (2, 2)), ((1, 100), (1, 7)), ((3, 1, 40), (3, 1, 40)), ((), ()), ((0, 4), (1, 4)), ((9,), (4,))]
)
@pytest.mark.parametrize("elements", [1, 12, 10_000])
def test_boxes_make_up_the_array(shape: tuple[int, ...], chunk: tuple[int, ...], elements: int):
    seen = np.zeros(shape, int)
    for start, size in boxes_of(ArraySpec(shape=shape, dtype="float32", chunk=chunk), box_bytes=4 * elements):
        seen[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
        assert int(np.prod(size)) <= max(elements, int(np.prod(chunk)))
        assert all(first % n == 0 for first, n in zip(start, chunk, strict=True)), "whole chunks"
    assert (seen == 1).all()


KINDS = {
    "sharded": lambda: jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(jax.make_mesh((2,), ("x",)), P("x"))),
    "device": lambda: jax.device_put(np.ones(3, np.float32), jax.devices()[1]),
    "free": lambda: jax.numpy.ones(3, jax.numpy.bfloat16),
    "double": lambda: np.arange(3.0),
    "whole": lambda: 3,
    "point": lambda: 0.5,
}


def test_metadata_is_a_reference(tmp_path: Path):
    state = {name: make() for name, make in KINDS.items()} | {"key": jax.random.key(3), "text": "x", "none": None, "list": []}
    raystate.save(tmp_path / "saved", state, items={"ema": {"w": np.ones(2), "b": jax.numpy.ones(2)}})
    found = raystate.metadata(tmp_path / "saved")
    reader = raystate.Reader(tmp_path / "saved")
    for got in (raystate.load(tmp_path / "saved", found.trees["state"]), reader.restore(found.trees["state"]).state):
        raw = raystate.load(tmp_path / "saved")
        assert jax.tree.structure(got) == jax.tree.structure(raw)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(raw), strict=True):
            assert type(a) is type(b) and (a == b if isinstance(a, str) else jax.numpy.array_equal(a, b))
            assert getattr(a, "sharding", None) == getattr(b, "sharding", None)
        assert got["sharded"].sharding == state["sharded"].sharding and type(got["double"]) is np.ndarray
    items = raystate.load(tmp_path / "saved", items={"ema": found.trees["ema"]})
    assert type(items["ema"]["w"]) is np.ndarray and isinstance(items["ema"]["b"], jax.Array)
    other = {"whole": found.trees["state"]["double"], "point": found.trees["state"]["sharded"]}
    with pytest.raises(ReferenceMismatchError) as caught:
        raystate.load(tmp_path / "saved", other)
    assert [path for path, _ in caught.value.differences] == ["point", "whole"]


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_orbaxs_own_metadata_is_a_reference(tmp_path: Path, version: str):
    state = {name: make() for name, make in KINDS.items()}
    if version == "v1":
        v1.save(str(tmp_path / "saved"), state)
        reference: Any = v1.metadata(str(tmp_path / "saved")).metadata
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "saved", state)
            checkpointer.wait_until_finished()
            reference = checkpointer.metadata(tmp_path / "saved").item_metadata.tree
    got = raystate.load(tmp_path / "saved", reference)
    for name, saved in state.items():
        assert type(got[name]) is type(saved) and np.array_equal(got[name], saved)
        assert getattr(got[name], "sharding", None) == getattr(saved, "sharding", None)


def test_orbaxs_abstract_numpy_leaves_give_numpy(tmp_path: Path):
    raystate.save(tmp_path / "saved", {"w": jax.numpy.ones(3), "double": np.arange(3.0), "whole": 3})
    like = {
        "w": Numpy(shape=(3,), dtype=np.dtype(np.float32)),
        "double": Numpy(shape=None, dtype=None),
        "whole": Numpy((), np.dtype(np.int64)),
    }
    got = raystate.load(tmp_path / "saved", like)
    assert all(type(value) is np.ndarray for value in got.values())
    assert got["double"].tolist() == [0, 1, 2] and got["double"].dtype == np.float64 and got["whole"] == 3


# ---------------------------------------------------------------- of Orbax's own


def test_what_the_array_handler_wrote_is_an_array(tmp_path: Path):
    with ocp.Checkpointer(ocp.ArrayCheckpointHandler()) as checkpointer:
        checkpointer.save(tmp_path / "one", args=ocp.args.ArraySave(np.arange(6.0).reshape(2, 3)))
    with ocp.CheckpointManager(tmp_path / "steps", item_names=("state", "mask")) as manager:
        mask = ocp.args.ArraySave(jnp.arange(4))
        manager.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave({"w": np.ones(2)}), mask=mask))
    assert raystate.load(tmp_path / "one").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert raystate.load(tmp_path / "one", jax.ShapeDtypeStruct((2, 3), np.float32), cast=True).shape == (2, 3)
    assert raystate.load(tmp_path / "steps", item="mask").tolist() == [0, 1, 2, 3]
    array = raystate.metadata(tmp_path / "steps").trees["mask"]
    assert array.stored().nbytes and ts.open(array.spec()).result().read().result().tolist() == [0, 1, 2, 3]
    assert array.sharding is not None
    import_steps(tmp_path / "run", open_source(str(tmp_path / "steps")))
    assert raystate.load(tmp_path / "run", item="mask").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("stock", [True, False], ids=["there already", "written"])
def test_what_is_said_of_the_whole_run_is_shown_kept_and_written(stock: bool):
    def script(rank: Rank) -> None:
        manager = rank.open("first")
        manager.restore()
        assert stock or not Path(place, "metadata").exists(), "a run that is refused now has left nothing"
        for step in range(4, 8):
            manager.save(step, {"w": np.ones(2)}, force=True)
        manager.wait_until_finished()

    said, mine = {"git": "abc", "layers": [1, 2]}, {"git": "def"}
    world = World(1, ranks=1, nodes=1, run_metadata=mine, keep_last=1)
    try:
        place = world.config.storage.removeprefix("file://")
        if stock:
            with ocp.CheckpointManager(place, metadata=said) as manager:
                manager.save(3, args=ocp.args.StandardSave({"w": np.ones(2)}))
            assert raystate.metadata(place).run == raystate.metadata(f"{place}/3").run == said
        world.run([Rank(world, 0, script)])
        with ocp.CheckpointManager(place) as manager:
            assert manager.metadata().custom_metadata == (said if stock else mine), "what is there stays, as in Orbax"
        assert raystate.metadata(place).run == (said if stock else mine)
        shown = CliRunner().invoke(app, ["inspect", place])
        assert '"git"' in shown.output
    finally:
        world.close()
