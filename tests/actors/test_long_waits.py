"""What takes long says so in the run's log, less and less often, and falls silent when it has ended."""

from __future__ import annotations

import pytest

from raystate.core.formats.messages import (
    Answer,
    Ask,
    CarriedOut,
    Discard,
    HostId,
    Intent,
    RestoreChoice,
    RestoreSettled,
    SaveId,
    Tick,
    TrainerExited,
    Write,
    Written,
)
from raystate.runtime.long_waits import LongWaits
from raystate.runtime.progress import Going, Progress, Share
from raystate.waits import ABANDONED_S

MIB = 1 << 20

PUBLISHED = Intent(kind="commit", step=120, save="a1k120", attempt=1, seq=7)


def told(caplog: pytest.LogCaptureFixture, waits: LongWaits, until_s: int, since_s: int = 0) -> list[str]:
    """What is said in these seconds of ticks."""
    caplog.clear()
    with caplog.at_level("INFO", "raystate.coordinator"):
        for tenth in range(since_s * 10, until_s * 10 + 1):
            waits.observe(Tick(), tenth / 10)
    return [record.getMessage() for record in caplog.records]


def write(step: int, host: str = "h") -> Write:
    return Write(host=HostId(host), save=SaveId(f"a1k{step}"), lineage="1.1.x", step=step, ranks=(0,))


def progress(of: str, who: str, done: int, total: int) -> Progress:
    return Progress(of=of, who=who, done_bytes=done * MIB, total_bytes=total * MIB)


def test_a_long_save_says_so_less_and_less_often(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    waits.observe(write(120), 0.0)
    seconds = (10, 20, 40, 80, 160, 320, 620, 920)
    assert told(caplog, waits, 1000) == [f"step 120 is still being written (save a1k120) after {s} s" for s in seconds]
    waits.observe(write(120), 1000.0)  # the order is given once more
    waits.observe(CarriedOut(intent=PUBLISHED, error="StorageError: 503"), 1000.0)
    assert len(told(caplog, waits, 1300, 1000)) == 1
    waits.observe(CarriedOut(intent=PUBLISHED), 1301.0)
    waits.observe(write(130), 1301.0)
    waits.observe(Discard(save=SaveId("a1k130"), step=130), 1302.0)
    assert told(caplog, waits, 2000, 1302) == []


def test_a_long_save_says_how_far_it_is_and_how_long_it_still_takes(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    for host in ("h", "g"):
        waits.observe(write(120, host), 0.0)
    waits.observe(progress("a1k120", "h", 1024, 4096), 9.0)
    waits.observe(progress("a1k120", "g", 1024, 4096), 9.0)
    waits.observe(progress("a1k999", "g", 7, 7), 9.0)  # of another one, long gone
    begin = "step 120 is still being written (save a1k120) after"
    assert told(caplog, waits, 10) == [f"{begin} 10 s: 2.0 of 8.0 GiB (25%), 204.8 MiB/s, about 30 s left"]
    waits.observe(progress("a1k120", "g", 3072, 4096), 19.0)
    waits.observe(Written(host=HostId("h"), save=SaveId("a1k120")), 19.5)  # it says nothing more
    assert told(caplog, waits, 20, 11) == [f"{begin} 20 s: 7.0 of 8.0 GiB (88%), 358.4 MiB/s, about 3 s left"]
    waits.observe(Written(host=HostId("g"), save=SaveId("a1k120")), 21.0)
    assert told(caplog, waits, 40, 21) == [f"{begin} 40 s: 8.0 of 8.0 GiB (100%), all of it; it is not durable yet"]


def test_what_ends_before_ten_seconds_says_nothing(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    waits.observe(write(120), 0.0)
    assert told(caplog, waits, 9) == []
    waits.observe(CarriedOut(intent=PUBLISHED), 9.0)
    assert told(caplog, waits, 100, 10) == []


def test_a_long_restore_says_so_until_it_is_settled_or_its_trainers_are_gone(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    choice = RestoreChoice(tier="storage", step=120, begins="1.2.x", save="a1k120")
    for _ in range(2):  # each rank is answered
        waits.observe(Answer(ask=Ask("a"), reply=choice), 0.0)
    assert told(caplog, waits, 12) == ["the ranks are still restoring step 120 from storage after 10 s"]
    waits.observe(progress("1.2.x", "rank 1", 512, 1024), 15.0)
    waits.observe(progress("1.1.x", "rank 1", 1, 1), 15.0)  # of the one before
    [line] = told(caplog, waits, 20, 15)
    assert line.endswith("restoring step 120 from storage after 20 s: 0.5 of 1.0 GiB (50%), 25.6 MiB/s, about 20 s left")
    waits.observe(Answer(ask=Ask("a"), reply=RestoreSettled(step=120, tier="storage")), 22.0)
    assert told(caplog, waits, 60, 22) == []
    waits.observe(Answer(ask=Ask("a"), reply=choice), 60.0)
    waits.observe(TrainerExited(lineage="1.2.x", host=HostId("h"), rank=0, clean=False, reason="killed"), 61.0)
    assert told(caplog, waits, 100, 61) == []


def test_what_nobody_tells_the_end_of_is_forgotten(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    waits.observe(write(120), 0.0)
    waits.observe(Answer(ask=Ask("a"), reply=RestoreChoice(tier="storage", step=110, begins="1.2.x", save="a1k110")), 0.0)
    waits.observe(Tick(), ABANDONED_S)
    assert len(waits.going(ABANDONED_S)) == 2
    assert told(caplog, waits, int(ABANDONED_S) + 900, int(ABANDONED_S) + 1) == []
    assert waits.going(ABANDONED_S + 900) == ()


def test_what_goes_on_is_there_for_a_bar():
    waits = LongWaits()
    waits.observe(write(120), 5.0)
    waits.observe(progress("a1k120", "h", 1, 4), 6.0)
    assert waits.going(7.0) == (Going(what="saving", step=120, of="a1k120", since_s=2.0, done_bytes=MIB, total_bytes=4 * MIB),)
    waits.observe(CarriedOut(intent=PUBLISHED), 8.0)
    assert waits.going(8.0) == ()


def test_a_process_speaks_after_a_second_and_then_every_second_of_its_own_bytes():
    now_s, moved, said = 100.0, 1000, list[Progress]()
    share = Share("h", said.append, lambda: moved, lambda: now_s)
    share.turn()
    share.began("a1k1", 30)
    share.began("a1k1", 10)  # another item of the same
    for _ in range(31):  # three seconds
        share.turn()
        now_s, moved = now_s + 0.1, moved + 1
    assert [(one.of, one.who, one.done_bytes, one.total_bytes) for one in said] == [
        ("a1k1", "h", done, 40) for done in (one.done_bytes for one in said)
    ]
    assert len(said) in (2, 3) and [one.done_bytes for one in said] == sorted({one.done_bytes for one in said})
    moved += 1000  # somebody else's bytes: no more than all
    now_s += 5.0
    share.turn()
    assert (said[-1].done_bytes, said[-1].total_bytes) == (40, 40)
    share.ended("a1k1")
    now_s += 5.0
    share.turn()
    assert len(said) in (3, 4)


@pytest.mark.parametrize(
    ("going", "text"),
    [
        (Going(what="saving", step=1, of="a", since_s=10.0), ""),
        (Going(what="saving", step=1, of="a", since_s=10.0, total_bytes=900), "0 of 900 B (0%)"),
        (
            Going(what="saving", step=1, of="a", since_s=10.0, done_bytes=10, total_bytes=10 << 40),
            "0.0 of 10.0 TiB (0%), 1 B/s, about days left",
        ),
        (
            Going(what="saving", step=1, of="a", since_s=100.0, done_bytes=1 << 30, total_bytes=1 << 32),
            "1.0 of 4.0 GiB (25%), 10.2 MiB/s, about 5 min left",
        ),
    ],
)
def test_amounts_are_told_in_one_unit(going: Going, text: str):
    assert going.text() == text
