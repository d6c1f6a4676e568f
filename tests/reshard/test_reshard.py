"""Saved on one topology, restored on another, through storage: processes x devices x meshes x partitions x dtypes x containers."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raystate.core.formats.errors import ConfigError
from tests.reshard import cases as sizes
from tests.reshard.cases import DTYPES, KEY, Case, Leaf, Spec, publish
from tests.reshard.conftest import ALL, TOPOLOGIES

EXAMPLES = 60 if ALL else 10
SMALL_CHUNK = 256  # bytes; beside shards of kilobytes, as 4 MiB beside those of a user
ARRAYS = 8
DIMENSIONS: list[int] = [0, 1, 48, 96, 192]  # divided by 2, 3, 4, 6 and 8


counter = itertools.count()


def there_and_back(case: Case, old: Any, new: Any, folder: Path) -> tuple[str, list[dict[str, int]]]:
    """(root of the run, per process what it read and what it needed)"""
    here = folder / str(next(counter))
    parts = here / "parts"
    parts.mkdir(parents=True)
    root = str(here / "run")
    old.save(case, root, parts)
    publish(root, [pickle.loads(path.read_bytes()) for path in sorted(parts.iterdir())])
    return root, new.restore(case, root)


# ---------------------------------------------------------------- hypothesis


def meshes(devices: int) -> st.SearchStrategy[list[int]]:
    return st.sampled_from([[x, devices // x] for x in range(1, devices + 1) if devices % x == 0])


def specs(shape: list[int], mesh: list[int]) -> list[Spec]:
    """Every partition of the shape over the mesh that comes out even."""
    size = {"x": mesh[0], "y": mesh[1]}
    found: list[Spec] = []
    for spec in itertools.product([[], ["x"], ["y"], ["x", "y"], ["y", "x"]], repeat=len(shape)):
        used = [axis for axes in spec for axis in axes]
        even = all(length % math.prod(size[axis] for axis in axes) == 0 for length, axes in zip(shape, spec, strict=True))
        if even and len(used) == len(set(used)):
            found.append([list(axes) for axes in spec])
    return found


@st.composite
def cases(draw: st.DrawFn, old_devices: int, new_devices: int) -> Case:
    old_mesh, new_mesh = draw(meshes(old_devices)), draw(meshes(new_devices))

    def leaf() -> Leaf:
        shape = draw(st.lists(st.sampled_from(DIMENSIONS), max_size=2))
        if draw(st.integers(0, 7)) == 0:
            return Leaf(shape, draw(st.sampled_from([d for d in DTYPES if d != KEY])), None, None)
        old, new = (draw(st.sampled_from(specs(shape, mesh))) for mesh in (old_mesh, new_mesh))
        return Leaf(shape, draw(st.sampled_from(DTYPES)), old, new)

    return Case(draw(st.integers(0, 999)), old_mesh, new_mesh, [leaf() for _ in range(ARRAYS)])


@pytest.mark.parametrize(("old", "new"), list(itertools.permutations(TOPOLOGIES, 2)), ids=str)
def test_any_topology_to_any_other(old: Any, new: Any, jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CHUNK_BYTES", SMALL_CHUNK)

    @settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(case=cases(math.prod(old), math.prod(new)))
    def check(case: Case) -> None:
        _, shares = there_and_back(case, jobs[old], jobs[new], tmp_path)
        for share in shares:
            assert share["read"] <= 1.1 * share["touched"], "a chunk is read as a whole, but once"

    check()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param([["x", "y"], []], [[], ["x", "y"]], id="axes swapped"),
        pytest.param([["x"], ["y"]], [["y"], ["x"]], id="axes swapped in two dimensions"),
        pytest.param([[], []], [["x"], ["y"]], id="replicated to sharded"),
        pytest.param([["x"], ["y"]], [[], []], id="sharded to replicated"),
        pytest.param([["x", "y"], []], [["x", "y"], []], id="the same axis, other sizes"),
    ],
)
def test_each_process_reads_its_share(old: Spec, new: Spec, jobs: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "CHUNK_BYTES", 16 << 10)
    leaves = [Leaf([768, 768], "float32", old, new)] * ARRAYS
    _, shares = there_and_back(Case(1, [2, 4], [3, 2], leaves), jobs[2, 4], jobs[3, 2], tmp_path)
    for share in shares:
        assert share["read"] <= 1.1 * share["needed"], share


def test_values_that_differ_between_processes_are_never_committed(jobs: Any, tmp_path: Path) -> None:
    leaves = [
        Leaf([48], "float32", [["x"]], [[]]),
        *[Leaf([6], "float32", None, None)] * 2,
        *[Leaf([], "int8", [], [])] * (ARRAYS - 3),
    ]
    case = Case(5, [3, 2], [2, 4], leaves)
    there_and_back(case, jobs[3, 2], jobs[1, 8], tmp_path)  # equal ones are
    with pytest.raises(
        ConfigError, match=r"step 1 can't be committed. 2 leaves .* state/opt/0/count \(rank 0 \| rank 1 \| rank 2\)"
    ):
        there_and_back(dataclasses.replace(case, own=True), jobs[3, 2], jobs[1, 8], tmp_path)
    assert not (tmp_path / "run" / "1").exists()


def test_stock_orbax_reads_arrays_without_elements(jobs: Any, tmp_path: Path) -> None:
    leaves = [Leaf([0, 48], "float32", [["x"], ["y"]], [[], []]), *[Leaf([48], "bfloat16", [["y"]], [[]])] * (ARRAYS - 1)]
    case = Case(2, [2, 4], [2, 4], leaves)
    root, _ = there_and_back(case, jobs[1, 8], jobs[2, 4], tmp_path)
    with ocp.CheckpointManager(root) as manager:
        got = manager.restore(1, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    assert (got["params"]["layer"].shape, got["params"]["layer"].dtype) == ((0, 48), np.float32)
    assert np.asarray(got["more"]["inner"]["w"]).tobytes() == case.bits(4).tobytes()
