"""What takes long says so in the run's log, every ten seconds, and falls silent when it has ended."""

from __future__ import annotations

import pytest

from raystate.core.messages import (
    Answer,
    Ask,
    Discard,
    HostId,
    PublishDone,
    RestoreChoice,
    RestoreSettled,
    SaveId,
    Tick,
    TrainerExited,
    Write,
)
from raystate.runtime.long_waits import LongWaits


def told(caplog: pytest.LogCaptureFixture, waits: LongWaits, until_s: int, since_s: int = 0) -> list[str]:
    """What is said in these seconds of ticks."""
    caplog.clear()
    with caplog.at_level("INFO", "raystate.coordinator"):
        for tenth in range(since_s * 10, until_s * 10 + 1):
            waits.observe(Tick(), tenth / 10)
    return [record.getMessage() for record in caplog.records]


def write(step: int) -> Write:
    return Write(host=HostId("h"), save=SaveId(f"a1k{step}"), lineage="1.1.x", step=step, ranks=(0,))


def test_a_long_save_says_so_every_ten_seconds(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    waits.observe(write(120), 0.0)
    assert told(caplog, waits, 25) == [f"step 120 is still being written (save a1k120) after {s} s" for s in (10, 20)]
    waits.observe(write(120), 25.0)  # the order is given once more
    waits.observe(PublishDone(step=120, save="a1k120", error="StorageError: 503"), 25.0)
    assert len(told(caplog, waits, 35, 26)) == 1
    waits.observe(PublishDone(step=120, save="a1k120"), 36.0)
    waits.observe(write(130), 36.0)
    waits.observe(Discard(save=SaveId("a1k130"), step=130), 37.0)
    assert told(caplog, waits, 100, 37) == []


def test_what_ends_before_ten_seconds_says_nothing(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    waits.observe(write(120), 0.0)
    assert told(caplog, waits, 9) == []
    waits.observe(PublishDone(step=120, save="a1k120"), 9.0)
    assert told(caplog, waits, 100, 10) == []


def test_a_long_restore_says_so_until_it_is_settled_or_its_trainers_are_gone(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    choice = RestoreChoice(tier="storage", step=120, begins="1.2.x", save="a1k120")
    for _ in range(2):  # each rank is answered
        waits.observe(Answer(ask=Ask("a"), reply=choice), 0.0)
    assert told(caplog, waits, 12) == ["the ranks are still restoring step 120 from storage after 10 s"]
    waits.observe(Answer(ask=Ask("a"), reply=RestoreSettled(step=120, tier="storage")), 12.0)
    assert told(caplog, waits, 40, 12) == []
    waits.observe(Answer(ask=Ask("a"), reply=choice), 40.0)
    waits.observe(TrainerExited(lineage="1.2.x", host=HostId("h"), rank=0, clean=False, reason="killed"), 41.0)
    assert told(caplog, waits, 100, 41) == []
