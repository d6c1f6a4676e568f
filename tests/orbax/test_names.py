"""Every name and JSON value that `save` takes comes back from stock Orbax, v0 and v1, and from StepReader; what it refuses would not."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

from raystate.arrays import names
from raystate.arrays.checks import check_custom, check_metrics
from raystate.arrays.items import pack_items
from raystate.arrays.restore import restore_tree
from raystate.arrays.tree import describe
from raystate.core.formats.errors import ConfigError
from tests.orbax.from_state import STEP, Source, publish, reader_of
from tests.orbax.state_example import flat

SPECIAL = [
    *("a", ".", "..", "...", ".a", "a.", "a..b", "/a", "//a", "a/b", "a//b", "./a", "../a", "a/.", "a/..", "a/../b", "/.", "c", "c/0"),
    *("zarr.json", "a/zarr.json", "a/c", " ", " a", "a ", "\n", "\t", "\0", "a\0b", "\\", "%", "%2e", "%00", "*", "?", "#", "[0]", "{"),
    *("}", "'", '"', "$", "@", "&", "|", "=", ":", ";", "!", "-", "_", "__x", "é", "e\u0301", "😀", "\u200b", "\x7f", "\ufeff", "\uffff"),
    *("0", "1", "01", "-1", "0.5", "value", "key", "None", "True", "manifest.ocdbt", "_METADATA", "PLACEHOLDER://x", "('a', 'b')", "a\nb"),
    *("x" * 300, "x" * 40_000, "mlp/~/linear_0", "~", "a~", "~0", "~2", "a~1b", "~0/~1"),
]  # fmt: skip
ALPHABET = "/.~c0a é"


def stock_v0(root: Path, item: str = "state", target: Any = None) -> Any:
    with ocp.CheckpointManager(root) as manager:
        args = ocp.args.StandardRestore(target) if target is not None else ocp.args.PyTreeRestore()
        return manager.restore(STEP, args=ocp.args.Composite(**{item: args}))[item]


def ours(root: Path, item: str = "state", target: Any = None) -> Any:
    reader = reader_of(root)
    return restore_tree(target, reader.tree(item), Source(reader, item))


def target_of(tree: Any) -> Any:
    def leaf(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x

    return jax.tree.map(leaf, tree)


def taken(tree: Any) -> bool:
    try:
        describe({"state": tree}, process_index=0)
    except ConfigError:
        return False
    return True


def random_names(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return sorted({"".join(draw.choices(ALPHABET, k=draw.randint(1, 6))) for _ in range(count)})


def arrays_of(keys: list[str]) -> dict[str, Any]:
    """Each key as an array's, a number's, a container's and an empty node's, at the root and below."""
    array = jnp.arange(6.0).reshape(2, 3)
    tree: dict[str, Any] = {"below": {}, "numbers": {}, "inner": {}, "none": {}, "empty": {}}
    for number, key in enumerate(keys):
        tree["below"][key] = array + number
        tree["numbers"][key] = number
        tree["inner"][key] = {"w": array - number}
        tree["none"][key] = None
        tree["empty"][key] = {}
        tree.setdefault(key, array * number)
    return tree


@pytest.mark.parametrize("keys", [SPECIAL, random_names(1, 60)], ids=["special", "random"])
def test_names_of_arrays_and_numbers_come_back(keys: list[str], tmp_path: Path):
    kept = [key for key in keys if taken({"a": {key: 1, "b": {key: np.ones(1)}}})]
    assert {key for key in keys if key not in kept} == {key for key in keys if key.endswith("/")}
    tree = arrays_of([key for key in kept if "." not in key] + [key for key in kept if "." in key])
    clashes = [key for key in kept if not taken(tree)]  # a.b beside {a: {b: …}}: each name of its own comes back below
    if clashes:
        tree = {f"{number}": arrays_of([key]) for number, key in enumerate(kept)}
    publish(tmp_path, {"state": tree})
    target = target_of(tree)
    expected = flat(tree)
    assert flat(stock_v0(tmp_path)) == flat(stock_v0(tmp_path, target=target)) == expected
    assert flat(v1.load(str(tmp_path / str(STEP)))) == flat(v1.load(str(tmp_path / str(STEP)), target)) == expected
    assert flat(ours(tmp_path)) == flat(ours(tmp_path, target=target)) == expected


@pytest.mark.parametrize("keys", [SPECIAL, random_names(2, 60)], ids=["special", "random"])
def test_names_of_strings_come_back(keys: list[str], tmp_path: Path):
    kept = [key for key in keys if taken({"w": jnp.ones(1), "a": {key: "text"}})]
    assert all("~" in key for key in keys if key not in kept)
    tree = {"w": jnp.ones(1)} | {f"{number}": {key: f"text of {key}", "in": {key: {"x": ""}}} for number, key in enumerate(kept)}
    tree["many"] = {}
    for key in kept:
        if taken({"w": tree["w"], "many": tree["many"] | {key: ""}}):
            tree["many"][key] = f"one of many: {key}"
    publish(tmp_path, {"state": tree})
    target = target_of(tree)
    expected = flat(tree)
    assert flat(stock_v0(tmp_path)) == expected
    assert flat(v1.load(str(tmp_path / str(STEP)))) == flat(v1.load(str(tmp_path / str(STEP)), target)) == expected
    assert flat(ours(tmp_path)) == flat(ours(tmp_path, target=target)) == expected


def test_an_empty_key_is_refused():
    """Its array would have the name of one that is the whole item."""
    assert not taken({"w": jnp.ones(1), "": np.ones(2)})
    assert not taken({"a": {"": np.ones(2)}})


@pytest.mark.parametrize(
    "tree",
    [{"a/": np.ones(2)}, {"a": {"/": 3}}, {"s": {"~x": "t"}}, {"a": "t", "a/b": "t"}, {"x" * 65_536: np.ones(1)}],
    ids=["array a/", "number /", "string ~x", "strings a and a/b", "64 KiB"],
)
def test_what_is_refused_would_not_come_back(tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tree = {"w": jnp.ones(1)} | tree
    assert not taken(tree)
    monkeypatch.setattr("raystate.arrays.tree.check_names", lambda item, leaves: None)
    try:
        publish(tmp_path, {"state": tree})
        back = flat(v1.load(str(tmp_path / str(STEP))))
    except Exception:
        return
    assert back != flat(tree)


def test_a_default_beside_the_state_would_hide_it_from_orbax(tmp_path: Path):
    with pytest.raises(ConfigError, match="can't be called"):
        pack_items({"default": 1}, process_index=0)
    publish(tmp_path, {"state": {"w": jnp.ones(1)}, "default": {"w": jnp.ones(1)}})
    with pytest.raises(ValueError, match="single, unnamed"):
        stock_v0(tmp_path)


JSON_VALUES: dict[str, Any] = {
    "none": None,
    "number": 5,
    "text": "größer 😀\0",
    "empty-list": [],
    "empty-dict": {},
    "nested": {"a": [1, {"b": None}], "": -0.0, "big": 2**100, "small": 5e-324},
    "infinite": [float("inf"), -float("inf")],
}


def test_json_items_metrics_and_custom_come_back(tmp_path: Path):
    packed = pack_items(JSON_VALUES, process_index=0)
    for number, custom in enumerate([*JSON_VALUES.values(), {"raystate.custom": 5}, [None], {"k": float("inf")}]):
        root = tmp_path / str(number)
        metrics = check_metrics({"loss": 0.5, "größe/x": float("inf"), "n": 3})
        publish(root, {"state": {"w": jnp.ones(1)}}, json_items=packed.json_items, metrics=metrics, custom=check_custom(custom))
        reader = reader_of(root)
        assert {name: reader.json(name) for name in JSON_VALUES} == JSON_VALUES
        assert reader.custom() == custom
        assert reader.metrics() == metrics
        if number == 0:
            with ocp.CheckpointManager(root) as manager:
                args = ocp.args.Composite(**{name: ocp.args.JsonRestore() for name in JSON_VALUES})
                assert dict(manager.restore(STEP, args=args)) == JSON_VALUES


NAMES_OF_ITEMS = [
    *(
        "pytree",
        "d",
        "checkpointables",
        "descriptor",
        "1200",
        "array_metadatas",
        "manifest.ocdbt",
        "a.orbax-checkpoint-tmp",
    ),
    *("ocdbt.process_0", "process_0-of-1.json", "a..b", "A", "a", "x" * names.MOST_ITEM_CHARACTERS, "metadata", "CON", "a.", "a-"),
]


@pytest.mark.parametrize("name", NAMES_OF_ITEMS, ids=lambda name: name[:24])
def test_an_item_of_any_name_comes_back_beside_the_state(name: str, tmp_path: Path):
    state, item = {"w": jnp.arange(3.0), "s": 1}, {"ema": jnp.arange(4.0)}
    packed = pack_items({name: item, "note": {"x": 1}}, process_index=0)
    publish(tmp_path, {"state": state, **packed.trees}, json_items=packed.json_items)
    assert flat(stock_v0(tmp_path)) == flat(ours(tmp_path)) == flat(state)
    assert flat(stock_v0(tmp_path, name)) == flat(ours(tmp_path, name)) == flat(item)
    assert flat(v1.load(str(tmp_path / str(STEP)))) == flat(state)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [STEP]
    other = tmp_path / "json"
    packed = pack_items({name: {"x": 1}}, process_index=0)
    publish(other, {"state": state}, json_items=packed.json_items)
    assert reader_of(other).json(name) == {"x": 1}
    assert flat(stock_v0(other)) == flat(v1.load(str(other / str(STEP)))) == flat(state)
