"""`raystate.save`, `save_async` and `load_async`: any tree, one checkpoint, whole or not at all."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import enum
import gc
import os
import tempfile
import threading
import weakref
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import equinox
import flax.linen
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as v0
import pytest
from flax.core import freeze
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

import raystate
from raystate.arrays.holdings import Holding
from raystate.arrays.memory import MemorySource
from raystate.arrays.restore import restore_tree
from raystate.arrays.tree import STORABLE
from raystate.compat import flax_checkpoints
from raystate.reader import assembling, background, saving
from tests.orbax.from_state import staged
from tests.orbax.test_any_state import ONLY_STOCK_JAX, QUIET, check_there, elsewhere, plain, same, states, taken
from tests.patience import PATIENCE_S
from tests.processes import run_python

Pair = collections.namedtuple("Pair", ["left", "right"])


@flax.struct.dataclass
class Struct:
    w: Any
    name: str = flax.struct.field(pytree_node=False, default="static")


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    w: Any


class Module(equinox.Module):
    w: Any
    size: int = equinox.field(static=True)


def module() -> Any:
    return equinox.nn.MLP(2, 2, 4, 1, key=jax.random.key(0))


W = np.arange(6.0, dtype=np.float32).reshape(2, 3)
KINDS: dict[str, Any] = {
    "dict": {"w": W},
    "list": [W, 1],
    "tuple": (W, (1, 2.5)),
    "NamedTuple": Pair(W, 1),
    "struct": Struct(jnp.asarray(W)),
    "dataclass": Plain(jnp.asarray(W)),
    "FrozenDict": freeze({"a": {"w": W}}),
    "scalars": {"i": 1, "f": 0.5, "b": True, "s": "text", "n": np.float32(2)},
    "empty": {"none": None, "dict": {}, "list": [], "tuple": (), "state": optax.EmptyState(), "one": 1},
    "keys": {"key": jax.random.key(1), "rbg": jax.random.split(jax.random.key(2, impl="rbg"), 3)},
    "boxes": {"w": flax.linen.Partitioned(jnp.asarray(W), names=("x", None))},
    "equinox": Module(jnp.asarray(W), 3),
    "filtered": equinox.filter(module(), equinox.is_array),
    "optax": optax.adam(1e-3).init({"w": jnp.asarray(W)}),
}
SINGLE: dict[str, Any] = {
    "jax": jnp.arange(6.0).reshape(2, 3),
    "numpy": W,
    "scalar": np.int8(3),
    "0-d": jnp.float32(2),
    "bfloat16": jnp.ones((3,), jnp.bfloat16),
    "key": jax.random.key(3),
    "int": 3,
    "float": 0.5,
    "bool": True,
}


def sorted_leaves(tree: Any) -> list[str]:
    """As stock Orbax's raw tree has them: other containers, int keys as strings, which sort otherwise."""
    return sorted(repr(plain(leaf)) for leaf in jax.tree.leaves(tree))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# ------------------------------------------------------------ any tree


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_as_it_was(kind: str, tmp_path: Path):
    raystate.save(tmp_path / "one", KINDS[kind])
    same(raystate.load(tmp_path / "one", KINDS[kind]), KINDS[kind])
    assert sorted_leaves(v1.load(str(tmp_path / "one"))) == sorted_leaves(KINDS[kind])


@pytest.mark.parametrize("kind", SINGLE)
def test_a_single_value(kind: str, tmp_path: Path):
    value = SINGLE[kind]
    raystate.save(tmp_path / "one", value)
    same(raystate.load(tmp_path / "one", value), value)
    raw = raystate.load(tmp_path / "one")
    same(raw, value) if kind == "key" else None
    assert kind == "key" or plain(value)[1:] == plain(raw)[1:]
    for got in (v1.load(str(tmp_path / "one")), v0.PyTreeCheckpointer().restore(tmp_path / "one" / "state")):
        assert plain(got) == plain(value) or (kind in ("scalar",) and plain(np.asarray(got)) == plain(value))
    if isinstance(value, jax.Array):
        (loaded,) = jax.tree.leaves(v1.load(str(tmp_path / "one"), value))
        assert plain(loaded) == plain(value)


def test_what_stock_orbax_saved(tmp_path: Path):
    for name, value in (("array", jnp.arange(3)), ("number", 3)):
        v1.save(str(tmp_path / name), value)
        same(raystate.load(tmp_path / name, value), value)


@settings(max_examples=6, suppress_health_check=QUIET, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(state=states(tuple(sorted(STORABLE - set(ONLY_STOCK_JAX)))), data=st.data())
def test_any_tree_bit_for_bit(state: dict[str, Any], data: st.DataObject):
    """In full, on other shardings, and a part of it."""
    assume(taken(state))
    with tempfile.TemporaryDirectory() as root:
        raystate.save(f"{root}/one", state)
        same(raystate.load(f"{root}/one", state), state)
        assert sorted_leaves(raystate.load(f"{root}/one")) == sorted_leaves(state)
        reference = elsewhere(state, data.draw)
        check_there(raystate.load(f"{root}/one", reference), reference, state)
        leaves, structure = jax.tree.flatten(state)
        asked = [leaf if data.draw(st.booleans()) else ... for leaf in leaves]
        got = jax.tree.leaves(raystate.load(f"{root}/one", structure.unflatten(asked)))
        assert [... if one is ... else plain(one) for one in got] == [... if one is ... else plain(one) for one in asked]
        assert sorted_leaves(v1.load(f"{root}/one")) == sorted_leaves(state)


class Counting:
    def __init__(self) -> None:
        self.next = 3

    def get_state(self) -> dict[str, int]:
        return {"next": self.next}

    def set_state(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def test_with_items_metrics_and_custom(tmp_path: Path):
    items = {"data": Counting(), "ema": {"w": W}, "notes": {"tokens": [1, None]}}
    raystate.save(tmp_path / "one", {"w": W}, items=items, metrics={"loss": jnp.float32(0.5)}, custom=["any", {"json": 1}])
    found = raystate.metadata(tmp_path / "one")
    assert set(found.items) == {"state", "data", "ema", "notes"}
    assert (dict(found.metrics), found.custom) == ({"loss": 0.5}, ["any", {"json": 1}])
    iterator = Counting()
    iterator.next = 0
    restored = raystate.Reader(tmp_path / "one").restore({"w": W}, items={"data": iterator, "ema": {"w": W}})
    assert iterator.next == 3 and restored.items["notes"] == {"tokens": [1, None]}
    same(restored.items["ema"], {"w": W})
    same(raystate.load(tmp_path / "one", item="ema"), {"w": W})
    assert v1.load_checkpointables(str(tmp_path / "one"), {"notes": None})["notes"] == {"tokens": [1, None]}


class Stage(enum.IntEnum):
    WARMUP = 1
    DECAY = 2


class Mode(str, enum.Enum):  # noqa: UP042 - whose str() is not its text
    FAST = "fast"


class Rate(float):
    """A number with more to it."""


def test_enums_come_back_as_their_values(tmp_path: Path):
    """From storage as from memory, with the enum in the reference too."""
    state = {"mode": Mode.FAST, "phase": Stage.DECAY, "rate": Rate(0.5), "w": np.ones(2)}
    expected = {"mode": "fast", "phase": 2, "rate": 0.5}
    raystate.save(tmp_path / "a", state)
    layout, table, slot = staged({"state": state})
    memory = MemorySource([Holding(layout=layout, data=slot, crc32c=table.crc32c)], "state")
    held = restore_tree(state, layout.trees[0].with_values(table.values[0]), memory)
    for got in (raystate.load(tmp_path / "a"), raystate.load(tmp_path / "a", state), held):
        del got["w"]
        assert got == expected
        assert [type(got[name]) for name in expected] == [str, int, float]
    made = raystate.load(tmp_path / "a", {"n": 0}, transforms={"n": ("phase", Stage)})
    assert (made, type(made["n"])) == ({"n": 2}, int)


@pytest.mark.parametrize("tree", [{"a": "x", "b": ["y"]}, {"a": None}, {"a": {}}, "text"], ids=str)
def test_trees_without_arrays_are_kept_as_stock_keeps_them(tree: Any, tmp_path: Path):
    raystate.save(tmp_path / "one", tree)
    v1.save(str(tmp_path / "stock"), tree)
    assert raystate.load(tmp_path / "one") == v1.load(str(tmp_path / "one")) == raystate.load(tmp_path / "stock") == tree
    assert raystate.load(tmp_path / "one", tree) == tree


# ------------------------------------------------------------ wrong use


@pytest.mark.parametrize(
    ("tree", "rest", "words"),
    [
        ({}, {}, "nothing to keep"),
        ({"a": object()}, {}, "a: can't save an object"),
        (module(), {}, r"activation: can't save .* eqx\.filter\(module, eqx\.is_array\)"),
        ({"a": W}, {"items": {"state": 1}}, "an item can't be called 'state'"),
        ({"a": W}, {"items": [1]}, "items must be a dict"),
        ({"a": W}, {"metrics": {"loss": "low"}}, "metrics, loss"),
        ({"a": W}, {"custom": {1, 2}}, r"custom.*sorted"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_wrong_use_leaves_nothing(tree: Any, rest: dict[str, Any], words: str, tmp_path: Path):
    for call in (raystate.save, raystate.save_async):
        with pytest.raises(raystate.ConfigError, match=words):
            call(tmp_path / "one", tree, **rest)
    assert names(tmp_path) == []


def test_several_processes_are_sent_to_the_manager(tmp_path: Path):
    with mock.patch.object(jax, "process_count", return_value=2), pytest.raises(raystate.ConfigError, match="StateManager"):
        raystate.save(tmp_path / "one", {"w": W})


@pytest.mark.parametrize("path", ["gs://bucket", "hdfs://host/one"])
def test_a_path_that_is_none(path: str):
    with pytest.raises(raystate.ConfigError, match=path.partition("/")[0]):
        raystate.save(path, {"w": W})


def test_a_backslash_is_refused_wherever_tensorstore_would_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """TensorStore takes it for a "/": the arrays would lie in another folder, and everybody would say that all is well."""
    monkeypatch.chdir(tmp_path)
    calls: list[Any] = [
        lambda: raystate.save("x\\y", {"w": W}),
        lambda: raystate.save_async("x\\y/z", {"w": W}),
        lambda: raystate.load("x\\y"),
        lambda: raystate.Reader("x\\y"),
        lambda: raystate.StateConfig(storage="bs\\run", run="lm"),
        lambda: flax_checkpoints.save_checkpoint("x\\y", {"w": W}, 1),
        lambda: flax_checkpoints.save_checkpoint("x", {"w": W}, 1, prefix="a\\b_"),
    ]
    for call in calls:
        with pytest.raises(raystate.ConfigError, match="backslash"):
            call()
    assert names(tmp_path) == []


def test_a_failed_save_leaves_nothing(tmp_path: Path):
    with mock.patch.object(assembling, "build_files", side_effect=OSError("no space left")):
        with pytest.raises(raystate.StorageError, match="no space left"):
            raystate.save(tmp_path / "above" / "one", {"w": W})
        with pytest.raises(raystate.StorageError, match="no space left"):
            raystate.save_async(tmp_path / "above" / "one", {"w": W}).result(PATIENCE_S)
    assert names(tmp_path) == []


def test_an_empty_folder_keeps_its_place_unless_it_may_be_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What took its place had another mode, and a process in it was left in a removed folder."""
    place = tmp_path / "shared"
    place.mkdir(mode=0o750)
    monkeypatch.chdir(place)
    for path in (place, "."):
        with pytest.raises(
            raystate.StorageError, match=r"shared: an empty folder is there: save to a new name in it.*overwrite=True"
        ):
            raystate.save(path, {"w": W})
    assert place.stat().st_mode & 0o777 == 0o750
    assert Path.cwd() == place
    raystate.save("./one", {"w": W})
    assert names(place) == ["one"]
    (other := tmp_path / "other").mkdir()
    raystate.save(other, 1, overwrite=True)
    assert raystate.load(other) == 1


def test_overwriting(tmp_path: Path):
    raystate.save(tmp_path / "one", {"w": W})
    with pytest.raises(raystate.StorageError, match=r"one: it exists already.*overwrite=True"):
        raystate.save(tmp_path / "one", {"v": 1})
    raystate.save(tmp_path / "one", {"v": 1}, overwrite=True)
    assert raystate.load(tmp_path / "one") == v1.load(str(tmp_path / "one")) == {"v": 1}
    assert names(tmp_path) == ["one"]


def test_overwriting_what_orbax_saved(tmp_path: Path):
    tree = {"w": W, "a": {"b": jnp.float32(1), "text": "x"}}
    v1.save(str(tmp_path / "v1"), tree)
    v1.save_checkpointables(str(tmp_path / "several"), {"state": tree, "more": {"x": 1}})
    v0.PyTreeCheckpointer().save(tmp_path / "v0", tree)
    v0.PyTreeCheckpointer(use_ocdbt=False).save(tmp_path / "zarr", tree)
    v0.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=True).save(tmp_path / "zarr3", tree)
    best = v0.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])
    args = {
        "state": v0.args.StandardSave({"w": W}),
        "json": v0.args.JsonSave({"x": 1}),
        "array": v0.args.ArraySave(W),
        "key": v0.args.JaxRandomKeySave(jax.random.key(1)),
    }
    with v0.CheckpointManager(tmp_path / "run", options=best) as manager:
        manager.save(1, args=v0.args.Composite(**args), metrics={"loss": 1.0})
    flax_checkpoints.save_checkpoint(tmp_path, {"w": W}, 1)
    found = ["v1", "several", "v0", "zarr", "zarr3", "run/1", "checkpoint_1"]
    for name in found:
        raystate.save(tmp_path / name, {"v": 1}, overwrite=True)
        assert raystate.load(tmp_path / name) == v1.load(str(tmp_path / name)) == {"v": 1}


@pytest.mark.parametrize("name", ["v.orbax-checkpoint-tmp-1", "v.orbax-checkpoint-tmp-1/inside"])
def test_a_name_of_what_is_unfinished_is_refused(name: str, tmp_path: Path):
    for call in (raystate.save, raystate.save_async):
        with pytest.raises(raystate.ConfigError, match=r"path.*orbax-checkpoint-tmp.*Use another name"):
            call(tmp_path / name, {"v": 1})
    assert names(tmp_path) == []


# ------------------------------------------------------------ in the background


def test_one_stray_link_does_not_hide_a_run(tmp_path: Path):
    raystate.save(tmp_path / "lp", {"w": np.ones(2)})
    os.symlink("notes", tmp_path / "lp" / "notes")
    assert raystate.load(tmp_path / "lp")["w"].tolist() == [1, 1]
    assert raystate.metadata(tmp_path / "lp").items == ("state",)
    raystate.save(tmp_path / "lp", {"w": np.zeros(2)}, overwrite=True)
    assert raystate.load(tmp_path / "lp")["w"].tolist() == [0, 0]


def test_arrays_are_taken_before_it_returns(tmp_path: Path):
    on_device, on_host = jnp.arange(1000.0), np.arange(1000.0)
    state = {"device": on_device, "host": on_host}
    expected = jax.tree.map(np.array, state)
    future = raystate.save_async(tmp_path / "one", state)
    jax.block_until_ready(jax.jit(lambda x: x * 0, donate_argnums=0)(on_device))
    on_host[:] = -1
    assert on_device.is_deleted()
    assert isinstance(future, Future) and future.result(PATIENCE_S) is None and future.done() and future.exception() is None
    got = raystate.load_async(tmp_path / "one").result(PATIENCE_S)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def test_an_error_is_told_once(tmp_path: Path):
    raystate.save(tmp_path / "one", {"v": 1})
    failed = raystate.save_async(tmp_path / "one", {"v": 2})
    fine = raystate.save_async(tmp_path / "two", {"v": 2})
    fine.result(PATIENCE_S)
    with pytest.raises(raystate.StorageError, match="exists already"):
        failed.result(PATIENCE_S)
    raystate.save_async(tmp_path / "three", {"v": 3}).result(PATIENCE_S)
    assert names(tmp_path) == ["one", "three", "two"]
    assert not background._unsettled, "told, so that the exit does not tell it again"


def test_a_failed_save_that_nobody_asks_for_holds_no_arrays(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    raystate.save(tmp_path / "one", {"v": 1})

    def fail(number: int) -> tuple[Future[None], list[weakref.ref[Any]]]:
        """A future, and what was taken for it."""
        held: list[weakref.ref[Any]] = []

        def writing(storage: Any, folder: str, content: Any, **rest: Any) -> None:
            held.extend(weakref.ref(one) for one in (content, content.held, *content.held._parts))
            write(storage, folder, content, **rest)

        with mock.patch.object(saving, "write_checkpoint", writing):
            future = raystate.save_async(tmp_path / "one", {"w": np.full(1 << 20, number, np.uint8)})
            concurrent.futures.wait([future], PATIENCE_S)
        return future, held

    write = saving.write_checkpoint
    failed = [fail(number) for number in range(3)]
    assert caplog.text.count("exists already") == 3, "each at once"
    for thread in threading.enumerate():
        if thread.name == "raystate-background":
            thread.join(PATIENCE_S)
    gc.collect()
    assert all(held for _, held in failed)
    assert [ref() for _, held in failed for ref in held if ref() is not None] == []
    assert not background._unsettled
    for future, _ in failed:
        with pytest.raises(raystate.StorageError, match="exists already"):
            future.result(PATIENCE_S)


def test_one_save_is_held_at_a_time(tmp_path: Path, waited_for: threading.Event):
    held = [0, 0]  # now, at most

    def taken(*arguments: Any, **rest: Any) -> Any:
        held[0] += 1
        held[1] = max(held)
        return take(*arguments, **rest)

    def slowly(storage: Any, folder: str, *arguments: Any, **rest: Any) -> None:
        assert folder == "5" or waited_for.wait(PATIENCE_S), "the next call comes while this one is written, and waits"
        waited_for.clear()
        write(storage, folder, *arguments, **rest)
        held[0] -= 1

    take, write = saving.take, saving.write_checkpoint
    with mock.patch.multiple(saving, take=taken, write_checkpoint=slowly):
        futures = [raystate.save_async(tmp_path / str(number), {"v": number}) for number in range(6)]
        assert all(future.done() for future in futures[:-1])
        futures[-1].result(PATIENCE_S)
    assert held == [0, 1]
    assert [raystate.load(tmp_path / str(number)) for number in range(6)] == [{"v": number} for number in range(6)]


def test_a_save_that_never_ends_is_told(tmp_path: Path):
    begun, go = threading.Event(), threading.Event()

    def slowly(*arguments: Any, **rest: Any) -> Any:
        begun.set()
        assert go.wait(PATIENCE_S)
        return build_files(*arguments, **rest)

    build_files = assembling.build_files
    with mock.patch.object(assembling, "build_files", slowly), mock.patch.object(saving, "LONGEST_S", 0.01):
        first = raystate.save_async(tmp_path / "one", {"v": 1})
        assert begun.wait(PATIENCE_S) and not first.done() and not first.cancel()
        with pytest.raises(TimeoutError):
            first.result(0.01)
        with pytest.raises(raystate.StorageError, match="the save before it is still not written"):
            raystate.save_async(tmp_path / "two", {"v": 2})
        go.set()
        first.result(PATIENCE_S)
    for wrong in (True, False):  # a call that is refused gives its turn back
        with contextlib.suppress(raystate.ConfigError):
            raystate.save_async(tmp_path / "three", {"v": object() if wrong else 3}).result(PATIENCE_S)
    assert names(tmp_path) == ["one", "three"]


def test_loading_ahead_under_the_mesh_of_the_call(tmp_path: Path):
    raystate.save(tmp_path / "one", {"w": W})
    mesh = jax.make_mesh((2,), ("x",))
    with jax.set_mesh(mesh):
        abstract = jax.ShapeDtypeStruct(W.shape, W.dtype, sharding=NamedSharding(mesh.abstract_mesh, PartitionSpec("x")))
        future = raystate.load_async(tmp_path / "one", {"w": abstract})
    assert future.result(PATIENCE_S)["w"].sharding.mesh == mesh
    with pytest.raises(raystate.StepNotFoundError):
        raystate.load_async(tmp_path / "none").result(PATIENCE_S)
    with pytest.raises(raystate.ConfigError, match="no argument 'stepp'; did you mean 'step'"):
        raystate.load_async(tmp_path / "one", stepp=3)  # type: ignore[call-arg]


AT_EXIT = """
import sys, jax, numpy as np
import raystate
from raystate.reader import assembling, background, saving

state = jax.numpy.arange(1000.0)
kind, path = sys.argv[1:]
if kind == "stuck":
    import threading
    background.LONGEST_S = 0.2
    is_stuck = threading.Event()
    assembling.build_files = lambda *a, **k: (is_stuck.set(), threading.Event().wait())
raystate.save_async(path, state)
if kind == "stuck":
    is_stuck.wait()  # Python 3.11 aborts a process that ends while another thread of it comes back from C++
if kind == "done":  # else the next call would wait
    raystate.save_async(path, state)
    raystate.save_async(path + "2", state)
print("main is done")
raise SystemExit(3)
"""


@pytest.mark.parametrize("kind", ["done", "stuck"])
def test_the_interpreters_exit(kind: str, tmp_path: Path):
    done = run_python("-c", AT_EXIT, kind, tmp_path / "one", code=3)
    assert done.stdout == "main is done\n", done.stderr
    if kind == "stuck":
        assert "saving" in done.stderr and "given up" in done.stderr
        assert not (tmp_path / "one").exists()
        raystate.save(tmp_path / "one", 1)  # removes what the other one left
        assert not [name for name in names(tmp_path) if name.startswith("one.")]
        return
    for name in ("one", "one2"):
        assert raystate.load(tmp_path / name).shape == (1000,)
    assert names(tmp_path) == ["one", "one2"]
    assert done.stderr.count("exists already") == 1 and "Traceback" not in done.stderr, "the second one's error, once"
