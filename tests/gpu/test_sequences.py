"""Any sequence of calls, as in tests/model, of trainers whose arrays lie in GPUs: real managers, slots and hosts."""

from __future__ import annotations

from random import Random

import pytest

from raystate.arrays import gpu
from raystate.arrays.gpus import Gpus, Pauses
from raystate.core.trainer.machine import Trainer
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
    """With room and without, with slots that can't be registered, with faults, and with copies that are spread out."""
    copies, spread = 0, list[float]()

    def paused(self: Pauses, share: float, began_s: float) -> None:
        spread.append(self.spread_s)
        until(self, share, began_s)

    until = Pauses.until
    monkeypatch.setattr(Pauses, "until", paused)
    for seed in range(first, first + CHUNK):
        random = Random(seed)
        cuda._load.cache_clear()
        monkeypatch.setattr(gpu, "GPUS", Gpus())
        standin.reset(random.choice([0.0, 0.05]))
        room = random.choice([1 << 40, 1 << 40, 1 << 18, 0])
        monkeypatch.setattr(Gpus, "_room", lambda *_, room=room: room)
        standin.let_register(random.choice([1 << 40, 1 << 40, 1 << 20, 0]))
        spread_s = random.choice([0.0, 0.02])
        monkeypatch.setattr(Trainer, "copy_spread_s", lambda *_, spread_s=spread_s: spread_s)
        if random.random() < 0.3:
            standin.fail(after=random.randrange(1, 300))
        broken = play(seed)
        copies += standin.calls(OFF)
        assert not broken
    assert copies and spread
