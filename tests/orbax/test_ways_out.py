"""What Orbax's users bring along and raystate has no call for: taken as it is, or refused with the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax.training import checkpoints as flax_checkpoints
from orbax.checkpoint import v1

import raystate
from raystate.compat import flax_checkpoints as ours_of_flax
from raystate.config.hints import MEMBERS, METHODS
from raystate.core.formats.errors import ConfigError, ReferenceMismatchError
from raystate.manager import StateManager


def test_restore_args_ask_for_what_they_ask_orbax_for(tmp_path: Path):
    state = {"array": np.arange(3, dtype=np.int16), "step": 3, "rate": 2.5, "name": "run", "w": jnp.ones(2), "free": jnp.zeros(2)}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.PyTreeSave(state))
        asked = {**ocp.checkpoint_utils.construct_restore_args(state), "free": ocp.RestoreArgs()}
        stock = manager.restore(1, args=ocp.args.PyTreeRestore(state, restore_args=asked))
    ours = raystate.load(tmp_path / "run" / "1", asked)
    for name, value in stock.items():
        assert type(ours[name]) is type(value) or name == "free", name
        assert np.array_equal(ours[name], value) and np.asarray(ours[name]).dtype == np.asarray(value).dtype


def test_random_keys_of_orbax_v0_are_read_below_their_items(tmp_path: Path):
    key, state = jax.random.key(5), np.random.RandomState(3).get_state()
    args: Any = ocp.args
    with ocp.CheckpointManager(tmp_path / "run", item_names=("state", "jax", "numpy")) as manager:
        items = {"jax": args.JaxRandomKeySave(key), "numpy": args.NumpyRandomKeySave(state)}
        manager.save(1, args=args.Composite(state=args.StandardSave({"w": jnp.ones(2)}), **items))
    for item in items:
        with pytest.raises(ReferenceMismatchError, match=r"JaxRandomKeySave.*raystate\.load\('…/jax_random_key'\)"):
            raystate.load(tmp_path / "run", item=item)
        with pytest.raises(ReferenceMismatchError, match=r"JaxRandomKeySave.*raystate\.load\('…/jax_random_key'\)"):
            raystate.load(tmp_path / "run", items={item: None})
    got = jax.random.wrap_key_data(raystate.load(tmp_path / "run/1/jax/jax_random_key")["checkpoint"])
    assert got == key
    again = np.random.RandomState()
    again.set_state(tuple(raystate.load(tmp_path / "run/1/numpy/np_random_key")))
    assert again.random() == np.random.RandomState(3).random()


def test_a_checkpoint_of_one_path_is_no_step_of_a_run(tmp_path: Path):
    raystate.save(tmp_path / "one", {"w": jnp.ones(3)}, items={"note": "text"})
    calls = (
        lambda: raystate.load(tmp_path / "one", item="params"),
        lambda: raystate.load(tmp_path / "one", item="note"),
        lambda: raystate.load(tmp_path / "one", items={"params": None}),
        lambda: raystate.load(tmp_path / "one", {"w": np.ones(4, np.int32)}),
    )
    for call in calls:
        with pytest.raises(ReferenceMismatchError) as caught:
            call()
        assert "step 0" not in str(caught.value) and "restore(" not in str(caught.value) and "save(…" not in str(caught.value)


@pytest.mark.parametrize("name", ["x.safetensors", "x.npz"])
def test_a_file_of_another_format_is_told_of_import(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(b"not read")
    with pytest.raises(ConfigError, match=r"raystate import.*\.safetensors and \.npz"):
        raystate.load(tmp_path / name)


# What a training loop or its set-up writes; base classes, protocols and registries are for those who extend Orbax.
_INSIDE = {
    "AbstractCheckpointManager", "AbstractCheckpointer", "AbstractCheckpointable", "AsyncCheckpointHandler", "Checkpointable",
    "CheckpointableHandler", "BasePyTreeCheckpointHandler", "CheckpointMetadata", "CompositeOptions", "Future", "PyTreeMetadata",
    "DefaultCheckpointHandlerRegistry", "JaxRandomKeyCheckpointHandler", "NumpyRandomKeyCheckpointHandler", "ProtoCheckpointHandler",
    "merge_trees", "RootMetadata", "ProtoSave", "ProtoRestore", "get_registered_args_cls", "get_registered_handler_cls",
    "has_registered_args", "register_with_handler",
}  # fmt: skip


def test_public_names_of_orbax_and_flax_are_known_or_have_a_hint():
    for module in (ocp, ocp.args, v1, v1.training, flax_checkpoints):
        names = getattr(module, "__all__", None) or [
            name for name in dir(module) if getattr(getattr(module, name), "__module__", "").startswith(("orbax", "flax"))
        ]
        unknown = {name for name in names if callable(getattr(module, name)) and not name.startswith("_")}
        assert not unknown - _INSIDE - set(MEMBERS) - set(dir(raystate)) - _OF_COMPAT, module.__name__


_OF_COMPAT = set(dir(ours_of_flax)) | {"GlobalAsyncCheckpointManager"}


@pytest.mark.parametrize("theirs", [ocp.CheckpointManager, v1.training.Checkpointer])
@pytest.mark.parametrize("ours", [StateManager, raystate.Reader])
def test_methods_of_orbaxs_managers_are_ours_or_have_a_hint(ours: type, theirs: type):
    names = {name for name in dir(theirs) if not name.startswith("_")}
    assert names <= {*METHODS, *dir(StateManager)}
    one = object.__new__(ours)
    for name in METHODS:
        with pytest.raises(AttributeError, match=f"'{ours.__name__}' object has no attribute '{name}': "):
            getattr(one, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing_of_the_kind'$"):
        getattr(one, "nothing_of_the_kind")  # noqa: B009
