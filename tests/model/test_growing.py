"""States and items that grow at each save, as replay buffers do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from raystate.core.formats.errors import CapacityError
from raystate.manager.session import Session
from tests.model.iterators import Holds
from tests.model.world import CAP_BYTES, Rank, World

SAVES = 1000


def rows(step: int) -> dict[str, Any]:
    return {"rows": np.zeros(100 + step, np.float32)}


GROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "an array": lambda step: {"state": rows(step)},
    "an array, by a KiB": lambda step: {"state": {"rows": np.zeros((1000 + step, 128))}},
    "an item": lambda step: {"state": {"w": 1}, "items": {"data": Holds([[0.5, "row"]] * step)}},
    "a tree among the items": lambda step: {"state": {"w": 1}, "items": {"buffer": rows(step)}},
    "the number of arrays": lambda step: {"state": {f"a{number}": np.zeros(2) for number in range(1 + step // 10)}},
}


@pytest.fixture
def allotted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that HostActors were asked for, each time."""
    real, asked = Session.allot, list[int]()

    def allot(self: Session, **need: Any) -> Any:
        asked.append(need["data_bytes"])
        return real(self, **need)

    monkeypatch.setattr(Session, "allot", allot)
    return asked


@pytest.mark.parametrize("given", GROWS.values(), ids=GROWS)
def test_a_thousand_saves_that_grow_ask_for_memory_three_times(given: Any, allotted: list[int]):
    def trains(rank: Rank) -> None:
        with rank.open("first") as manager:
            manager.restore()
            for step in range(1, SAVES + 1):
                manager.save(step, **given(step))

    def goes_on(rank: Rank) -> None:
        with rank.open("second") as manager:
            restored = manager.restore()
            assert restored is not None and restored.step == SAVES

    with World(save_every_steps=SAVES, zstd_level=1) as world:  # compressed: what writing takes grows, too
        world.play(trains)
        assert len(allotted) <= 3
        world.play(goes_on)


def test_where_the_room_to_grow_does_not_fit_the_state_does(allotted: list[int]):
    """It counts as the rest does, and is no reason to refuse a save."""
    least = CAP_BYTES // 7  # six slots fit: three, and three larger ones that are to replace them

    def trains(rank: Rank) -> None:
        with rank.open("first") as manager:
            manager.restore()
            assert manager.save(1, {"rows": np.zeros(least, np.uint8)})
            assert manager.save(2, {"rows": np.zeros(least + 10_000, np.uint8)})
            manager.wait_until_finished()
            with pytest.raises(CapacityError):
                manager.save(3, {"rows": np.zeros(CAP_BYTES, np.uint8)})
            assert manager.save(3, {"rows": np.zeros(least + 9_000, np.uint8)})

    with World(save_every_steps=1) as world:
        world.play(trains)
    assert [nbytes > least * 1.1 for nbytes in allotted[:3]] == [False, True, False], "with room first, then as it is"


class Buffer(Holds):
    """Large, or a mere position; and how often it was asked."""

    def __init__(self, size: int):
        super().__init__({"at": 0, "rows": "x" * size})
        self.asked = 0

    def get_state(self) -> Any:
        self.asked += 1
        return dict(self.state)


@pytest.mark.parametrize("large", [True, False])
def test_a_large_item_is_read_where_the_step_is_captured(large: bool):
    """And at the end, for the last step. A position is read at each: the loop may have gone on before it closes."""
    buffer, again = Buffer(2 << 20 if large else 0), Buffer(0)

    def trains(rank: Rank) -> None:
        with rank.open("first") as manager:
            manager.restore(items={"data": buffer})
            before = buffer.asked
            for step in range(1, 204):
                buffer.state["at"] = step
                manager.save(step, {"w": step}, items={"data": buffer})
            assert buffer.asked - before == (1 + 4 if large else 203), "the first, and steps 50, 100, 150 and 200"
            buffer.state["at"] += not large

    def goes_on(rank: Rank) -> None:
        with rank.open("second") as manager:
            restored = manager.restore(items={"data": again})
            assert restored is not None and restored.step == again.state["at"] == 203

    with World(save_every_steps=1000, snapshot_every_steps=50) as world:
        world.play(trains)
        world.play(goes_on)
