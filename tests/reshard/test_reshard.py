"""Saved on one topology, restored on another, through storage: processes x devices x meshes x partitions x dtypes x containers."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raystate.core.errors import ConfigError
from tests.processes import free_port, job_environment
from tests.reshard import cases as sizes
from tests.reshard.cases import DTYPES, KEY, Case, Leaf, Spec, publish, restore_share, save_share

ALL = bool(os.environ.get("RAYSTATE_ALL"))
EXAMPLES = 60 if ALL else 10
TOPOLOGIES = [(1, 8), (2, 4), (3, 2), *([(4, 2), (6, 1), (1, 1)] if ALL else [])]  # processes x devices each
SMALL_CHUNK = 256  # bytes; beside shards of kilobytes, as 4 MiB beside those of a user
ARRAYS = 8
DIMENSIONS: list[int] = [0, 1, 48, 96, 192]  # divided by 2, 3, 4, 6 and 8


class Here:
    """This process: 8 devices."""

    devices = 8

    def save(self, case: Case, root: str, parts: Path) -> None:
        (parts / "0").write_bytes(pickle.dumps(save_share(case, root)))

    def restore(self, case: Case, root: str) -> list[dict[str, int]]:
        return [restore_share(case, root)]

    def close(self) -> None:
        pass


class Group:
    """A JAX job of several processes, waiting for orders."""

    def __init__(self, processes: int, devices: int, log: Path):
        self.devices = processes * devices
        port, environment = free_port(), job_environment(devices)
        script = str(Path(__file__).with_name("worker.py"))
        self._log = open(log, "wb")  # noqa: SIM115 - closed with the group
        self._processes = [
            subprocess.Popen(
                [sys.executable, script, str(processes), str(index), str(port)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment,
            )
            for index in range(processes)
        ]  # fmt: skip

    def _order(self, **order: Any) -> list[dict[str, Any]]:
        line = json.dumps({"chunk_bytes": sizes.CHUNK_BYTES, **order}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        answers: list[dict[str, Any]] = []
        for process in self._processes:
            assert process.stdout is not None
            got = process.stdout.readline()
            assert got, f"a process has ended: {Path(self._log.name).read_text()[-3000:]}"
            answers.append(json.loads(got))
        errors = [answer["error"] for answer in answers if "error" in answer]
        assert not errors, errors[0]
        return answers

    def save(self, case: Case, root: str, parts: Path) -> None:
        self._order(do="save", case=dataclasses.asdict(case), root=root, parts=str(parts))

    def restore(self, case: Case, root: str) -> list[dict[str, int]]:
        return self._order(do="restore", case=dataclasses.asdict(case), root=root)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[int, int], Any]]:
    """(processes, devices each) -> the job."""
    folder = tmp_path_factory.mktemp("groups")
    made: dict[tuple[int, int], Any] = {}
    try:
        for topology in TOPOLOGIES:
            made[topology] = Here() if topology == (1, 8) else Group(*topology, folder / f"{topology}.log")
        yield made
    finally:
        for job in made.values():
            job.close()


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
