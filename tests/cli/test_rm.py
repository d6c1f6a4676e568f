"""`raystate rm`: asks, deletes, and says what it can't see."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest

from raystate.cli import rm
from raystate.reader.saving import save
from tests.cli.conftest import Command


@pytest.fixture
def run(tmp_path: Path, raystate: Command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Steps 1 and 2, and no Ray that can be seen."""
    monkeypatch.setattr(rm, "_free_on_ray", lambda _url, _run, *, keep: False)
    for step in (1, 2):
        save(tmp_path / "saved" / str(step), {"w": np.full(3, step)})
    code, _, errors = raystate("import", tmp_path / "saved", tmp_path / "run")
    assert code == 0, errors
    return tmp_path / "run"


def test_it_asks_and_a_no_changes_nothing(raystate: Command, run: Path, monkeypatch: pytest.MonkeyPatch):
    for answer in ("n\n", "\n", ""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(answer))
        code, said, _ = raystate("rm", run)
        assert code == 1
        assert f"Delete the run with 2 steps of file://{run}? [y/N]" in said
    assert sorted(path.name for path in run.iterdir()) == [".raystate", "1", "2"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    assert raystate("rm", run)[0] == 0
    assert not run.exists()


def test_a_step_then_all(raystate: Command, run: Path):
    code, said, _ = raystate("rm", run, "--step", 1, "--yes")
    assert (code, "step 1 is deleted" in said, "no Ray cluster was found" in said) == (0, True, True)
    assert raystate("ls", run)[1].split().count("2") == 1
    code, _, errors = raystate("rm", run, "--step", 1, "-y")
    assert (code, "has no step 1; its steps: 2" in errors) == (2, True)
    (run / "notes.txt").touch()
    code, said, _ = raystate("rm", run, "--yes")
    assert (code, "what is not the run's stays: notes.txt" in said) == (0, True)
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    code, _, errors = raystate("rm", run, "--yes")
    assert (code, "is no run" in errors) == (2, True)
