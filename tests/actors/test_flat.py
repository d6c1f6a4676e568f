"""What a HostActor and a Coordinator do for each durable save leaves nothing behind in their processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorstore as ts

from raystate.core.formats.messages import LeaveReply
from raystate.orbax.kv import bytes_written
from raystate.runtime import asks

TIMES = 300
LOOKS = 5


def grows(call: Callable[[int], object]) -> float:
    """Objects that each call leaves, beyond those of the first few. The least of some looks: threads of other tests may end late."""

    def left(numbers: range) -> float:
        gc.collect()
        before = len(gc.get_objects())
        for number in numbers:
            call(number)
        gc.collect()
        return (len(gc.get_objects()) - before) / TIMES

    for number in range(20):
        call(number)
    return min(left(range(20 + look * TIMES, 20 + (look + 1) * TIMES)) for look in range(LOOKS))


def test_a_look_at_the_bytes_written_leaves_nothing(tmp_path: Path):
    store = ts.KvStore.open({"driver": "file", "path": f"{tmp_path}/"}).result()
    before = bytes_written()
    store.write("a", b"x" * 1000).result()
    assert bytes_written() == before + 1000
    assert grows(lambda _: bytes_written()) < 0.1


def test_what_is_answered_takes_the_room_of_its_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asks, "REMEMBERED", 10)
    made = asks.Asks()

    def ask(number: int) -> None:
        future = made.future(f"a{number}")
        made.answer(f"a{number}", LeaveReply(step=number))
        assert future.result(timeout=0.0) == LeaveReply(step=number)
        assert made.future(f"a{number}").result(timeout=0.0) == LeaveReply(step=number), "asked once more"

    assert grows(ask) < 0.1
