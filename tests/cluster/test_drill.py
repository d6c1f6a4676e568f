"""A short drill: one fault of each of several kinds, on a cluster of its own, as `python -m jobs.drill` plays it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cluster.training import REPO
from tests.patience import PATIENCE_S
from tests.processes import kill_family

SEED = os.environ["RAYSTATE_SEED"]  # drawn by tests/conftest.py, which prints it
KINDS = "trainer,host,coordinator,node,drain,outage"


@pytest.mark.long
def test_a_short_drill(tmp_path: Path) -> None:
    facts = tmp_path / "drill.json"
    given = ["--faults", str(len(KINDS.split(","))), "--seed", SEED, "--kinds", KINDS, "--json", str(facts)]
    patient = ["--patience", str(PATIENCE_S / 4)]
    command = [sys.executable, "-m", "jobs.drill", *given, *patient]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))}
    with subprocess.Popen(
        command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=PATIENCE_S)
        except BaseException:
            kill_family(psutil.Process(process.pid))
            raise
    assert process.returncode == 0, said
    found = json.loads(facts.read_text())
    assert found["faults"] == found["recovered"] == len(KINDS.split(","))
    assert sorted(found["by_kind"]) == sorted(KINDS.split(","))
    assert found["bit_equal"] is True
    assert found["violations"] == []
    assert all(len(line) <= 80 for line in said.splitlines()), said
