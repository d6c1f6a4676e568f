"""Any program, any sequence of calls: nothing that was promised is lost, and nothing comes back that was given up."""

from __future__ import annotations

import os

import pytest

from tests.model.script import play

SEEDS = int(os.environ.get("RAYSTATE_MODEL_SEEDS", "30"))
CHUNK = 10


# Seeds that failed once.
KEPT = (
    81,  # a restore that chose again waited for words of the lineage that it had just ended
)


@pytest.mark.parametrize("seed", KEPT)
def test_what_failed_once(seed: int) -> None:
    assert not play(seed)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_any_sequence_of_calls(first: int) -> None:
    broken = [text for seed in range(first, min(first + CHUNK, SEEDS)) if (text := play(seed))]
    assert not broken, "\n\n".join(broken)
