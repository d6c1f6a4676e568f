"""A plain script of a user without an entry among the system's users, without a home or with one that can't be written to."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tests.processes import REPO

SCRIPT = """
import os
import jax.numpy as jnp
import raystate
with raystate.StateManager(raystate.StateConfig(storage="run", run="homeless", save_every_steps=2)) as manager:
    restored = manager.restore_or_init(lambda: {"x": jnp.zeros(4)})
    for step in range(restored.step + 1, restored.step + 5):
        manager.save(step, restored.state)
print("user", os.getuid())
"""
RAY_TRIES = 5  # a new Ray gives one of its processes 15 s to begin, on a busy machine, too
# Python and its packages may lie where that user can't read.
AS_UNKNOWN = (
    *("setpriv", "--reuid=54321", "--regid=54321", "--clear-groups"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)  # fmt: skip


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can act as another user")
@pytest.mark.parametrize("has_home", [False, True], ids=["no home", "a home that can't be written to"])
def test_it_trains_on_a_ray_of_its_own(has_home: bool):
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as home:
        os.chmod(folder, 0o777)
        os.chmod(home, 0o555)
        environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "RAY_AUTH_MODE")}
        environment |= {"PYTHONPATH": str(REPO), "RAY_ADDRESS": "local", "RAY_TMPDIR": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        for _ in range(RAY_TRIES):
            done = subprocess.run(
                [*AS_UNKNOWN, sys.executable, "-c", SCRIPT], cwd=folder, env={**environment, "HOME": home} if has_home else environment,
                capture_output=True, text=True, timeout=PATIENCE_S, check=False,
            )  # fmt: skip
            if "timed out during startup" not in done.stderr:
                break
        assert done.returncode == 0, done.stderr
        assert "user 54321" in done.stdout
        assert sorted(path.name for path in (Path(folder) / "run").iterdir()) == [".raystate", "2", "4"]
        assert os.listdir(home) == []
