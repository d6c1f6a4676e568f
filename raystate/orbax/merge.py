"""Coordinator side of a step: merge exactly the writers of one save, and make the bytes of every fixed-name file.

Nothing fixed-name is written here. What the merge itself adds to storage lies under names that no other save uses.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import tensorstore as ts

from raystate.core.coordinator.context import NAMED, ranks_text
from raystate.core.formats.errors import ConfigError, CorruptCheckpointError
from raystate.core.formats.own_files import MARKER
from raystate.core.formats.tree import ArraySpec, LeafSpec, TreeSpec
from raystate.orbax import kv
from raystate.orbax.coverage import chunk_grid
from raystate.orbax.step_metadata import CUSTOM_KEY, KEY_IMPL, STATEFUL_HANDLER
from raystate.orbax.writer import WRITER_PREFIX, write_item

Value = int | float | bool | str | None

# What grain's checkpoint handler calls itself in `_CHECKPOINT_METADATA`; grain need not be installed where the Coordinator runs.
GRAIN_HANDLER = "grain._src.python.checkpoint.handler.CheckpointHandler"


def build_files(
    step: int,
    save: str,
    trees: Sequence[TreeSpec],
    values: Sequence[Sequence[Value]],
    writers: Mapping[str, Sequence[str]],
    kv_base_of: Callable[[str], dict[str, Any]],
    *,
    iterators: Mapping[str, Mapping[int, bytes]] | None = None,
    own_files: Mapping[str, Mapping[str, bytes]] | None = None,
    json_items: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    custom: Any = None,
    world: int = 1,
) -> dict[str, bytes]:
    """Merge the writers of a save and make the bytes of every fixed-name file of its step.

    Blocking; may run in any thread of a long-lived process. Uses jax on CPU only, and Orbax only in a scratch directory.

    Args:
        step: number of the step.
        save: id of this save try, letters and digits; makes the merge's own objects unique.
        trees: the array items, "state" first or not.
        values: per tree: the values of its scalar and string leaves, in the order of its leaves.
        writers: item -> the writers whose data make up the item. Others in the same folder are ignored.
        kv_base_of: item -> TensorStore kvstore spec of the item's folder (path ending in "/"), where the writers wrote.
        iterators: item -> process -> state; every process below `world` must be there.
        own_files: item -> what a user's checkpointable wrote: name relative to the item's folder -> bytes.
        json_items: item -> JSON value.
        metrics: as given to save.
        custom: JSON value; becomes Orbax's custom_metadata.
        world: number of processes.

    Returns:
        Name relative to the step's folder -> bytes, the markers `commit_success.txt` included. What the merge itself wrote to
        storage lies in the folders `own_folders`.

    Raises:
        CorruptCheckpointError: after the merge an array or chunk is missing; names it.
        ConfigError: names clash, a value cannot be stored, or a process's iterator state is missing.
        StorageError: storage failed.
    """
    from raystate.orbax import scratch  # loads nothing heavy itself, but Orbax at its first use

    iterators, own_files, json_items = iterators or {}, own_files or {}, json_items or {}
    _check_items(trees, iterators, [*own_files, *json_items], step, world)
    _check_json({**json_items, "metrics": metrics, "custom": custom})
    own = _own_writer(save)
    strings: list[dict[int, str]] = []
    files: dict[str, bytes] = {}
    for tree, given in zip(trees, values, strict=True):
        scalars, texts = _split_values(tree, given)
        strings.append(texts)
        base, names = kv_base_of(tree.item), list(writers.get(tree.item, ()))
        if scalars:
            write_item(base, own, _as_arrays(tree, scalars), [(i, (), v) for i, v in scalars.items()])
            names.append(own)
        if any(leaf.kind in ("array", "scalar") for leaf in tree.leaves):  # Orbax writes no database for texts alone
            files[f"{tree.item}/manifest.ocdbt"] = merge_writers(base, names, save=save, tree=tree)
        if shardings := _shardings(tree):
            files[f"{tree.item}/_sharding"] = shardings
        if metadatas := _array_metadatas(tree):
            files[f"{tree.item}/array_metadatas/process_0"] = metadatas
    files |= scratch.small_files(
        trees,
        strings,
        json_items=json_items,
        metrics=metrics or {},
        custom=_custom_metadata(custom),
        handlers=dict.fromkeys(iterators, GRAIN_HANDLER) | dict.fromkeys(own_files, STATEFUL_HANDLER),
    )
    files |= _iterator_files(iterators, world)
    for item, mine in own_files.items():
        files |= {f"{item}/{name}": data for name, data in {**mine, MARKER: b""}.items()}
    for name in files:
        if name.rpartition("/")[2] == MARKER and name.count("/") < 2:  # Orbax writes the path of the scratch directory into it
            files[name] = f"step {step}, save {save}\n".encode()
    return files


def own_folders(item: str, save: str) -> dict[str, str]:
    """Where `build_files` puts objects: folder, relative to the step's -> how the names of this save's objects in it begin."""
    return {f"{item}/{WRITER_PREFIX}{_own_writer(save)}": "", f"{item}/d": _nodes(save)}


def merge_writers(base: dict[str, Any], writers: Sequence[str], *, save: str, tree: TreeSpec) -> bytes:
    """Merge the databases of exactly these writers, and check that the outcome has every array and every chunk.

    The merged database only points into the writers' data. Its manifest is kept in memory and returned; its B-tree nodes, if it
    needs any, are written to `d/<save>…` of the item's folder.

    Returns:
        The bytes of manifest.ocdbt.
    """
    where = f"item {tree.item!r} of save {save}"
    nodes = f"d/{_nodes(save)}"
    with kv.named_errors(f"merging {where} in {kv.url_of(base)}", damage=True, item=tree.item):
        ctx = kv.context()
        # Source and target of a copy between databases must share context and cache, and name their manifest's place.
        target = {
            **kv.ocdbt(base),
            "manifest": "memory://",
            "config": kv.OCDBT_CONFIG,
            "assume_config": True,
            "value_data_prefix": nodes,
            "btree_node_data_prefix": nodes,
            "version_tree_node_data_prefix": nodes,
        }
        parent = kv.open_store(target, ctx)
        transaction = ts.Transaction(atomic=True)
        copies: list[Any] = []
        for writer in writers:
            folder = kv.below(base, f"{WRITER_PREFIX}{writer}/")
            if kv.read_key(kv.open_store(folder), "manifest.ocdbt") is None:
                raise CorruptCheckpointError(f"{where}: writer {writer} has left no manifest", item=tree.item, writer=writer)
            child = kv.open_store(kv.ocdbt(folder), ctx)
            copies.append(child.experimental_copy_range_to(parent.with_transaction(transaction)))
        for copy in copies:
            kv.result(copy)
        kv.result(transaction.commit_async())
        _check_complete(parent, tree, where)
        manifest = kv.read_key(kv.open_store({"driver": "memory"}, ctx), "manifest.ocdbt")
        if manifest is None:
            raise CorruptCheckpointError(f"{where}: nothing was written", item=tree.item)
    return manifest


# Both are spelled like a host's writer, so that `storage.names.save_of` knows whose they are; no host is called "c" or "m…".


def _own_writer(save: str) -> str:
    return f"{save}hc"


def _nodes(save: str) -> str:
    return f"{save}hm"


def _check_complete(store: ts.KvStore, tree: TreeSpec, where: str) -> None:
    """Every array's metadata and every chunk's key are in the merged database (cheap: only B-tree nodes are read)."""
    found: dict[str, int] = {}
    for key in kv.list_keys(store):
        key = f"/{key}"  # so that an array without a name, which is the whole item, is no special case
        if key.endswith("/zarr.json"):
            name = key[1 : -len("/zarr.json")]
            found[name] = found.get(name, 0)
        else:
            name = key.rpartition("/c")[0] if key.endswith("/c") else key[: key.rindex("/c/")] if "/c/" in key else key
            found[name[1:]] = found.get(name[1:], 0) + 1
    lacking: list[str] = []
    for leaf in tree.leaves:
        if leaf.kind == "scalar" or leaf.array is not None:
            expected = math.prod(chunk_grid(leaf.array)) if leaf.array is not None else 1
            if leaf.name not in found:
                lacking.append(f"{leaf.name} is missing")
            elif found[leaf.name] != expected:
                lacking.append(f"{leaf.name} has {found[leaf.name]} of {expected} chunks")
    if lacking:
        more = f", and {len(lacking) - 10} more" if len(lacking) > 10 else ""
        raise CorruptCheckpointError(f"{where}: {'; '.join(lacking[:10])}{more}", item=tree.item, missing=lacking[:100])


# ---------------------------------------------------------------- values


def _split_values(tree: TreeSpec, values: Sequence[Value]) -> tuple[dict[int, np.ndarray], dict[int, str]]:
    """(leaf index -> 0-d array of each scalar, leaf index -> each string)."""
    valued = [i for i, leaf in enumerate(tree.leaves) if leaf.kind in ("scalar", "string")]
    if len(values) != len(valued):
        raise ConfigError(f"item {tree.item!r} has {len(valued)} scalars and strings, not {len(values)}", item=tree.item)
    scalars: dict[int, np.ndarray] = {}
    texts: dict[int, str] = {}
    for index, value in zip(valued, values, strict=True):
        leaf = tree.leaves[index]
        if leaf.kind == "string":
            texts[index] = str.__str__(cast(str, value))  # an enum's own text is another one
            continue
        try:
            array = np.asarray(value)
        except OverflowError:
            array = np.asarray(None)
        if array.shape != () or array.dtype.kind not in "biuf":
            raise ConfigError(
                f"leaf {leaf.name!r} of item {tree.item!r}: {value!r} is no number that can be stored", path=leaf.name
            )
        scalars[index] = array
    return scalars, texts


def _as_arrays(tree: TreeSpec, scalars: Mapping[int, np.ndarray]) -> TreeSpec:
    """The tree with its scalars as the 0-d arrays that Orbax stores them as."""
    leaves = list(tree.leaves)
    for index, value in scalars.items():
        array = ArraySpec(shape=(), dtype=value.dtype.name, chunk=())
        leaves[index] = LeafSpec(path=leaves[index].path, kind="array", array=array)
    return TreeSpec(item=tree.item, leaves=tuple(leaves))


# ---------------------------------------------------------------- files that Orbax's array handler would write


def _shardings(tree: TreeSpec) -> bytes | None:
    by_name = {
        base64.urlsafe_b64encode(leaf.name.encode()).decode(): leaf.array.sharding
        for leaf in tree.leaves
        if leaf.array is not None and leaf.array.sharding is not None
    }
    return json.dumps(by_name, separators=(",", ":")).encode() if by_name else None


def _array_metadatas(tree: TreeSpec) -> bytes | None:
    entries = [
        {
            "param_name": leaf.name,
            "write_shape": leaf.array.chunk,
            "chunk_shape": leaf.array.chunk,
            "ext_metadata": {KEY_IMPL: leaf.array.key_impl} if leaf.array.key_impl is not None else None,
        }
        for leaf in tree.leaves
        if leaf.array is not None and leaf.array.typestr == "jax.Array"
    ]
    return json.dumps({"array_metadatas": [{"array_metadata": entry} for entry in entries]}).encode() if entries else None


# ---------------------------------------------------------------- items


def _check_items(
    trees: Sequence[TreeSpec], iterators: Mapping[str, Mapping[int, bytes]], others: Sequence[str], step: int, world: int
) -> None:
    names = [*(tree.item for tree in trees), *iterators, *others]
    for name in names:
        if names.count(name) > 1 or name in ("metrics", "", ".", "..") or "/" in name:
            raise ConfigError(f"item name {name!r} is reserved, no plain name, or given twice", field=name)
    for tree in trees:
        doubled = len(tree.leaves) - len({leaf.name for leaf in tree.leaves})
        if doubled:
            raise ConfigError(
                f"item {tree.item!r}: {doubled} leaves have the same name once their keys are joined by dots", item=tree.item
            )
    for item, states in iterators.items():
        if lacking := sorted(set(range(world)) - set(states)):
            ranks = f"{ranks_text(lacking, {})} of {world}"
            text = f"item {item!r} is an iterator, and save() got none from {ranks}; give it on every rank"
            raise ConfigError(f"step {step} can't be committed: {text}", item=item, step=step, missing_ranks=lacking[:NAMED])


def _iterator_files(iterators: Mapping[str, Mapping[int, bytes]], world: int) -> dict[str, bytes]:
    """Named as grain's checkpoint handler names them."""
    files: dict[str, bytes] = {}
    for item, states in iterators.items():
        files[f"{item}/{MARKER}"] = b""
        files |= {f"{item}/process_{process}-of-{world}.json": state for process, state in states.items()}
    return files


def _custom_metadata(custom: Any) -> dict[str, Any]:
    """`custom` as the dict that Orbax takes; `StepReader.custom` is the way back."""
    if custom is None:
        return {}
    plain = isinstance(custom, dict) and custom and set(custom) != {CUSTOM_KEY}
    return custom if plain else {CUSTOM_KEY: custom}


def _check_json(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name!r} cannot be written as JSON: {error}", field=name) from error
