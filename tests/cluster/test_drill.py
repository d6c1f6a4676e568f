"""Short drills, as `python -m jobs.drill` plays them: on these tests' cluster, and each kind of fault once on one of the drill's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.striking import kill_family
from raystate.observe.ledger.reader import read_ledger
from raystate.storage import open_storage
from tests.cluster.training import REPO
from tests.patience import PATIENCE_S
from tests.record.accounting import account, struck

SEED = os.environ["RAYSTATE_SEED"]  # drawn by tests/conftest.py, which prints it
FIXED = "trainer,host,coordinator,node,drain,outage,stall,stop-trainer,stop-host,stop-coordinator,stop-node,clock"


def drill(folder: Path, kinds: str, *given: str) -> dict[str, Any]:
    """What a drill of one fault of each of these kinds says in its JSON, once all is well."""
    facts, number = folder / "drill.json", len(kinds.split(","))
    command = [sys.executable, "-m", "jobs.drill", "--faults", str(number), "--seed", SEED, "--kinds", kinds, "--json", str(facts)]
    command += ["--patience", str(PATIENCE_S / 4), *given]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")]))}
    with subprocess.Popen(
        command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            said, _ = process.communicate(timeout=PATIENCE_S)
        except BaseException:
            kill_family(process.pid)
            raise
    assert process.returncode == 0, said
    assert all(len(line) <= 80 for line in said.splitlines()), said
    found = json.loads(facts.read_text())
    assert found["faults"] == found["recovered"] == number
    assert sorted(found["by_kind"]) == sorted(kinds.split(","))
    assert found["violations"] == []
    return found


def test_a_short_drill(ray_cluster: Any, tmp_path: Path) -> None:
    """On a cluster that is there already."""
    found = drill(tmp_path, "trainer,host,coordinator", "--address", ray_cluster.address, "--storage", str(tmp_path / "run"))
    assert found["bit_equal"] is True


@pytest.mark.long
def test_a_drill_of_every_kind(tmp_path: Path) -> None:
    """On a cluster of the drill's own. The ledger has a cause for each second, and each fault with its own."""
    found = drill(tmp_path, FIXED, "--keep", str(tmp_path / "kept"))
    assert found["bit_equal"] is True
    (storage,) = (tmp_path / "kept").glob("*/storage/run")
    accounting = account(read_ledger(open_storage(str(storage))).lines, map(struck, found["each"]), found["fit_s"])
    assert accounting.problems() == [], accounting


@pytest.mark.long
def test_a_drill_of_an_elastic_run(tmp_path: Path) -> None:
    """It shrinks and grows: the same examples in the same order, and losses that differ by no more than the order of sums."""
    found = drill(tmp_path, "shrink,trainer,node", "--elastic")
    assert (found["bit_equal"], found["same_order"]) == (None, True)
    shrunk, *_ = [fault for fault in found["each"] if fault["kind"] == "shrink"]
    assert shrunk["sizes"][-2:] == [1, 2]
