"""Builds a step as raystate does: two writers, a stranger beside them, the merge, and the files in their places."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from raystate.core.formats.tree import ArraySpec, DataObject, LeafSpec, Package, TreeSpec
from raystate.orbax.merge import build_files, own_folders
from raystate.orbax.writer import write_item
from raystate.runtime.host.share import write_share
from raystate.storage import StepFolder, data_objects, open_storage
from tests.orbax.state_example import ARRAYS, array, notes, state

SHARDING = '{"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"}'
JSON_ITEM = {"tokens": [1, 2, {"x": None}]}
METRICS = {"loss": 0.125, "accuracy": 0.5}
CUSTOM = {"commit": "abc", "nested": {"k": [1]}}


def kv_base(folder: Path) -> dict[str, Any]:
    return {"driver": "file", "path": f"{folder}/"}


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[LeafSpec]:
    """Leaves in jax's order (dict keys sorted); a string in place of an array is its name in ARRAYS."""
    if isinstance(tree, dict | list) and tree:
        entries = sorted(tree.items()) if isinstance(tree, dict) else enumerate(tree)
        return [leaf for key, value in entries for leaf in leaves(value, (*path, key))]
    match tree:
        case dict():
            return [LeafSpec(path=path, kind="dict")]
        case list():
            return [LeafSpec(path=path, kind="list")]
        case None:
            return [LeafSpec(path=path, kind="none")]
        case np.ndarray():
            spec = ArraySpec(shape=tree.shape, dtype=tree.dtype.name, chunk=tree.shape, typestr="np.ndarray")
            return [LeafSpec(path=path, kind="array", array=spec)]
        case ArraySpec():
            return [LeafSpec(path=path, kind="array", array=tree)]
        case str():
            return [LeafSpec(path=path, kind="string")]
        case _:
            return [LeafSpec(path=path, kind="scalar")]


def _array_spec(name: str) -> ArraySpec:
    shape, dtype, chunk = ARRAYS[name]
    return ArraySpec(shape=shape, dtype=dtype, chunk=chunk, sharding=SHARDING)


def state_tree() -> TreeSpec:
    return TreeSpec(item="state", leaves=tuple(leaves(state(_array_spec))))


def notes_tree() -> TreeSpec:
    return TreeSpec(item="notes", leaves=tuple(leaves(notes())))


def values_of(tree: TreeSpec, value: Any) -> list[Any]:
    """Values of the scalar and string leaves, in order."""
    found = []
    for leaf in tree.leaves:
        if leaf.kind in ("scalar", "string"):
            node = value
            for key in leaf.path:
                node = node[key]
            found.append(node)
    return found


def pieces(tree: TreeSpec, host: int, hosts: int, scale: int = 1) -> list[tuple[int, tuple[int, ...], np.ndarray]]:
    """A host's share: every `hosts`-th chunk. The 2-d kernel's chunks of one row of chunks go together, as one piece."""
    share = []
    for index, leaf in enumerate(tree.leaves):
        if leaf.array is None:
            continue
        full, spec = array(leaf.name, scale), leaf.array
        chunk = (spec.chunk[0], spec.shape[1]) if leaf.name == "params.dense.kernel" else spec.chunk
        steps = [range(0, size, piece) for size, piece in zip(spec.shape, chunk, strict=True)]
        starts = list(itertools.product(*steps)) or [(0,) * len(spec.shape)]  # one piece without elements for an empty array
        for number, start in enumerate(starts):
            if number % hosts == host:
                box = tuple(slice(begin, begin + piece) for begin, piece in zip(start, chunk, strict=True))
                share.append((index, start, np.array(full[box])))
    return share


def publish(root: Path, step: int = 1200, save: str = "a7k1", **changes: Any) -> tuple[Path, dict[str, bytes], list[DataObject]]:
    """Write, merge and publish a step under `root`; `changes` are for build_files."""
    folder, storage = root / str(step), open_storage(root)
    tree, other = state_tree(), notes_tree()
    objects: list[DataObject] = []
    for host in (0, 1):
        objects += write_share(storage, str(step), f"{save}h{host}", tree, pieces(tree, host, 2))
    index = next(i for i, leaf in enumerate(other.leaves) if leaf.name == "odd")
    objects += write_share(storage, str(step), f"{save}h0", other, [(index, (0, 0), array("params.odd"))])
    # A zombie of an older save wrote other values beside them, and an array of its own.
    extra = LeafSpec(path=("stranger",), kind="array", array=ArraySpec(shape=(2,), dtype="int8", chunk=(2,)))
    strange = TreeSpec(item="state", leaves=(*tree.leaves, extra))
    share = [*pieces(tree, 0, 2, scale=2), (len(tree.leaves), (0,), np.zeros(2, np.int8))]
    write_item(kv_base(folder / "state"), "a6k9h0", strange, share)
    arguments: dict[str, Any] = {
        "iterators": {"data": {0: b'{"next": 4}', 1: b'{"next": 5}'}},
        "json_items": {"vocabulary": JSON_ITEM},
        "metrics": METRICS,
        "custom": CUSTOM,
        "world": 2,
        **changes,
    }
    files = build_files(
        step,
        save,
        [tree, other],
        [values_of(tree, state()), values_of(other, notes())],
        {"state": [f"{save}h0", f"{save}h1"], "notes": [f"{save}h0"]},
        lambda item: kv_base(folder / item),
        **arguments,
    )
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    for item_tree in (tree, other):
        for name, begin in own_folders(item_tree.item, save).items():
            objects += data_objects(storage, str(step), name, writer=f"{save}hc", begin=begin)
    return folder, files, objects


def committed(root: Path, step: int, save: str = "", *, package: bool = True) -> StepFolder:
    """A published step as a run leaves it, without the stranger, with or without a package."""
    save = save or f"a1k{step}"
    folder, files, objects = publish(root, step, save)
    for path in [path for path in folder.rglob("*") if path.is_file() and "process_a6k9" in str(path)]:
        path.unlink()
    done = StepFolder(open_storage(root), step, save)
    if package:
        done.put_package(Package(step=step, save=save, run="lm", files=files, objects=tuple(objects)))
    return done
