"""Any sequence of calls, as in tests/model, of trainers whose arrays lie in GPUs: real managers, slots and hosts."""

from __future__ import annotations

from random import Random

import pytest

from raystate.arrays import gpu
from raystate.arrays.gpus import Gpus
from raystate.machine import cuda
from tests.gpu.conftest import OFF, StandIn
from tests.model.script import play

CHUNK = 40  # of fewer, none might have arrays that a GPU has room for
SHOWN = 40
SEEDS = 200


@pytest.mark.parametrize(
    "first", [pytest.param(first, marks=pytest.mark.more if first >= SHOWN else ()) for first in range(0, SEEDS, CHUNK)]
)
@pytest.mark.usefixtures("gpus")
def test_any_sequence_of_calls_holds_with_a_gpu(standin: StandIn, monkeypatch: pytest.MonkeyPatch, first: int):
    """With room and without, with slots that can't be registered, and with faults."""
    copies = 0
    for seed in range(first, first + CHUNK):
        random = Random(seed)
        cuda._load.cache_clear()
        monkeypatch.setattr(gpu, "GPUS", Gpus())
        standin.reset(random.choice([0.0, 0.05]))
        room = random.choice([1 << 40, 1 << 40, 1 << 18, 0])
        monkeypatch.setattr(Gpus, "_room", lambda *_, room=room: room)
        standin.let_register(random.choice([1 << 40, 1 << 40, 1 << 20, 0]))
        if random.random() < 0.3:
            standin.fail(after=random.randrange(1, 300))
        broken = play(seed)
        copies += standin.calls(OFF)
        assert not broken
    assert copies
