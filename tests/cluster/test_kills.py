"""kill -9 of trainers in mid-training: from memory, with at most one step repeated. test_matrix.py kills all kinds of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raystate
from raystate.actors.naming import run_actors
from raystate.storage import run_hash
from tests.cluster.training import STEPS, Training


def _config(make_run: Any) -> raystate.StateConfig:
    run = make_run()
    return raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=10, barrier_timeout_s=60.0, start_timeout_s=60.0)


def test_trainers_killed_twice(
    ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSTATE_STANDBY", "1")
    config = _config(make_run)
    training = Training(config, tmp_path / "out", steps=STEPS)
    training.wait_step(7)
    first, _ = training.kill_trainer(1)
    training.wait_step(first + 8)
    second, _ = training.kill_trainer(0)
    result = training.finish()
    assert training.digests() == undisturbed
    starts = [event for event in training.events.read() if event["event"] == "start" and event["rank"] == 0]
    assert [start["tier"] for start in starts] == ["init", "memory", "memory"]
    # At most one effective snapshot interval is repeated: one step, at steps of 0.2 s.
    assert starts[1]["step"] >= first - 1
    assert starts[2]["step"] >= second - 1
    assert [(recovery.tier, recovery.step) for recovery in result.recoveries] == [
        ("memory", starts[1]["step"]),
        ("memory", starts[2]["step"]),
    ]
    assert result.step == STEPS
    assert run_actors(run_hash(config.storage, config.run)) == []
