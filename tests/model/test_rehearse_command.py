"""`raystate rehearse`: processes, deadline and exit codes, with scripts whose cluster is the model's, without Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

LIMIT_S = 90.0  # many times what a script here takes, since it has to be waited for
REPO = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
import jax.numpy as jnp
import tests.model.world as world
from raystate.config import StateConfig, check_config
from tests.model.test_uses import run

MISTAKE, STORAGE = sys.argv[1:]
world.StateConfig = lambda **given: check_config(StateConfig(**{**given, "storage": STORAGE}), "the model")

def train(rank):
    with rank.open("one", launched=False) as manager:
        restored = manager.restore_or_init(lambda: {"w": jnp.ones(8), "seen": jnp.zeros((), jnp.int32)})
        state = restored.state
        for step in range(restored.step, 3 if MISTAKE == "short" else 50):
            if MISTAKE == "hangs" and restored.step:
                time.sleep(1000)
            if MISTAKE == "dies" and restored.step:
                os.kill(os.getpid(), 9)
            state = {"w": state["w"] * 1.01, "seen": state["seen"] + (1.0 if MISTAKE == "float" else 1)}
            manager.save(step + 1, state)

run(train)
"""


def rehearse(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "raystate", "rehearse", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=6 * PATIENCE_S, check=False)


def folders() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob("raystate-rehearsal-*"))


RIGHT = "rehearsal of train.py: a restart works and computes the same, bit by bit (steps 3 to 4, 2 entries)\n"
ENDS = {
    "none": (0, RIGHT),
    "float": (1, "seen: expected dtype int32, the checkpoint has float32"),
    "hangs": (1, "the restart fails: it had not come to its end after"),
    "dies": (1, "the restart fails: its process was ended by SIGKILL"),
    "short": (2, "train.py has ended after it had called save() 3 times: a rehearsal needs 4 saves"),
}


@pytest.mark.parametrize("mistake", [pytest.param(name, marks=[pytest.mark.long] if name == "hangs" else []) for name in ENDS])
def test_a_script_is_rehearsed_and_its_storage_is_not_touched(mistake: str, tmp_path: Path):
    code, told = ENDS[mistake]
    before = folders()
    limit_s = PATIENCE_S if mistake != "hangs" else LIMIT_S
    done = rehearse(tmp_path, "--timeout", str(limit_s), "train.py", mistake, str(tmp_path / "real"))
    assert done.returncode == code, done.stdout + done.stderr
    if code:
        assert told in done.stdout + done.stderr
    else:
        assert done.stdout == told
    assert "Traceback" not in done.stdout + done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["train.py"]
    assert folders() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nothing.py",), "there is no script nothing.py"),
        (("--timeout", "0", "train.py"), "--timeout"),
        (("-m", "platform"), "platform has ended without a StateManager"),
    ],
)
def test_what_can_not_be_rehearsed_is_a_wrong_use(arguments: tuple[str, ...], told: str, tmp_path: Path):
    done = rehearse(tmp_path, *arguments)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
