"""`Reader.restore` and `raystate.load` on steps in storage: the uses of tests/arrays/test_uses.py, with the bytes that storage gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import raystate
from raystate.core.formats.errors import ConfigError, ReferenceMismatchError
from tests.orbax.from_state import publish
from tests.processes import run_job


def kernel(scale: float = 1.0) -> np.ndarray:
    return scale * np.arange(64, dtype=np.float32).reshape(8, 8)


def sharded(spec: P) -> NamedSharding:
    return NamedSharding(jax.make_mesh((2, 4), ("x", "y")), spec)


class Iterator:
    def __init__(self) -> None:
        self.state: Any = {"next": 0}

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    for step in (3, 5):
        state = {
            "params": {"enc": jax.device_put(kernel(step), sharded(P("x", "y"))), "dec": jnp.asarray(kernel(2))},
            "opt": [jnp.ones((8, 8)), None, {}],
            "key": jax.random.key(step),
            "step": step,
        }
        publish(
            root,
            {"state": state, "ema": {"w": jnp.ones(8)}},
            step=step,
            iterators={"data": {0: b'{"next": 4}'}},
            json_items={"note": {"a": 1}},
            world=1,
        )
    return root


def test_without_a_reference(run: Path):
    for raw in (raystate.load(run), raystate.Reader(run).restore().state):
        assert raw["params"]["enc"].sharding == sharded(P("x", "y"))
        assert np.array_equal(raw["params"]["enc"], kernel(5))
        assert raw["key"].dtype == jax.random.key(0).dtype
        assert raw["opt"][1:] == [None, {}]
    restored = raystate.Reader(run).restore(step=3)
    edited = restored.state_dict()
    assert edited["opt"]["1"] == edited["opt"]["2"] == {}
    edited["params"]["dec"] = np.zeros(2)
    target = {"params": {"enc": 0, "dec": 0}, "opt": [0, (), {}], "key": 0, "step": 0}
    back = serialization.from_state_dict(target, edited)
    assert back["step"] == 3 and back["params"]["dec"].tolist() == [0, 0]


def test_what_stock_orbax_saved(tmp_path: Path):
    keys = jax.device_put(jax.random.split(jax.random.key(1), 8), sharded(P("y")))
    tree = {"w": jax.device_put(kernel(), sharded(P(("x", "y")))), "t": np.arange(3), "k": keys, "n": jnp.int32(4)}
    v1.save(str(tmp_path / "v1"), tree)
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "v0", tree)
    for name in ("v1", "v0"):
        raw = raystate.load(tmp_path / name)
        assert raw["w"].sharding == sharded(P(("x", "y"))) and np.array_equal(raw["w"], kernel())
        assert isinstance(raw["t"], np.ndarray)
        assert raw["k"].dtype == keys.dtype and jax.random.key_data(raw["k"]).tolist() == jax.random.key_data(keys).tolist()
        assert int(raw["n"]) == 4


TWO_PROCESSES = """
import json, sys
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
import raystate
answers = []
for step in (1, 2):
    try:
        state = raystate.load(sys.argv[3], step=step)
        answers.append([list(shard.data.shape) for shard in state["w"].addressable_shards])
    except raystate.ReferenceMismatchError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def test_two_processes_get_their_shares_or_a_refusal(tmp_path: Path):
    devices = jax.make_mesh((8,), ("x",))
    publish(tmp_path, {"state": {"w": jax.device_put(kernel(), NamedSharding(devices, P("x")))}}, step=1)
    publish(tmp_path, {"state": {"w": jnp.asarray(kernel())}}, step=2)
    for step in (1, 2):  # as a job of two processes with 4 devices each numbers them: 0 to 3, 2048 + …
        path = tmp_path / str(step) / "state" / "_sharding"
        numbers = ["0", "1", "2", "3", "2048", "2049", "2050", "2051"]
        text = path.read_text()
        for old, new in reversed(list(enumerate(numbers))):
            text = text.replace(f'\\"id\\": {old}}}', f'\\"id\\": {new}}}')
        path.write_text(text)
    for out in run_job(lambda index, port: ["-c", TWO_PROCESSES, index, port, tmp_path], devices=4):
        spread, refused = json.loads(out.splitlines()[-1])
        assert spread == [[1, 8]] * 4
        assert "without a reference each of 2 processes would get all of them: w" in refused


def test_storage_gives_only_the_part_that_is_asked_for(run: Path):
    reader = raystate.Reader(run)
    got = reader.restore({"params": {"enc": np.zeros((8, 8), np.float32), "dec": ...}, "opt": None, "step": 0})
    assert reader.bytes_read == 8 * 8 * 4
    assert got.state["params"]["dec"] is ... and got.state["opt"] is None
    assert np.array_equal(got.state["params"]["enc"], kernel(5))
    reader = raystate.Reader(run)
    one = NamedSharding(jax.sharding.Mesh(jax.devices()[:1], ("d",)), P())
    reader.restore({"params": {"enc": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=one)}})
    assert reader.bytes_read == 8 * 8 * 4


def test_load_has_the_options(run: Path):
    reference = {"head": np.ones(2), "step": 0, "params": {"enc": np.zeros((8, 8), np.float16)}}
    with pytest.raises(ReferenceMismatchError, match="partial=True keeps the reference's value"):
        raystate.load(run, reference)
    got = raystate.load(run, reference, partial=True, cast=True, step=3)
    assert got["head"] is reference["head"] and got["step"] == 3
    assert np.array_equal(got["params"]["enc"], kernel(3).astype(np.float16))
    with pytest.raises(ReferenceMismatchError, match="has no value to keep"):
        raystate.load(run, {"head": jax.ShapeDtypeStruct((2,), jnp.float32), "step": 0}, partial=True)


def test_an_iterator_is_asked_for_with_an_iterator(run: Path):
    for read in (lambda: raystate.Reader(run).restore(items={"data": None}), lambda: raystate.load(run, items={"data": None})):
        with pytest.raises(ReferenceMismatchError, match=r"item 'data' of step 5 is the state of an iterator: give the iterator"):
            read()


def test_several_items_are_loaded_by_name(run: Path):
    data = Iterator()
    got = raystate.load(run, {"step": 0}, items={"ema": None, "data": data, "note": None})
    assert sorted(got) == ["data", "ema", "note", "state"]
    assert got["state"] == {"step": 5} and got["ema"]["w"].tolist() == [1] * 8
    assert got["data"] is data and data.state == {"next": 4} and got["note"] == {"a": 1}
    only = raystate.load(run, items={"state": {"params": {"dec": np.zeros((8, 8), np.float32)}}}, step=3)
    assert np.array_equal(only["state"]["params"]["dec"], kernel(2)) and sorted(only) == ["state"]
    for wrong, error, text in (
        ({"nope": None}, ReferenceMismatchError, "no item 'nope'"),
        ({"ema": data}, ReferenceMismatchError, "no iterator item 'ema'"),
        (["ema"], ConfigError, "items must be a dict"),
    ):
        with pytest.raises(error, match=text):
            raystate.load(run, items=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="item= names one item, items= names several"):
        raystate.load(run, item="ema", items={})
    with pytest.raises(ConfigError, match="two references"):
        raystate.load(run, {"step": 0}, items={"state": None})


def readers(run: Path) -> list[Any]:
    """Both ways to several items of a step."""
    return [
        lambda items, **options: raystate.load(run, items=items, **options),
        lambda items, **options: raystate.Reader(run).restore({"step": 0}, items=items, **options).items,
    ]


@pytest.mark.parametrize("way", [0, 1])
def test_partial_keeps_an_item_that_the_step_lacks(run: Path, way: int):
    read, data = readers(run)[way], Iterator()
    got = read({"average": {"w": np.full(2, 5.0)}, "more": data, "none": None}, partial=True)
    assert got["average"]["w"].tolist() == [5, 5] and got["more"] is data and data.state == {"next": 0} and got["none"] is None
    for abstract in (jax.ShapeDtypeStruct((2,), jnp.float32), sharded(P("x"))):
        with pytest.raises(ReferenceMismatchError, match=r"item 'average': (.*\n)*.*no value to keep"):
            read({"average": {"w": abstract}}, partial=True)
    for there in ("data", "note"):  # something else than was asked for is not lacking
        with pytest.raises(ReferenceMismatchError):
            read({there: Iterator() if there == "note" else {"w": np.ones(2)}}, partial=True)


@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("partial", [False, True])
def test_a_reference_with_arrays_is_none_of_a_json_item(run: Path, way: int, partial: bool):
    read = readers(run)[way]
    for wanted in ({"a": np.ones(2)}, {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}, sharded(P("x"))):
        with pytest.raises(ReferenceMismatchError, match=r"item 'note' of step 5 is JSON: ask for it with None"):
            read({"note": wanted}, partial=partial)
    for first in (None, {"a": 0}, ...):  # a value to begin with is no reference
        assert read({"note": first}, partial=partial)["note"] == {"a": 1}


def test_an_item_without_arrays_is_told_as_what_it_is(run: Path):
    for name, text in (
        ("note", "is JSON: .*items={'note': None}"),
        ("data", "is the state of an iterator: .*items={'data': iterator}"),
    ):
        with pytest.raises(ReferenceMismatchError, match=text):
            raystate.load(run, item=name)
    assert raystate.load(run, items={"note": None})["note"] == {"a": 1}
    with pytest.raises(ReferenceMismatchError, match="no item 'nope' of arrays"):
        raystate.load(run, item="nope")


# ---------------------------------------------------------------- anything, there and back
