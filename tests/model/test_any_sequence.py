"""Any program, any sequence of calls: nothing that was promised is lost, and nothing comes back that was given up."""

from __future__ import annotations

import os

import pytest

from tests.model.script import play

SEEDS = int(os.environ.get("RAYSTATE_MODEL_SEEDS", "30"))
CHUNK = 10


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_any_sequence_of_calls(first: int) -> None:
    broken = [text for seed in range(first, min(first + CHUNK, SEEDS)) if (text := play(seed))]
    assert not broken, "\n\n".join(broken)
