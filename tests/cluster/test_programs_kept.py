"""A plain script that is killed and started again compiles nothing on its way to the next step, not even on a machine that is new."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raystate.compilation.store import SUFFIX
from raystate.storage.names import COMPILED
from tests.patience import PATIENCE_S
from tests.processes import job_environment

SCRIPT = """
import json, os, signal, sys, time
import jax, jax.numpy as jnp, raystate
from pathlib import Path
storage = Path(sys.argv[1])
counts = {}
jax.monitoring.register_event_listener(lambda name, **_: counts.update({name: counts.get(name, 0) + 1}))

@jax.jit
def step(w):
    return jnp.tanh(w @ w.T) @ w

with raystate.StateManager(raystate.StateConfig(storage=storage, run="plain", save_every_steps=1)) as manager:
    restored = manager.restore_or_init(lambda: {"w": jnp.ones((64, 64)) / 64})
    w = restored.state["w"]
    for number in range(restored.step, restored.step + 2):
        w = step(w)
        manager.save(number + 1, {"w": w})
    name = "/jax/compilation_cache/"
    asked, found = counts.get(name + "compile_requests_use_cache", 0), counts.get(name + "cache_hits", 0)
    print(json.dumps({"restored": restored.step, "asked": asked, "found": found, "w": float(w[0, 0]).hex()}), flush=True)
    manager.wait_until_finished()
    while sys.argv[2] == "kept" and len([*storage.glob(".raystate/compiled/*/[!.]*.*")]) < asked:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this machine's Ray and its compiled programs lie: a short path, for sockets."""
    for name in [name for name in os.environ if name.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))]:
        monkeypatch.delenv(name)  # as users have it
    with tempfile.TemporaryDirectory(prefix="rs-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _run(machine: Path, storage: Path, *, expects: str = "kept", **env: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(storage), expects],
        env={**job_environment(1), "RAY_ADDRESS": "local", "RAY_TMPDIR": str(machine), **env},
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    return next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))


def test_a_plain_script_compiles_nothing_again(machine: Path, tmp_path: Path):
    storage = tmp_path / "run"
    first = _run(machine, storage)
    assert first["asked"] and not first["found"]
    again = _run(machine, storage)
    assert again["restored"] == 2
    assert again["found"] == again["asked"] > 0, "on its machine"
    (programs,) = machine.glob(f"raystate-programs-{os.getuid()}-*")
    assert list(programs.glob(f"*{SUFFIX}"))
    shutil.rmtree(programs)
    anew = _run(machine, storage)
    assert anew["restored"] == 4
    assert anew["found"] == anew["asked"] > 0, "on another machine"
    assert programs.exists()


def test_a_folder_of_the_users_own_stays_so(machine: Path, tmp_path: Path):
    own = tmp_path / "own"
    _run(
        machine,
        tmp_path / "run",
        expects="nothing",
        JAX_COMPILATION_CACHE_DIR=str(own),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )
    assert list(own.iterdir())
    assert not list(machine.glob("raystate-programs-*")) and not (tmp_path / "run" / COMPILED).exists()
