"""`raystate rehearse`: processes, deadline and exit codes, with scripts whose cluster is the model's, without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from raystate.arena import default_root
from raystate.config.rehearsing import VARIABLE, Play, redirected
from raystate.config.state_config import StateConfig
from raystate.rehearsal.plays import Stage
from raystate.storage import open_storage
from tests.patience import PATIENCE_S

LIMIT_S = 90.0  # many times what a script here takes, since it has to be waited for
REPO = Path(__file__).parents[2]
SCRIPT = """
import os, sys, time
import jax.numpy as jnp
import tests.model.world as world
from raystate.config.state_config import StateConfig, check_config
from tests.model.test_uses import run

MISTAKE, STORAGE = sys.argv[1:]
world.StateConfig = lambda **given: check_config(StateConfig(**{**given, "storage": STORAGE}), "the model")

def train(rank):
    with rank.open("one", launched=False) as manager:
        restored = manager.restore_or_init(lambda: {"w": jnp.ones(8), "seen": jnp.zeros((), jnp.int32)})
        state = restored.state
        for step in range(restored.step, 3 if MISTAKE == "short" else 50):
            if MISTAKE == "hangs" and restored.step:
                print(os.getpid(), file=open("asleep", "w"), flush=True)
                time.sleep(1000)
            if MISTAKE == "dies" and restored.step:
                os.kill(os.getpid(), 9)
            state = {"w": state["w"] * 1.01, "seen": state["seen"] + (1.0 if MISTAKE == "float" else 1)}
            manager.save(step + 1, state)

run(train)
"""


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Begin a rehearsal whose temporary folder is the empty `folder`/tmp."""
    (folder / "train.py").write_text(SCRIPT)
    (folder / "tmp").mkdir()
    command = [sys.executable, "-m", "raystate", "rehearse", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "TMPDIR": str(folder / "tmp")}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Its exit code, output and errors."""
    try:
        out, err = process.communicate(timeout=6 * PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def files(folder: Path) -> list[str]:
    return sorted(str(one.relative_to(folder)) for one in folder.rglob("*"))


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
    limit_s = PATIENCE_S if mistake != "hangs" else LIMIT_S
    got, out, err = end(start(tmp_path, "--timeout", str(limit_s), "train.py", mistake, str(tmp_path / "real")))
    assert got == code, out + err
    if code:
        assert told in out + err
    else:
        assert out == told
    assert "Traceback" not in out + err
    assert files(tmp_path) == [*(["asleep"] if mistake == "hangs" else []), "tmp", "train.py"]


def test_a_rehearsal_that_is_ended_leaves_nothing(tmp_path: Path):
    process = start(tmp_path, "train.py", "hangs", str(tmp_path / "real"))
    deadline = time.monotonic() + 6 * PATIENCE_S
    while not (asleep := tmp_path / "asleep").exists() or not asleep.read_text().endswith("\n"):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert end(process)[0] == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(asleep.read_text()), 0)
    assert files(tmp_path) == ["asleep", "tmp", "train.py"]


def test_nothing_of_a_play_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What its process started, and its arena; its record goes with Ray's logs."""
    play = Play(name="first", scratch=f"file://{tmp_path}/scratch", saves=4, limit_s=PATIENCE_S)
    root = default_root(str(tmp_path))
    root.mkdir(mode=0o700)
    (arena := root / "raystate-deadbeef-node").mkdir()
    record = {"kind": "opened", "hash": "deadbeef", "address": "", "arena_dir": str(tmp_path)}
    open_storage(play.scratch).create("records/first/0.json", json.dumps(record).encode())
    Stage(command=["sh", "-c", f"sleep 1000 & echo $! > {tmp_path}/started"], environment={}).play(play)
    assert not arena.exists()
    deadline = time.monotonic() + PATIENCE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(int((tmp_path / "started").read_text()))
        while started.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, started.kill()
            time.sleep(0.05)
    monkeypatch.setenv(VARIABLE, play.environment()[VARIABLE])
    assert redirected(StateConfig(storage=str(tmp_path / "run"), run="lm", record_dir=str(tmp_path))).record_dir is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("nothing.py",), "there is no script nothing.py"),
        (("--timeout", "0", "train.py"), "--timeout"),
        (("-m", "platform"), "platform has ended without a StateManager"),
    ],
)
def test_what_can_not_be_rehearsed_is_a_wrong_use(arguments: tuple[str, ...], told: str, tmp_path: Path):
    code, _, err = end(start(tmp_path, *arguments))
    assert code == 2
    assert told in err
    assert "Traceback" not in err
