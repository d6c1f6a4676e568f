"""A script that was written without raystate adopts it by the diff that README shows."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import raystate
from jobs.striking import kill_family
from raystate.arena import default_root
from raystate.storage import run_hash
from tests.cluster import strikes
from tests.diffs import apply_hunk, hunks_of
from tests.patience import PATIENCE_S
from tests.processes import REPO, job_environment

SCRIPT = Path(__file__).with_name("outside_script.py")
# README's first script has one.
CONFIG = 'import sys, raystate\nconfig = raystate.StateConfig(storage=sys.argv[1], run="outside", save_every_steps=5)\n'


def adopted() -> str:
    source = SCRIPT.read_text()
    for hunk in hunks_of(REPO / "README.md"):
        # The last statement of a script may stand under `if __name__ == "__main__":`.
        source = apply_hunk(source, hunk, indents=("", "    "))
    head, _, rest = source.partition("import jax\n")
    return f"{head}{CONFIG}import jax\n{rest}"


class Run:
    """The script, with a Ray of its own."""

    def __init__(self, script: Path, storage: Path):
        # A Ray of its own, not that of another test, which may be killed at any time.
        environment = {**job_environment(1), "RAY_ADDRESS": "local"}
        self._log = script.with_suffix(".log")
        with open(self._log, "wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, str(script), str(storage)],
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=script.parent,
                env=environment,
            )

    @property
    def error(self) -> str | None:
        return None if self._process.poll() in (None, 0) else self._log.read_text()[-3000:]

    def finish(self) -> None:
        self._process.wait(PATIENCE_S)
        assert self.error is None, self.error

    def kill(self) -> None:
        """The script, its Ray, and all that this has started."""
        if self._process.poll() is None:
            kill_family(self._process.pid)
            self._process.wait()


def by_hand() -> dict[str, Any]:
    """What the script computes, without Ray and without saving."""
    script = runpy.run_path(str(SCRIPT))
    state, batches = jax.jit(script["init"])(), script["Batches"]()
    for _ in range(script["steps"]):
        state, _ = script["train_step"](state, next(batches))
    return {name: np.asarray(value) for name, value in state.items()}


@pytest.mark.long
@pytest.mark.parametrize("turn", strikes.ROUNDS)
def test_the_script_adopts_raystate_and_survives_its_cluster(turn: int, ray_cluster: Any, tmp_path: Path) -> None:
    """Its whole cluster is killed in some phase of a save, and the same command is given again."""
    script, storage = tmp_path / "train.py", tmp_path / "run"
    script.write_text(adopted())
    reader = raystate.Reader(storage)
    phase = strikes.phase_of("cluster", turn)
    run = Run(script, storage)
    try:
        strikes.wait_for(lambda: storage.exists() and reader.latest_step() is not None, "the first step", failed=lambda: run.error)
        with strikes.held(phase, run):
            before = reader.latest_step()
            run.kill()
        run = Run(script, storage)
        run.finish()
    finally:
        run.kill()
    assert before is not None
    left = list(default_root().glob(f"raystate-{run_hash(storage, 'outside')}-*"))
    assert left == [], "what the dead cluster held in shared memory goes with the next start"
    assert reader.latest_step() == 40
    restored = reader.restore()
    for name, value in by_hand().items():
        assert restored.state[name].tobytes() == value.tobytes(), name
    assert restored.metrics["loss"] < 10.0
    strikes.played["cluster", phase] = f"killed when step {before} was durable, went on from storage"
