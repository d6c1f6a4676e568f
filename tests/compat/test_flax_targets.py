"""What a target of flax's asks for and gets: beside stock flax."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import core
from flax.training import checkpoints as stock
from flax.training.train_state import TrainState

import raystate
from raystate.compat import flax_checkpoints as ours
from tests.processes import run_python

STORED = {
    "complex": np.arange(3) * 1j,
    "wide": np.array([2**40, 1, 2]),
    "third": np.arange(3, dtype=np.float32) / 3,
    "placed": jnp.arange(3.0),
    "int": 2**62,
    "float": 2.5,
}


def same(got: Any, wanted: Any) -> None:
    assert got.keys() == wanted.keys()
    for key, value in wanted.items():
        assert type(got[key]) is type(value) and got[key].dtype == value.dtype, (key, got[key], value)
        assert got[key].shape == value.shape and np.asarray(got[key]).tobytes() == np.asarray(value).tobytes(), key


@pytest.mark.parametrize("placed", [False, True], ids=["without shardings", "beside a jax.Array"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int32, jnp.bfloat16])
def test_an_abstract_target_without_a_sharding_gets_what_flax_gives(tmp_path: Path, dtype: Any, placed: bool):
    tree = {**STORED, "beside": np.arange(2.0)}
    stock.save_checkpoint(tmp_path / "stock", tree, 1)
    ours.save_checkpoint(tmp_path / "ours", tree, 1)
    beside = {"beside": jnp.zeros(2) if placed else np.zeros(2)}
    lost = {"complex", "wide", "third", "int", "float"} if dtype == jnp.int32 else {"complex"}  # flax changes these
    lost = lost if placed else set()
    target = {**dict.fromkeys(STORED.keys() - lost, jax.ShapeDtypeStruct((3,), dtype)), **beside}
    for folder in ("stock", "ours"):
        got = ours.restore_checkpoint(tmp_path / folder, target)
        same(got, stock.restore_checkpoint(tmp_path / folder, target))
        for name in lost:
            with pytest.raises(ValueError, match=f"{name}: .* can't be held by {np.dtype(dtype).name}") as caught:
                ours.restore_checkpoint(tmp_path / folder, {name: target["placed"], **beside})
            assert isinstance(caught.value, raystate.RaystateError)
        assert placed or (got["wide"][0] == 2**40 and got["complex"][1] == 1j), "nothing is narrowed"


def test_an_abstract_target_with_a_sharding_goes_onto_its_devices(tmp_path: Path):
    ours.save_checkpoint(tmp_path, STORED, 1)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    target = {"third": jax.ShapeDtypeStruct((3,), jnp.bfloat16, sharding=sharding), "wide": np.zeros(3, np.int64)}
    got = ours.restore_checkpoint(tmp_path, target)
    same(got, stock.restore_checkpoint(tmp_path, target))
    assert got["third"].sharding == sharding and got["wide"][0] == 2**40
    with pytest.raises(ValueError, match="int64") as caught:  # flax gives 0 for 2**40
        ours.restore_checkpoint(tmp_path, {"wide": jax.ShapeDtypeStruct((3,), np.int64, sharding=sharding)})
    assert isinstance(caught.value, raystate.RaystateError)


@pytest.mark.parametrize("abstract", [False, True])
def test_a_key_is_not_made_of_other_numbers(tmp_path: Path, abstract: bool):
    key = jax.random.key(3)
    ours.save_checkpoint(tmp_path, {"number": jnp.arange(2.0), "key": key, "text": "x"}, 1)
    wanted = jax.eval_shape(lambda: key) if abstract else key
    assert jax.random.key_data(ours.restore_checkpoint(tmp_path, {"key": wanted})["key"]).tolist() == [0, 3]
    for name, target in (("number", wanted), ("text", jax.ShapeDtypeStruct((), jnp.float32))):
        with pytest.raises(ours.TargetMismatchError, match=name):
            ours.restore_checkpoint(tmp_path, {name: target})


def test_dicts_keep_the_order_of_the_target(tmp_path: Path):
    """A caller may zip them with something of its own."""

    def keys(tree: Any) -> list[str]:
        return [f"{key} {keys(value)}" for key, value in tree.items()] if hasattr(tree, "items") else [str(type(tree))]

    ones = np.ones(1)
    node = TrainState.create(apply_fn=None, params=core.freeze({"d": ones, "c": {"z": ones, "y": ones}}), tx=optax.identity())
    target = {"b": [{"q": 1, "p": None}, ()], "a": ones, "state": node, "10": ones, "9": {}}
    ours.save_checkpoint(tmp_path, target, 1)
    wanted, got = (module.restore_checkpoint(tmp_path, target) for module in (stock, ours))
    assert list(got) == list(wanted) == list(target)
    assert list(got["b"][0]) == list(wanted["b"][0]) == ["q", "p"] and got["b"][1] == ()
    assert type(got["state"]) is TrainState and type(got["state"].params) is core.FrozenDict
    assert keys(got["state"].params) == keys(wanted["state"].params) == keys(node.params)


def test_arrays_of_the_other_byte_order_are_saved(tmp_path: Path, orbax: bool):
    tree = {"a": np.arange(4).astype(">f4"), "0-d": np.array(7, ">i8"), "number": np.arange(3).astype(">i2")[1]}
    ours.save_checkpoint(tmp_path, tree, 1)
    for module in (stock, ours):
        for target in (None, tree):
            got = module.restore_checkpoint(tmp_path, target)
            assert got["a"].tolist() == [0, 1, 2, 3] and got["a"].dtype == "f4"
            assert got["0-d"] == 7 and got["number"] == 1
    ours.save_checkpoint(tmp_path, tree["a"], 2)
    assert ours.restore_checkpoint(tmp_path, None).tolist() == [0, 1, 2, 3]


NUMBERS = {"whole": 3, "point": 0.5, "flag": True, "wide": 2**40, "own": np.float64(0.5), "array": np.float32(0.5)}


@pytest.mark.parametrize("placed", [False, True], ids=["without shardings", "beside a jax.Array"])
@pytest.mark.parametrize("like", [0, 0.0, False, np.float64(0), np.zeros(())], ids=lambda like: type(like).__name__)
def test_numbers_in_a_target_become_what_flax_makes_of_them(tmp_path: Path, like: Any, placed: bool):
    """0-d arrays where nothing in the target has a sharding; else NumPy's float64 stays one, and Python's numbers are the checkpoint's."""
    tree = {**NUMBERS, "beside": np.arange(2.0)}
    ours.save_checkpoint(tmp_path, tree, 1)
    beside = {"beside": jnp.zeros(2) if placed else np.zeros(2)}
    got = ours.restore_checkpoint(tmp_path, {**dict.fromkeys(NUMBERS, like), **beside})
    if not placed or isinstance(like, np.ndarray | np.float64):
        same(got, stock.restore_checkpoint(tmp_path, {**dict.fromkeys(NUMBERS, like), **beside}))
    else:
        assert got.pop("beside").dtype == jnp.float32
        assert got == NUMBERS and all(type(value) in (bool, int, float) for value in got.values())


def test_without_flax_it_says_which_extra_is_needed():
    program = "import sys; sys.modules['flax'] = None; from raystate.compat import flax_checkpoints"
    done = run_python("-c", program, code=1)
    assert done.stderr.rstrip().endswith("raystate.compat.flax_checkpoints needs flax: pip install 'raystate[flax]'")
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["flax"][0].startswith("flax>=")
