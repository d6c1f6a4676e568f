"""A rehearsal on a real Ray leaves nothing. What it finds is told in tests/model: test_rehearsed, test_rehearse_command; docs/tutorial.md
rehearses on Ray, too."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import ray

from raystate.actors.naming import find_coordinators
from raystate.arena import default_root
from tests.patience import PATIENCE_S
from tests.processes import job_environment, run_python

SCRIPT = """
import jax, jax.numpy as jnp
import raystate

config = raystate.StateConfig(storage="runs/real", run="real", save_every_steps=1)

def train():
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with raystate.StateManager(config) as manager:
        restored = manager.restore_or_init(lambda: {"w": jnp.arange(48.0), "seen": jnp.zeros(48, jnp.int32)}, sharding)
        state = restored.state
        for step in range(restored.step, 50):
            state = jax.jit(lambda state: {"w": state["w"] * 1.01 + 1, "seen": state["seen"] + 1})(state)
            manager.save(step + 1, state)

if __name__ == "__main__":
    raystate.fit(train, config, num_workers=2)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary folder that no other test uses."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)


def left() -> set[object]:
    """What a rehearsal could leave behind on this cluster: actors, shared memory, folders. Of a test before, some may end meanwhile."""
    root, nodes = default_root(), [node["NodeID"][:12] for node in ray.nodes()]
    arenas = {one for node in nodes for one in root.glob(f"*-{node}")}
    return {*find_coordinators(), *arenas, *Path(tempfile.gettempdir()).iterdir()}


def rehearse(cluster: Any, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    environment = {**job_environment(1), "RAY_ADDRESS": cluster.address}
    return run_python("-m", "raystate", "rehearse", *arguments, cwd=folder, env=environment, timeout_s=4 * PATIENCE_S)


@pytest.mark.long
def test_a_right_script_gets_one_line_and_leaves_nothing(ray_cluster: Any, tmp_path: Path):
    before = left()
    done = rehearse(ray_cluster, tmp_path, "train.py")
    assert done.stdout == "rehearsal of train.py: a restart works and computes the same, bit by bit (steps 3 to 4, 2 entries)\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["tmp", "train.py"]  # the real storage is not even made
    assert left() <= before
