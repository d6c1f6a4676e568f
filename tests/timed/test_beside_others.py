"""What saving and recovery cost, beside Orbax and plain Ray Train in the same run: for a machine that does nothing else."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.processes import run_python

REPO = Path(__file__).parents[2]
# What tests/conftest.py sets for the other layers' sake. At niceness 0 Ray's workers take the cores from the loop that is measured.
NOT_USERS = ("XLA_FLAGS", "RAY_worker_niceness", "JAX_COMPILATION_CACHE_DIR")
SMALL = ["--state-mib", "128", "--step-s", "0.1", "--rounds", "2", "--skip-every-step"]


def measured(*command: str, **environment: str) -> Any:
    """What a benchmark prints as JSON. It chooses its devices, and compiles as users' jobs do."""
    users = {name: value for name, value in os.environ.items() if name not in NOT_USERS}
    done = run_python(*command, "--json", cwd=REPO, env={**users, **environment})
    return json.loads(done.stdout.splitlines()[-1])


def test_cheaper_than_orbax_in_the_same_loop(tmp_path: Path) -> None:
    """The benchmark of README at a smaller size; it prints both."""
    found = measured("benchmarks/save_cost.py", *SMALL, "--dir", str(tmp_path))["per_save"]
    for name, row in found.items():
        sys.stdout.write(f"{name}: blocked {row['blocked_ms']:.0f} ms, training time lost per save {row['lost_ms']:.0f} ms\n")
    assert found["raystate"]["blocked_ms"] < found["orbax"]["blocked_ms"]
    assert found["raystate"]["lost_ms"] < found["orbax"]["lost_ms"]


def test_back_in_half_the_time_of_plain_ray_and_orbax() -> None:
    found = measured("benchmarks/recovery.py", "--ranks", "1", "--settle-s", "8", XLA_FLAGS="", RAYSTATE_STANDBY="1")
    seconds = {name: rows[0]["to_new_step_s"] for name, rows in found.items()}
    repeated = {name: rows[0]["repeated_steps"] for name, rows in found.items()}
    for name, row in seconds.items():
        sys.stdout.write(f"{name}: to the next new step {row:.1f} s, {repeated[name]} steps repeated\n")
    assert seconds["raystate"] <= 0.5 * seconds["plain"]
    # Both make the same steps durable. The interval of the snapshots between is measured: of 1 to 7 of these steps, or of more where
    # memory is slow beside the cores.
    assert repeated["raystate"] <= repeated["plain"]
