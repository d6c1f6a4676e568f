"""Each way in which stock Orbax reads and writes, beside raystate's, of steps with one item and with several: in both directions."""

# Orbax takes paths of pathlib, and its types do not say so.
# pyright: reportArgumentType=false

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1

import raystate

warnings.filterwarnings("ignore", module="orbax")

DTYPES = ("int8", "int32", "float16", "bool", "complex64")  # zarr2 has no float8 and no int4
STATE = {
    "w": jnp.arange(15, dtype=jnp.float32).reshape(5, 3),
    "deep": [{"b": jnp.ones(4, jnp.bfloat16)}, 7],
    "dtypes": {name: jnp.asarray(np.arange(6).reshape(2, 3).astype(name)) for name in DTYPES},
}
AVERAGE = {"w": jnp.full((5, 3), 0.5)}
NOTE = {"tokens": [1, 2, {"x": None}]}
METRICS = {"loss": 0.25}
Tree = Any


def equal(got: Tree, expected: Tree) -> bool:
    """The same leaves, bit for bit, under the same paths; a list may have come as a dict or a tuple."""

    def leaves(tree: Tree) -> dict[str, tuple[str, bytes]]:
        found = jax.tree_util.tree_leaves_with_path(tree)
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): (str(np.asarray(leaf).dtype), np.asarray(leaf).tobytes())
            for path, leaf in found
        }

    return leaves(got) == leaves(expected)


def described(tree: Tree) -> list[tuple[int, ...]]:
    """Shapes of the arrays; Orbax gives one to numbers, too."""
    return sorted(tuple(leaf.shape) for leaf in jax.tree.leaves(tree) if getattr(leaf, "shape", ()))


SHAPES = {"state": described(STATE), "average": described(AVERAGE)}

# ---------------------------------------------------------------- raystate writes, stock Orbax reads


def _v0_manager(root: Path) -> tuple[Tree, Tree]:
    with ocp.CheckpointManager(root) as manager:
        assert manager.all_steps() == [3]
        wanted = {"state": ocp.args.StandardRestore(STATE)}
        if (root / "3/average").exists():
            wanted |= {"average": ocp.args.StandardRestore(), "note": ocp.args.JsonRestore()}
            assert manager.metrics(3) == METRICS
        got = manager.restore(3, args=ocp.args.Composite(**wanted))
        if "note" in wanted:
            assert got["note"] == NOTE
        return got["state"], got["average"] if "average" in wanted else None


def _v0_standard(root: Path) -> tuple[Tree, Tree]:
    with ocp.StandardCheckpointer() as checkpointer:
        average = checkpointer.restore(root / "3/average", AVERAGE) if (root / "3/average").exists() else None
        return checkpointer.restore(root / "3/state", STATE), average


def _v0_pytree(root: Path) -> tuple[Tree, Tree]:
    with ocp.PyTreeCheckpointer() as checkpointer:
        average = checkpointer.restore(root / "3/average") if (root / "3/average").exists() else None
        return checkpointer.restore(root / "3/state"), average


def _v1_load(root: Path) -> tuple[Tree, Tree]:
    average = v1.load(root / "3", checkpointable_name="average") if (root / "3/average").exists() else None
    return v1.load(root / "3", STATE), average


def _v1_checkpointables(root: Path) -> tuple[Tree, Tree]:
    got = v1.load_checkpointables(root / "3")
    if "average" in got:
        assert got["note"] == NOTE
    return got["state"], got.get("average")


def _v1_training(root: Path) -> tuple[Tree, Tree]:
    with v1.training.Checkpointer(root) as checkpointer:
        assert checkpointer.latest is not None and checkpointer.latest.step == 3
        several = (root / "3/average").exists()
        got = checkpointer.load_checkpointables(3)
        assert equal(checkpointer.load(3, STATE), STATE)
        return got["state"], got["average"] if several else None


READERS: list[Callable[[Path], tuple[Tree, Tree]]] = [
    _v0_manager, _v0_standard, _v0_pytree, _v1_load, _v1_checkpointables, _v1_training,
]  # fmt: skip


@pytest.fixture(scope="module", params=["one", "several"])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool]:
    """A directory of raystate's with one step, and whether that has several items."""
    root, several = tmp_path_factory.mktemp(request.param), request.param == "several"
    items = {"average": AVERAGE, "note": NOTE} if several else None
    raystate.save(root / "3", STATE, items=items, metrics=METRICS if several else None)
    return root, several


@pytest.mark.parametrize("read", READERS, ids=lambda read: read.__name__.strip("_"))
def test_stock_orbax_reads_what_raystate_saved(ours: tuple[Path, bool], read: Callable[[Path], tuple[Tree, Tree]]):
    root, several = ours
    state, average = read(root)
    assert equal(state, STATE)
    assert (average is not None) == several and (not several or equal(average, AVERAGE))


def test_stock_orbax_describes_what_raystate_saved(ours: tuple[Path, bool]):
    root, several = ours
    names = {"state", "average"} if several else {"state"}
    assert described(v1.metadata(root / "3").metadata) == SHAPES["state"]
    found = v1.checkpointables_metadata(root / "3").metadata
    assert names <= set(found) <= names | {"note", "metrics"}
    with v1.training.Checkpointer(root) as checkpointer:
        same = checkpointer.checkpointables_metadata(3).metadata
    for name in names:
        assert described(found[name]) == described(same[name]) == SHAPES[name]
        assert described(v1.metadata(root / "3", name).metadata) == SHAPES[name]
    with ocp.CheckpointManager(root, item_handlers={name: ocp.StandardCheckpointHandler() for name in names}) as manager:
        for name in names:
            assert described(manager.item_metadata(3)[name].tree) == SHAPES[name]


# ---------------------------------------------------------------- stock Orbax writes, raystate reads


def _write_v0_manager(root: Path, several: bool) -> None:
    standard = ocp.args.StandardSave
    with ocp.CheckpointManager(root, options=ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics["loss"])) as manager:
        if several:
            items = {"state": standard(STATE), "average": standard(AVERAGE), "note": ocp.args.JsonSave(NOTE)}
            manager.save(3, args=ocp.args.Composite(**items), metrics=METRICS)
        else:
            manager.save(3, args=standard(STATE))


def _write_v0_bare(make: Callable[[], Any]) -> Callable[[Path, bool], None]:
    def write(root: Path, several: bool) -> None:
        assert not several, "it knows no items"
        with make() as checkpointer:
            checkpointer.save(root / "3", STATE)

    return write


def _write_v1(root: Path, several: bool) -> None:
    if several:
        v1.save_checkpointables(root / "3", {"state": STATE, "average": AVERAGE, "note": NOTE})
    else:
        v1.save(root / "3", STATE)


def _write_v1_training(root: Path, several: bool) -> None:
    with v1.training.Checkpointer(root) as checkpointer:
        if several:
            checkpointer.save_checkpointables(3, {"state": STATE, "average": AVERAGE, "note": NOTE}, metrics=METRICS)
        else:
            checkpointer.save(3, STATE)


WRITERS: dict[str, Callable[[Path, bool], None]] = {
    "v0_manager": _write_v0_manager,
    "v0_standard": _write_v0_bare(ocp.StandardCheckpointer),
    "v0_pytree": _write_v0_bare(ocp.PyTreeCheckpointer),
    "v0_plain": _write_v0_bare(lambda: ocp.PyTreeCheckpointer(use_ocdbt=False)),
    "v1_save": _write_v1,
    "v1_training": _write_v1_training,
}


KINDS = [
    (by, several) for by in WRITERS for several in (False, True) if not (several and by in ("v0_standard", "v0_pytree", "v0_plain"))
]


@pytest.mark.parametrize(("by", "several"), KINDS, ids=[f"{by}-{'several' if several else 'one'}" for by, several in KINDS])
def test_raystate_reads_what_stock_orbax_saved(by: str, several: bool, tmp_path: Path):
    root = tmp_path / "run"
    WRITERS[by](root, several)
    assert equal(raystate.load(root / "3", STATE), STATE)
    assert equal(raystate.load(root / "3"), STATE)
    seen = raystate.metadata(root / "3")
    assert described(seen.trees["state"]) == SHAPES["state"]
    if several:
        assert equal(raystate.load(root / "3", AVERAGE, item="average"), AVERAGE)
        assert described(seen.trees["average"]) == SHAPES["average"]
    reader = raystate.Reader(root)
    assert reader.all_steps() == [3]
    items = {"average": AVERAGE} if several else None
    restored = reader.restore(STATE, step=3, items=items)
    assert restored is not None and equal(restored.state, STATE)
    if several:
        assert equal(restored.items["average"], AVERAGE)
        if by == "v0_manager":
            assert restored.items["note"] == NOTE
        else:  # v1 takes a JSON value for a tree
            assert raystate.load(root / "3", item="note") == NOTE
        assert restored.metrics == ({} if by == "v1_save" else METRICS)
