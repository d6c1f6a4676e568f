"""How many calls it takes, one after the other, to be back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.model.world import ModelLink, Rank, World

MOST = 5  # to the run, to its group, what to restore, how it went; and one where the pieces lie on another node


def state() -> dict[str, Any]:
    return {"w": np.zeros(8, np.float32)}


def test_a_restore_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for method in ("enter", "ask", "call_host"):
        real = getattr(ModelLink, method)

        def counted(self: ModelLink, *args: Any, _real: Any = real, _method: str = method, **more: Any) -> Any:
            calls.append(f"{_method} {type(args[0]).__name__ if _method == 'ask' else args[1:2]}")
            return _real(self, *args, **more)

        monkeypatch.setattr(ModelLink, method, counted)
    world = World(ranks=2, save_every_steps=100)

    def trains(rank: Rank) -> None:
        manager = rank.begin(state())
        manager.save(1, state())
        for _ in range(100):
            rank.rest(0.01)

    def comes_back(rank: Rank) -> None:
        restored = rank.open("second").restore(state())
        assert restored is not None
        assert (restored.step, restored.tier) == (1, "memory")

    with world:
        world.play(trains, 2)
        calls.clear()
        world.play(comes_back, 2)
    assert len(calls) <= 2 * MOST, calls
