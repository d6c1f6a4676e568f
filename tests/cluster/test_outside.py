"""A script that was written without raystate adopts it by the diff that README shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raystate

REPO = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("outside_script.py")
# README gives it in a sentence, with a bucket.
CONFIG = 'import sys, raystate\nconfig = raystate.StateConfig(storage=sys.argv[1], run="outside", save_every_steps=5)\n'


def readme_diff() -> list[list[str]]:
    """The hunks of README's diff: groups of lines between empty ones."""
    (text,) = re.findall(r"```diff\n(.*?)```", (REPO / "README.md").read_text(), re.DOTALL)
    return [hunk.splitlines() for hunk in text.strip("\n").split("\n\n")]


def applied(source: str, hunk: list[str]) -> str:
    old = [line[1:] for line in hunk if line[:1] in (" ", "-")]
    new = [line[1:] for line in hunk if line[:1] in (" ", "+")]
    lines = source.splitlines()
    # The last statement of a script may stand under `if __name__ == "__main__":`.
    for indent in ("", "    "):
        wanted = [f"{indent}{line}" for line in old]
        for start in range(len(lines)):
            if lines[start : start + len(old)] == wanted:
                return "\n".join([*lines[:start], *(f"{indent}{line}" for line in new), *lines[start + len(old) :], ""])
    raise AssertionError(f"README's diff doesn't fit: {hunk}")


def adopted() -> str:
    source = SCRIPT.read_text()
    for hunk in readme_diff():
        source = applied(source, hunk)
    head, _, rest = source.partition("import jax\n")
    return f"{head}{CONFIG}import jax\n{rest}"


@pytest.mark.timeout(180)
def test_the_script_adopts_raystate(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(adopted())
    environment = {**os.environ, "PYTHONPATH": str(REPO), "XLA_FLAGS": ""}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    reader = raystate.Reader(tmp_path / "run")
    assert reader.all_steps() == [5, 10, 12]
    slope, offset = 0.0, 0.0
    for step in range(12):  # the same by hand
        x = np.random.default_rng(step).standard_normal(32).astype(np.float32)
        error = slope * x + offset - (3.0 * x + 1.0)
        slope, offset = slope - 0.2 * float(np.mean(error * x)), offset - 0.2 * float(np.mean(error))
    restored = reader.restore()
    np.testing.assert_allclose([restored.state["slope"], restored.state["offset"]], [slope, offset], rtol=1e-4)
    assert restored.metrics["loss"] < 10.0
