"""A step with every kind of leaf, and the commands in this process."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes  # noqa: F401 - gives numpy "bfloat16", "int4", …
import numpy as np
import pytest

import raystate
from raystate.arrays.restore import ReadRequest
from raystate.arrays.tree import STORABLE
from raystate.cli import main
from raystate.core.formats.tree import LeafSpec
from raystate.inspection import Checkpoints
from raystate.restored import in_memory
from raystate.transfer import IncomingStep, open_source
from tests.orbax.from_state import publish

STEP = 1200


def of_dtype(name: str, shape: tuple[int, ...] = (5, 3)) -> np.ndarray:
    """An array of this dtype, of random bits."""
    random = np.random.default_rng([*name.encode()])
    dtype = np.dtype(name)
    if name == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if name.startswith(("int2", "int4", "uint2", "uint4")):
        return random.integers(-2 if name[0] == "i" else 0, 2, shape).astype(dtype)
    if name == "float4_e2m1fn":
        return random.integers(0, 4, shape).astype(np.float32).astype(dtype)
    return random.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def state() -> dict[str, Any]:
    """Every dtype, in jax's and numpy's arrays, and every other kind of leaf."""
    return {
        "dtypes": {name: of_dtype(name) for name in sorted(STORABLE)},
        "params": {"dense": {"kernel": jax.numpy.arange(96, dtype="bfloat16").reshape(12, 8), "bias": np.zeros(8, np.float32)}},
        "opt": [{"count": np.int32(3), "mu": np.arange(6, dtype=np.float16)}, {}, None, ["größer", 7]],
        "empty": np.zeros((0, 4), np.float32),
        "large": np.arange(3000, dtype=np.float64).reshape(30, 100),  # not within a node of the database
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 4),
        "rate": 0.25,
        "flag": True,
        "nothing": [],
    }


def notes() -> dict[str, Any]:
    """A second item of arrays."""
    return {"seen": np.arange(4), "name": "x"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A storage with step 1200, without a package."""
    return a_run(tmp_path / "run")


def a_run(root: Path) -> Path:
    publish(
        root, {"state": state(), "notes": notes()}, step=STEP, metrics={"loss": 0.5}, custom={"commit": "abc"},
        json_items={"vocabulary": {"tokens": [1, 2]}}, iterators={"data": {0: b"{}", 1: b"[]"}}, world=2,
    )  # fmt: skip
    return root


def leaves(storage: object, item: str = "state") -> dict[tuple[Any, ...], Any]:
    """Path -> everything that must be equal of a leaf, and its bits."""
    values = raystate.load(str(storage), item=item)
    there = Checkpoints(str(storage))
    reader = there.open(there.existing(None))
    spec = reader.tree(reader.state_item() if item == "state" else item)
    return {leaf.path: (*_kind(leaf), _bits(values, leaf)) for leaf in spec.leaves}


def incoming_leaves(url: str) -> dict[tuple[Any, ...], Any]:
    """The same of the state that an import would find at a URL."""
    (step,) = open_source(url)
    assert step.step == STEP
    spec = step.trees["state"]
    found: dict[tuple[Any, ...], Any] = {leaf.path: (*_kind(leaf), None) for leaf in spec.leaves}
    for index, leaf in enumerate(spec.leaves):
        if leaf.array is not None:
            (box,) = step.read("state", [(index, (0,) * len(leaf.array.shape), leaf.array.shape)])
            assert box.dtype == leaf.array.dtype
            found[leaf.path] = (*_kind(leaf), box.tobytes())
    return found


def in_memory_step(step: int, tree: Any) -> IncomingStep:
    """A step whose state is in memory already."""
    spec, source = in_memory("state", tree)

    def read(_item: str, requests: Sequence[Any]) -> list[np.ndarray]:
        return source.read([ReadRequest(*request) for request in requests])

    return IncomingStep(step=step, trees={"state": spec}, read=read)


def _kind(leaf: LeafSpec) -> tuple[Any, ...]:
    array = leaf.array
    return (leaf.kind, repr(leaf.value), *((array.dtype, array.shape, array.key_impl) if array is not None else ()))


def _bits(tree: Any, leaf: LeafSpec) -> bytes | None:
    for key in leaf.path:
        tree = tree[key]
    if leaf.array is None:
        return None
    return np.asarray(jax.random.key_data(tree) if leaf.array.key_impl else tree).tobytes()


def raystate_command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command, in this process."""
    capsys.readouterr()
    with mock.patch.object(sys, "argv", ["raystate", *map(str, arguments)]), pytest.raises(SystemExit) as ended:
        main()
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return int(ended.value.code or 0), out, err


def files(folder: Path) -> list[str]:
    """All that lies below a folder, folders too."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
