"""A trainer that makes no step any more is named, ended, and the run goes on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import raystate
from tests.cluster.training import STEPS, Training


@pytest.mark.long
def test_a_hanging_rank_is_ended_and_named(ray_cluster: Any, make_run: Any, tmp_path: Path, undisturbed: list[str]) -> None:
    run = make_run()
    # Longer than compiling takes on a busy machine; what is shown is that the run ends at all.
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000, hang_timeout_s=20.0)
    training = Training(config, tmp_path / "out", steps=STEPS, step_s=0.02, hang_at=15)
    result = training.finish()
    assert training.digests() == undisturbed
    (recovery,) = result.recoveries
    # Both stood at step 15: rank 0 in a collective, for which it waited for rank 1.
    host = r"\(host [0-9a-f]{8}\)"
    assert re.fullmatch(
        rf"(rank 0 {host}, )?rank 1 {host} made no step for \d+ s after step 15(, and the others wait)?", recovery.cause
    )
    assert recovery.steps_repeated == 15 - recovery.step  # none, but on a machine too busy for a snapshot of each step of 0.02 s
    assert not recovery.interrupted


@pytest.mark.long
def test_a_run_that_gives_up_tells_where_it_hung(ray_cluster: Any, make_run: Any, tmp_path: Path) -> None:
    run = make_run()
    config = raystate.StateConfig(storage=run.storage, run=run.run, save_every_steps=1000, hang_timeout_s=20.0)
    training = Training(config, tmp_path / "out", steps=30, step_s=0.02, hang_at=15, max_failures=0)
    with pytest.raises(raystate.RunFailedError, match="made no step") as caught:
        training.finish()
    cause = caught.value.__cause__ or caught.value
    notes = "\n".join(getattr(cause, "__notes__", ()))
    # Rank 0, the first of those that stood at step 15, waited in its step for rank 1.
    assert "in waits_for_ever" in notes or re.search(r"toy\.py\", line \d+ in train", notes), notes
