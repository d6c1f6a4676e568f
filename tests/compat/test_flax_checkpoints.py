"""`raystate.compat.flax_checkpoints` in the place of `flax.training.checkpoints`: the same behaviour, and each reads the other's files."""

from __future__ import annotations

import inspect
import os
import pickle
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import core, errors, serialization
from flax.training import checkpoints as stock
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import raystate
from raystate.compat import flax_checkpoints as ours
from raystate.compat.flax_directory import removed
from raystate.core.formats.errors import ConfigError, StepNotFoundError
from raystate.storage import posix
from raystate.transfer import import_steps
from tests.cli.transfers import in_memory_step

OLD, NEW = {"a": np.array([0, 0, 0], np.int32)}, {"a": np.array([1, 2, 3], np.int32)}


def same(got: Any, wanted: Any) -> None:
    assert jax.tree_util.tree_structure(got) == jax.tree_util.tree_structure(wanted)
    for one, other in zip(jax.tree_util.tree_leaves(got), jax.tree_util.tree_leaves(wanted), strict=True):
        if isinstance(other, jax.Array | np.ndarray):
            assert type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
        else:
            assert type(one) is type(other) and one == other


def rich() -> dict[str, Any]:
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return {
        "sharded": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("x", "y"))),
        "half": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3),
        "host": np.arange(3, dtype=np.int64),
        "wide": np.arange(2.0),
        "step": 7,
        "rate": 0.5,
        "on": True,
        "name": "größer",
        "nothing": None,
        "empty": {},
        "list": [1, (np.int32(2) * np.ones(2, np.int32), {"0": jnp.full((2, 1), 3)})],
    }


def zeros(tree: Any) -> Any:
    def zero(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            return jax.device_put(jnp.zeros_like(leaf), leaf.sharding)
        return np.zeros_like(leaf) if isinstance(leaf, np.ndarray) else type(leaf)()

    return jax.tree.map(zero, tree)


# ---------------------------------------------------------------- both directions


def test_calls_have_the_arguments_and_defaults_of_flax():
    for name in (
        "save_checkpoint",
        "save_checkpoint_multiprocess",
        "restore_checkpoint",
        "latest_checkpoint",
        "available_steps",
        "convert_pre_linen",
        "natural_sort",
        "safe_normpath",
        "AsyncManager",
    ):
        theirs, here = (inspect.signature(getattr(module, name)).parameters for module in (stock, ours))
        assert [(p.name, p.default) for p in here.values()] == [(p.name, p.default) for p in theirs.values()], name


def test_stock_flax_and_orbax_read_what_we_write(tmp_path: Path):
    tree = {**rich(), "no elements": jnp.zeros((0, 3))}  # Orbax itself can't write it
    path = ours.save_checkpoint(tmp_path, tree, 3)
    assert path == stock.latest_checkpoint(tmp_path) == f"{tmp_path}/checkpoint_3"
    same(stock.restore_checkpoint(tmp_path, zeros(tree)), tree)
    raw = serialization.to_state_dict(tree)
    same(stock.restore_checkpoint(tmp_path, None), raw)
    with ocp.StandardCheckpointer() as checkpointer:
        same(checkpointer.restore(path)["sharded"], tree["sharded"])
    loaded = raystate.load(path, {"half": tree["half"], "name": ""})
    same(loaded, {"half": tree["half"], "name": tree["name"]})


def test_we_read_what_stock_flax_writes(tmp_path: Path, orbax: bool):
    tree = rich()
    stock.save_checkpoint(tmp_path, tree, 3)
    wanted = stock.restore_checkpoint(tmp_path, zeros(tree))
    same(ours.restore_checkpoint(tmp_path, zeros(tree)), wanted)
    same(ours.restore_checkpoint(f"{tmp_path}/checkpoint_3", zeros(tree)), wanted)
    raw = ours.restore_checkpoint(tmp_path, None)
    same(raw, stock.restore_checkpoint(tmp_path, None))
    if not orbax:
        same(raw["sharded"], np.asarray(tree["sharded"]))


def test_train_state(tmp_path: Path):
    def state(number: int) -> TrainState:
        params = {"dense": {"kernel": np.zeros((4, 3), np.float32), "bias": np.zeros(3, np.float32)}}
        made = TrainState.create(apply_fn=lambda: None, params=params, tx=optax.adamw(1e-3))
        return jax.tree.map(lambda leaf: jnp.full(leaf.shape, number, leaf.dtype) if hasattr(leaf, "shape") else number, made)

    saved = state(1)
    ours.save_checkpoint(tmp_path, saved, step=saved.step)
    for module in (stock, ours):
        template = state(0)
        restored = module.restore_checkpoint(tmp_path, template)
        assert restored.tx is template.tx and restored.step == 1
        same(restored.params, saved.params)
        same(restored.opt_state, saved.opt_state)


@pytest.mark.parametrize(
    "target",
    [
        {"a": np.zeros(5, np.int32), "s": 0, "l": [np.zeros(1), (0,)]},
        {"a": jnp.zeros(5, jnp.bfloat16), "b": np.zeros(3, np.float32), "s": 1},
        {"b": jnp.zeros(3), "missing": jnp.ones(2), "none": None},
        {"a": jnp.zeros(3)},
        {"a": None, "b": jnp.zeros(3)},
        {"a": {"x": jnp.zeros(2)}},
        {"l": jnp.zeros(2)},
        {"n": 4, "e": 5},
        {},
        core.freeze({"a": jnp.zeros(5)}),
        (jnp.zeros(2),),
    ],
    ids=str,
)
def test_a_target_that_differs_is_filled_as_flax_does(tmp_path: Path, target: Any):
    stock.save_checkpoint(
        tmp_path, {"a": jnp.arange(5.0), "b": np.arange(3), "s": 3, "l": [1, (2, jnp.ones(2))], "n": None, "e": {}}, 0
    )
    wanted, got = stock.restore_checkpoint(tmp_path, target), ours.restore_checkpoint(tmp_path, target)
    if target == {"n": 4, "e": 5}:
        assert got == target  # flax gives its own metadata object in the place of an empty node
        return
    same(got, wanted)


# ---------------------------------------------------------------- what flax's own tests hold


def test_save_and_restore(tmp_path: Path, orbax: bool):
    same(ours.restore_checkpoint(tmp_path, OLD, prefix="test_"), OLD)
    (tmp_path / "test_tmp").touch()  # left by a process that died
    ours.save_checkpoint(tmp_path, NEW, 0, prefix="test_", keep=1)
    assert (tmp_path / "test_0").exists()
    same(ours.restore_checkpoint(tmp_path, OLD, prefix="test_"), NEW)
    for step, tree, keep in [(1, NEW, 1), (2, OLD, 1), (3, OLD, 2), (4, NEW, 2)]:
        assert ours.save_checkpoint(tmp_path, tree, step, prefix="test_", keep=keep) == f"{tmp_path}/test_{step}"
    same(ours.restore_checkpoint(tmp_path, OLD, prefix="test_"), NEW)
    same(ours.restore_checkpoint(tmp_path, NEW, step=3, prefix="test_"), OLD)
    same(ours.restore_checkpoint(tmp_path / "test_3", NEW), OLD)
    same(ours.restore_checkpoint(tmp_path / "test_not_there", NEW), NEW)
    same(ours.restore_checkpoint(tmp_path, NEW), NEW)  # no checkpoint of the default prefix
    with pytest.raises(ValueError, match=r"Matching checkpoint not found.*test_5") as caught:
        ours.restore_checkpoint(tmp_path, OLD, step=5, prefix="test_")
    assert isinstance(caught.value, StepNotFoundError)


def test_overwrite(tmp_path: Path, orbax: bool, monkeypatch: pytest.MonkeyPatch):
    ours.save_checkpoint(tmp_path, OLD, 0, keep=1)
    with pytest.raises(ValueError) as caught:
        ours.save_checkpoint(tmp_path, NEW, 0, keep=1)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, errors.InvalidCheckpointError) and isinstance(error, raystate.RaystateError)
        assert str(error) == str(caught.value) and error.path == f"{tmp_path}/checkpoint_0"
    ours.save_checkpoint(tmp_path, NEW, 0, keep=1, overwrite=True)
    same(ours.restore_checkpoint(tmp_path, OLD), NEW)
    ours.save_checkpoint(tmp_path, OLD, 2, keep=1, overwrite=True)
    same(ours.restore_checkpoint(tmp_path, NEW), OLD)
    with pytest.raises(errors.InvalidCheckpointError, match="checkpoint_1 is older than checkpoint_2"):
        ours.save_checkpoint(tmp_path, NEW, 1, keep=1)
    ours.save_checkpoint(tmp_path, NEW, 1, keep=1, overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint_1"]
    monkeypatch.chdir(tmp_path.parent)
    assert ours.save_checkpoint(f"./{tmp_path.name}", OLD, 3) == f"{tmp_path.name}/checkpoint_3"
    same(ours.restore_checkpoint(f"./{tmp_path.name}", NEW), OLD)
    ours.save_checkpoint(f"{tmp_path}//", NEW, 4)
    same(ours.restore_checkpoint(f"{tmp_path}//", OLD), NEW)


@pytest.mark.parametrize("first", [True, False])
def test_either_form_replaces_the_other(tmp_path: Path, first: bool):
    before = flax.config.flax_use_orbax_checkpointing
    try:
        for tree, form in [(OLD, first), (NEW, not first)]:
            flax.config.update("flax_use_orbax_checkpointing", form)
            ours.save_checkpoint(tmp_path, tree, 0, overwrite=True)
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)
    assert os.listdir(tmp_path) == ["checkpoint_0"]
    same(ours.restore_checkpoint(tmp_path, OLD), NEW)
    same(stock.restore_checkpoint(tmp_path, OLD), NEW)


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_overwrite_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool):
    ours.save_checkpoint(tmp_path, OLD, 0)
    whole: Callable[[str, str], None] = os.rename
    fail_at = [2]  # the first moves the old one away

    def rename(source: str, target: str) -> None:
        fail_at[0] -= 1
        if fail_at[0] == 0:
            raise OSError(5, "made to fail")
        whole(source, target)

    no = OSError(5, "made to fail") if exchanges else OSError(22, "Invalid argument")  # as of a file system that can't
    monkeypatch.setattr(posix, "exchange", mock.Mock(side_effect=no))
    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(raystate.StorageError, match="made to fail"):
        ours.save_checkpoint(tmp_path, NEW, 0, overwrite=True)
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["checkpoint_0"]
    same(ours.restore_checkpoint(tmp_path, NEW), OLD)


def test_what_a_dead_save_took_the_name_of_gets_it_back(tmp_path: Path, orbax: bool):
    path = ours.save_checkpoint(tmp_path, OLD, 3)
    os.rename(path, f"{path}.orbax-checkpoint-tmp-s0123456789abcdef-old")  # and died there
    with pytest.raises(errors.InvalidCheckpointError, match="checkpoint_3 already exists"):
        ours.save_checkpoint(tmp_path, NEW, 3)
    same(ours.restore_checkpoint(tmp_path, NEW), OLD)
    os.rename(path, f"{path}.orbax-checkpoint-tmp-s0123456789abcdef-old")
    ours.save_checkpoint(tmp_path, NEW, 4, keep=2)
    assert ours.available_steps(tmp_path) == [3, 4]


def test_an_exchange_that_may_not_last_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours.save_checkpoint(tmp_path, OLD, 0)
    whole, exchange, exchanged = posix.fsync, posix.exchange, [False]

    def fsync(path: str) -> None:
        if exchanged[0]:
            raise OSError(5, "made to fail")
        whole(path)

    def exchanging(one: str, other: str) -> None:
        exchange(one, other)
        exchanged[0] = True

    monkeypatch.setattr(posix, "exchange", exchanging)
    monkeypatch.setattr(posix, "fsync", fsync)
    with pytest.raises(raystate.StorageError, match="may not survive a power cut"):
        ours.save_checkpoint(tmp_path, NEW, 0, overwrite=True)
    monkeypatch.undo()
    same(ours.restore_checkpoint(tmp_path, OLD), NEW)
    assert len(os.listdir(tmp_path)) == 2, "the old one stays until the next save"
    ours.save_checkpoint(tmp_path, OLD, 0, overwrite=True)
    assert os.listdir(tmp_path) == ["checkpoint_0"]


def test_float_negative_and_zero_steps(tmp_path: Path, orbax: bool):
    ours.save_checkpoint(tmp_path, OLD, 0.0, prefix="test_")
    assert os.listdir(tmp_path) == ["test_0.0"]
    ours.save_checkpoint(tmp_path, NEW, 2.0, prefix="test_")
    with pytest.raises(errors.InvalidCheckpointError):
        ours.save_checkpoint(tmp_path, OLD, 1.0, prefix="test_", keep=1)
    ours.save_checkpoint(tmp_path, OLD, 3.0, prefix="test_", keep=2)
    assert sorted(os.listdir(tmp_path)) == ["test_2.0", "test_3.0"]
    for step in (-1.0, -0.5, 1e5):
        ours.save_checkpoint(tmp_path / "m", NEW, step, keep=9)
    assert ours.available_steps(tmp_path / "m", step_type=float) == [-1.0, -0.5, 1e5]
    with pytest.raises(ValueError):
        ours.available_steps(tmp_path / "m")
    assert ours.latest_checkpoint(tmp_path / "m") == f"{tmp_path}/m/checkpoint_100000.0"
    same(ours.restore_checkpoint(tmp_path / "m", OLD, step=-0.5), NEW)


def test_singular_and_empty_targets(tmp_path: Path, orbax: bool):
    for step, (target, template) in enumerate([(np.array([1, 2], np.int32), np.zeros(2, np.int32)), (3.5, 0.0)]):
        ours.save_checkpoint(tmp_path, target, step)
        assert (tmp_path / f"checkpoint_{step}").is_file()
        for module in (stock, ours):
            same(module.restore_checkpoint(tmp_path, None), target)
            same(module.restore_checkpoint(tmp_path, template), target)
    if orbax:
        for target in ({}, [], None):
            with pytest.raises(ValueError, match="nothing to save") as caught:
                ours.save_checkpoint(tmp_path, target, 9)
            assert isinstance(caught.value, ConfigError)
    else:
        ours.save_checkpoint(tmp_path, [], 9)
        assert ours.restore_checkpoint(tmp_path, None) == {} and ours.restore_checkpoint(tmp_path, []) == []


def test_saves_in_the_background(tmp_path: Path, orbax: bool):
    manager = ours.AsyncManager()
    assert manager.save_future is None
    tree = {"a": np.zeros(1000), "b": jnp.zeros(1000)}
    ours.save_checkpoint(tmp_path, tree, 0, async_manager=manager)
    tree["a"][:] = 1  # what is saved is what was given
    assert manager.save_future is not None
    manager.save_future.result()
    restored = ours.restore_checkpoint(tmp_path, tree)
    same(jax.tree.map(np.asarray, restored), {"a": np.zeros(1000), "b": np.zeros(1000, np.float32)})
    for step in (1, 2):
        ours.save_checkpoint(tmp_path, {"a": np.full(1000, float(step))}, step, async_manager=manager)
    manager.wait_previous_save()
    assert os.listdir(tmp_path) == ["checkpoint_2"]
    same(ours.restore_checkpoint(tmp_path, {"a": np.zeros(1000)}), {"a": np.full(1000, 2.0)})


def test_a_failed_background_save_is_told_once(tmp_path: Path):
    manager = ours.AsyncManager()
    (tmp_path / "file").touch()
    ours.save_checkpoint(tmp_path / "file", NEW, 0, async_manager=manager)
    with pytest.raises(raystate.StorageError):
        ours.save_checkpoint(tmp_path, NEW, 0, async_manager=manager)
    ours.save_checkpoint(tmp_path, NEW, 0, async_manager=manager)
    manager.wait_previous_save()
    same(ours.restore_checkpoint(tmp_path, OLD), NEW)


def test_latest_and_available(tmp_path: Path):
    assert ours.latest_checkpoint(tmp_path / "not_there") is None and ours.available_steps(tmp_path / "not_there") == []
    for name in ("test_tmp", "test_0", "test_10", "test_9", "orbaxtest_.orbax-checkpoint-tmp_10"):
        (tmp_path / name).write_text(name)
        (tmp_path / f"{name}_gda").mkdir()
    for module in (stock, ours):
        assert module.latest_checkpoint(tmp_path, "test_") == f"{tmp_path}/test_10"
        assert module.available_steps(tmp_path, "test_") == [0, 9, 10]
        assert module.latest_checkpoint(tmp_path, "orbaxtest_") is None and module.latest_checkpoint(tmp_path, "ckpt_") is None


def test_names_are_sorted_and_normalized_as_flax_does():
    draw = random.Random(int(os.environ["RAYSTATE_SEED"]))
    for names in (
        ["f_1", "f_2", "f_9", "f_1.0e1", "f_11"],
        ["f_-3.0", "f_-2", "f_-1", "f_0.0", "f_.5"],
        [
            f"{'ab'[draw.randrange(2)]}{draw.choice(['', '-', '_'])}{draw.choice([7, 10, 1e3, -0.2, '.5e-2', 'x'])}"
            for _ in range(30)
        ],
    ):
        draw.shuffle(names)
        for signed in (True, False):
            assert ours.natural_sort(names, signed) == stock.natural_sort(names, signed)
    for path in ("./a/b/c", "/a//b/c", "/a/../b/c", "a/b/./c", "gs://a//b/c"):
        assert ours.safe_normpath(path) == stock.safe_normpath(path)


def test_pre_linen_names_are_converted_as_flax_does():
    params = {
        "mod_0": {"submod1_0": {}, "submod2_1": {"kernel": 1}, "submod1_2": {}},
        "mod2_2": {"submod2_2_0": {}},
        "mod2_11": {"submod2_11_0": {}},
        "mod2_1": {"submod2_1_0": {}},
        "_3": {},
        "plain": {"a_b": 4},
    }
    for tree in (params, core.freeze(params), stock.convert_pre_linen(params), 5):
        wanted = stock.convert_pre_linen(tree)
        got = ours.convert_pre_linen(tree)
        assert got == wanted and type(got) is type(wanted)


# ---------------------------------------------------------------- the same decisions as flax


def test_any_sequence_of_saves_leaves_what_flax_leaves(tmp_path: Path, orbax: bool, monkeypatch: pytest.MonkeyPatch):
    """Flax's rules, without its arrays: what is kept, removed and refused. Where flax removes what it has just saved, raystate refuses."""
    draw = random.Random(int(os.environ["RAYSTATE_SEED"]))
    for round_ in range((1 if orbax else 3) * (20 if os.environ.get("RAYSTATE_ALL") else 1)):
        here, there = tmp_path / f"ours{round_}", tmp_path / f"stock{round_}"
        for _ in range(7):
            step = draw.choice([0, 1, 2, 3, 5, 8, 0.5, -1, 21, 1e2])
            options: dict[str, Any] = {"keep": draw.choice([0, 1, 2, 3]), "overwrite": draw.random() < 0.4}
            options["keep_every_n_steps"] = draw.choice([None, None, 1, 3])
            before = sorted(os.listdir(here)) if here.exists() else []
            theirs = outcome(lambda: stock.save_checkpoint(there, {"a": 1}, step, **options))  # noqa: B023
            mine = outcome(lambda: ours.save_checkpoint(here, {"a": 1}, step, **options))  # noqa: B023
            if orbax and theirs is None and not (there / f"checkpoint_{step}").exists():
                assert isinstance(mine, errors.InvalidCheckpointError) and sorted(os.listdir(here)) == before
                break
            assert (mine is None) == (theirs is None) and (theirs is None or isinstance(mine, type(theirs))), (theirs, mine)
            assert sorted(os.listdir(here)) == sorted(os.listdir(there)), (step, options)
            assert ours.available_steps(here, step_type=float) == stock.available_steps(there, step_type=float)


def test_what_is_kept_is_what_flax_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its own function decides about the same names; only the removal is left out."""
    draw = random.Random(int(os.environ["RAYSTATE_SEED"]))
    gone: list[str] = []
    monkeypatch.setattr(stock, "_safe_remove", lambda path: gone.append(os.path.basename(path)))
    for _ in range(300):
        steps = draw.sample([0, 0.5, 1, -2, -1, 2, 3, 4, 5, 6, 7, 9, 12, 1e2, 2.5], draw.randrange(1, 9))
        names = [f"c_{step}" for step in steps]
        monkeypatch.setattr(stock, "_allowempty_listdir", lambda _, names=names: list(names))
        options: dict[str, Any] = {"keep": draw.randrange(4), "overwrite": draw.random() < 0.5}
        options["keep_every_n_steps"] = draw.choice([None, 1, 2, 3, 5])
        gone.clear()
        stock._remove_invalid_ckpts(f"{tmp_path}/{names[0]}", f"{tmp_path}/c_", has_mpa=False, **options)
        assert removed(names, names[0], **options) == gone, (names, options)


def outcome(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


# ---------------------------------------------------------------- wrong and unusual use


def test_arguments_of_other_back_ends_are_accepted_and_warned_of(tmp_path: Path):
    with ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        with pytest.warns(UserWarning, match="orbax_checkpointer is not used"):
            ours.save_checkpoint(tmp_path, NEW, 0, orbax_checkpointer=checkpointer)
        with pytest.warns(UserWarning, match="gda_manager is not used"):
            ours.save_checkpoint_multiprocess(tmp_path, NEW, 1, gda_manager=object())
        with pytest.warns(UserWarning, match="is not used") as told:
            same(ours.restore_checkpoint(tmp_path, OLD, parallel=False, orbax_checkpointer=checkpointer), NEW)
    assert sorted(str(w.message).split()[0] for w in told if w.category is UserWarning) == ["orbax_checkpointer", "parallel"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours.save_checkpoint(tmp_path, NEW, 2)
        ours.restore_checkpoint(tmp_path, OLD)


def test_transforms_are_applied(tmp_path: Path):
    ours.save_checkpoint(tmp_path, {"old": jnp.arange(3.0), "kept": jnp.ones(2)}, 0)
    target = {"new": jnp.zeros(3), "kept": jnp.zeros(2)}
    transforms = {"new": ocp.Transform(original_key="old")}
    same(ours.restore_checkpoint(tmp_path, target, orbax_transforms=transforms), {"new": jnp.arange(3.0), "kept": jnp.ones(2)})


def test_what_cannot_be_saved_is_named_and_leaves_no_trace(tmp_path: Path):
    for target, word in [({"a": {"b": object()}}, "a/b"), ({"a": 1, "b": {"": 2}}, "empty key"), ({"a": np.zeros(2, "O")}, "a")]:
        with pytest.raises(ValueError, match=word) as caught:
            ours.save_checkpoint(tmp_path, target, 0)
        assert isinstance(caught.value, ConfigError)
    for keep in (-1, 0.5, float("nan"), float("inf"), True, "1", None, np.ones(2)):
        with pytest.raises(ConfigError, match="keep must be"):
            ours.save_checkpoint(tmp_path, NEW, 0, keep=keep)  # pyright: ignore[reportArgumentType]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("keep", [np.int64(2), 2.0, np.float32(2)])  # flax fails with the floats once there are more than two
def test_keep_may_be_any_whole_number(tmp_path: Path, keep: Any):
    for step in range(3):
        ours.save_checkpoint(tmp_path, NEW, step, keep=keep)
    assert ours.available_steps(tmp_path) == [1, 2]


def test_what_a_dead_save_left_is_removed_by_the_next(tmp_path: Path):
    left = tmp_path / "checkpoint_0.orbax-checkpoint-tmp-sdead/d"
    left.mkdir(parents=True)
    assert ours.latest_checkpoint(tmp_path) is None
    ours.save_checkpoint(tmp_path, NEW, 0)
    assert os.listdir(tmp_path) == ["checkpoint_0"]


def test_events_are_those_of_flax(tmp_path: Path, orbax: bool):
    heard: list[tuple[str, str]] = []

    def event_listener(event: str, **_: Any) -> None:
        heard.append((module, event))

    def duration_listener(event: str, duration_secs: float, **_: Any) -> None:
        heard.append((module, event))

    module = ""
    jax.monitoring.register_event_listener(event_listener)
    jax.monitoring.register_event_duration_secs_listener(duration_listener)
    try:
        for module, calls in (("stock", stock), ("ours", ours)):
            calls.save_checkpoint(tmp_path / module, NEW, 0)
            calls.restore_checkpoint(tmp_path / module, OLD)
    finally:
        jax.monitoring.unregister_event_listener(event_listener)
        jax.monitoring.unregister_event_duration_listener(duration_listener)
    of_flax = ("/jax/flax/", "/jax/checkpoint/write/duration", "/jax/checkpoint/read/duration")
    names = {event for module, event in heard if module == "stock" and event.startswith(of_flax)}
    assert len(names) == (5 if orbax else 6) and names <= {event for module, event in heard if module == "ours"}


def test_its_constants_are_those_of_flax():
    names = [name for name in dir(stock) if name.isupper() and name[0] != "_" and isinstance(getattr(stock, name), str)]
    assert len(names) == 6 and all(getattr(ours, name) == getattr(stock, name) for name in names)


def test_a_tree_of_nothing_but_none_is_saved_as_flax_saves_it(tmp_path: Path):
    for module in (stock, ours):
        module.save_checkpoint(tmp_path / module.__name__, {"x": None}, 0)
        assert [calls.restore_checkpoint(tmp_path / module.__name__, None) for calls in (stock, ours)] == [{"x": None}] * 2


def test_nothing_is_saved_into_a_run_or_a_checkpoint(tmp_path: Path, orbax: bool):
    """With prefix="" the names are those of a run's steps, and `keep` would remove them."""
    import_steps(tmp_path / "run", iter([in_memory_step(step, OLD) for step in (1, 2)]))
    raystate.save(tmp_path / "one", OLD)
    for folder, prefix in ((tmp_path / "run", ""), (tmp_path / "run" / "2", "checkpoint_"), (tmp_path / "one", "checkpoint_")):
        with pytest.raises(ConfigError, match=r"ckpt_dir: .* is (the storage of a run|a checkpoint)"):
            ours.save_checkpoint(str(folder), NEW, 3, prefix=prefix, keep=1)
    assert raystate.Reader(tmp_path / "run").all_steps() == [1, 2]
    same(raystate.load(tmp_path / "one"), OLD)
