"""A checkpoint of flax's, in any form, read by flax's rules: what the target says, and where both differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import serialization
from flax.core import FrozenDict
from flax.training import orbax_utils

from raystate.arrays.paths import Path, names, path_key, shown
from raystate.arrays.restore import restore_tree
from raystate.compat.flax_errors import TargetMismatchError
from raystate.core.formats.errors import CorruptCheckpointError, ReferenceMismatchError
from raystate.core.formats.own_files import MARKER
from raystate.core.formats.tree import LeafSpec
from raystate.inspection import Checkpoints
from raystate.legacy.reader import LegacyReader
from raystate.orbax.step_reader import StepReader
from raystate.restored import STATE, ReadOptions, StepContent, content_from_storage
from raystate.storage import canonical_url


def read(path: str, target: Any) -> Any:
    """The checkpoint at a path in the form of the target (None: as a state dict).

    Raises:
        CorruptCheckpointError: it is damaged, was never finished, or is none.
        TargetMismatchError: the target asks for what it has not.
        StorageError: storage failed.
    """
    checkpoints = Checkpoints(path)
    found = checkpoints.single
    if found is None:
        raise CorruptCheckpointError(f"{path} is no checkpoint of flax's or Orbax's", path=path)
    if found.step not in checkpoints.steps():
        raise CorruptCheckpointError(f"{path} has no {MARKER}: it was never finished, or is a copy that has lost it", path=path)

    def restore(reader: StepReader) -> Any:
        content = content_from_storage(reader, found.step)
        if isinstance(reader, LegacyReader) and reader.is_file:
            state = _file_state(reader, content, target)
            return state if target is None else serialization.from_state_dict(target, state)
        return _state_dict(content) if target is None else _as_target(content, target)

    return checkpoints.read_existing(found.step, restore)


def read_transformed(path: str, target: Any, transforms: Mapping[str, Any]) -> Any:
    """Restore a folder with Orbax and its own transformations, as flax does."""
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        restored = checkpointer.restore(
            canonical_url(path).removeprefix("file://"),  # the absolute path, or the URL of a bucket
            item=target,
            restore_args=orbax_utils.restore_args_from_target(target),
            transforms=transforms,
        )
    return serialization.from_state_dict(target, serialization.to_state_dict(restored))


# ---------------------------------------------------------------- a folder, as flax's default backend reads it


def _state_dict(content: StepContent) -> Any:
    """The raw tree; a leaf that was a jax.Array is one again."""
    state = serialization.to_state_dict(content.tree(STATE, None, ReadOptions()))
    for leaf in content.trees[STATE].leaves:
        if leaf.array is None or leaf.array.typestr != "jax.Array" or not leaf.path:
            continue
        *above, last = names(leaf.path)
        node = state
        for key in above:
            node = node[key]
        value = node[last]
        if isinstance(value, np.ndarray) and jax.dtypes.canonicalize_dtype(value.dtype) == value.dtype:
            node[last] = jax.numpy.asarray(value)
    return state


def _as_target(content: StepContent, target: Any) -> Any:
    """What the target has and the checkpoint has not stays the target's; shapes are the checkpoint's; dtypes are the target's where
    it has anything with a sharding. What is abstract and has none becomes a numpy array, and so do numbers where nothing has one."""
    stored = {names(leaf.path): leaf for leaf in content.trees[STATE].leaves}
    flat, structure = jax.tree_util.tree_flatten_with_path(target)
    on_devices = any(_is_placed(value) for _, value in flat)
    paths: list[Path] = [tuple(map(path_key, keys)) for keys, _ in flat]
    wanted = [_wanted(value, stored.get(names(path)), path, cast=on_devices) for path, (_, value) in zip(paths, flat, strict=True)]
    reference = jax.tree_util.tree_unflatten(structure, wanted)
    try:
        tree = content.tree(STATE, reference, ReadOptions(cast=True, shapes="checkpoint"))
    except ReferenceMismatchError as error:
        raise TargetMismatchError(error.message, **error.details) from error
    restored = jax.tree_util.tree_leaves(tree)
    leaves = [value if got is ... else got for got, (_, value) in zip(restored, flat, strict=True)]
    return _in_order(target, iter(leaves))


def _in_order(target: Any, leaves: Iterator[Any]) -> Any:
    """The target with other leaves. JAX alone would sort the keys of its dicts; a loop over them
    expects the target's order."""
    children, structure = jax.tree_util.tree_flatten(target, is_leaf=lambda node: node is not target)
    if len(children) == 1 and children[0] is target:  # a leaf
        return next(leaves)
    made = jax.tree_util.tree_unflatten(structure, [_in_order(child, leaves) for child in children])
    return type(target)({key: made[key] for key in target}) if type(target) in (dict, FrozenDict) else made


def _wanted(value: Any, stored: LeafSpec | None, path: Path, *, cast: bool) -> Any:
    """A reference's leaf for a target's; `...`: the target's own value stays."""
    if stored is None or stored.kind in ("none", "dict", "list"):
        if isinstance(value, jax.ShapeDtypeStruct):
            what = "is not in the checkpoint" if stored is None else "is empty in the checkpoint"
            text = f"{shown(path)} {what}, and the target's is abstract: give it a value"
            raise TargetMismatchError(text, path=shown(path))
        return ...
    is_abstract = isinstance(value, jax.ShapeDtypeStruct)
    is_number = stored.array is not None or stored.kind == "scalar"
    if _is_placed(value) or (is_abstract and (_is_key(value) or not is_number)):
        return value
    if not is_number:
        return stored.value
    shape, own = (stored.array.shape, stored.array.dtype) if stored.array is not None else ((), np.asarray(stored.value).dtype)
    if cast and shape == ():
        if isinstance(value, np.float64):  # a Python float, too
            return value
        if isinstance(value, bool | int | float):
            return np.zeros((), own).item()
    is_numpy = is_abstract or isinstance(value, np.ndarray | np.generic)
    dtype = value.dtype if cast and is_numpy else np.dtype(own)
    return np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory


def _is_placed(value: Any) -> bool:
    return isinstance(value, jax.Array) or getattr(value, "sharding", None) is not None


def _is_key(value: jax.ShapeDtypeStruct) -> bool:
    return jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


# ---------------------------------------------------------------- a msgpack file


def _file_state(reader: LegacyReader, content: StepContent, target: Any) -> Any:
    """The state dict of a file. An array that lies beside it is placed as the target's array is, if it has one there."""
    beside = reader.paths_beside
    if not beside:
        return reader.state_dict({})
    wanted = dict(_leaves(serialization.to_state_dict(target))) if target is not None else {}
    spec = content.trees[STATE]
    placed: dict[Path, Any] = {}
    for path in beside:
        value = wanted.get(names(path))
        like = value if _is_placed(value) else _numpy_like(spec.leaves, path)
        reference: Any = like
        for key in reversed(names(path)):
            reference = {key: reference}
        got = restore_tree(reference, spec, content.source(STATE), cast=True, shapes="checkpoint")
        placed[path] = jax.tree_util.tree_leaves(got)[0]
    return reader.state_dict(placed)


def _numpy_like(leaves: tuple[LeafSpec, ...], path: Path) -> Any:
    array = next(leaf.array for leaf in leaves if leaf.path == path)
    assert array is not None  # it lies beside the file
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _leaves(state: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(state, dict):
        for key, value in state.items():
            yield from _leaves(value, (*path, str(key)))
    else:
        yield path, state
