"""Seconds from a trainer's death to the next new step, beside plain JaxTrainer with Orbax's CheckpointManager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_back_in_half_the_time_of_plain_ray_and_orbax() -> None:
    environment = {**os.environ, "XLA_FLAGS": "", "RAYSTATE_STANDBY": "1"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # both have to compile again, as users' jobs do
    done = subprocess.run(
        [sys.executable, "benchmarks/recovery.py", "--ranks", "1", "--settle-s", "8", "--json"],
        capture_output=True, text=True, timeout=220, check=False, cwd=REPO, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = {name: rows[0]["to_new_step_s"] for name, rows in found.items()}
    sys.stdout.write(f"to the next new step: plain {seconds['plain']:.1f} s, raystate {seconds['raystate']:.1f} s")
    assert seconds["raystate"] <= 0.5 * seconds["plain"]
    assert found["raystate"][0]["repeated_steps"] <= 1
