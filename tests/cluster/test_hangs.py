"""A run that gives up over a hanging trainer. That one goes on shows in docs/howto/resilient-ray-jax.md, and in the drill."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import raystate
from tests.cluster.training import Training


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
