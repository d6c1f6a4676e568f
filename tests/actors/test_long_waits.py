"""What takes long says so in the run's log, less and less often, and falls silent when it has ended."""

from __future__ import annotations

import pytest

from raystate.core.formats.messages import HostId, SaveId, Tick, Written
from raystate.observe.long_waits import LongWaits
from raystate.observe.progress import Going, Progress, Share
from raystate.observe.status import UnderWay

MIB = 1 << 20

SAVE = UnderWay(of="a1k120", step=120)
RESTORE = UnderWay(of="1.2.x", step=120, tier="storage")


def told(
    caplog: pytest.LogCaptureFixture, waits: LongWaits, under_way: list[UnderWay], until_s: int, since_s: int = 0
) -> list[str]:
    """What is said in these seconds of ticks."""
    caplog.clear()
    with caplog.at_level("INFO", "raystate.coordinator"):
        for tenth in range(since_s * 10, until_s * 10 + 1):
            waits.look(under_way, Tick(), tenth / 10)
    return [record.getMessage() for record in caplog.records]


def progress(of: str, who: str, done: int, total: int) -> Progress:
    return Progress(of=of, who=who, done_bytes=done * MIB, total_bytes=total * MIB)


def test_a_long_save_says_so_less_and_less_often(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    seconds = (10, 20, 40, 80, 160, 320, 620, 920)
    assert told(caplog, waits, [SAVE], 1000) == [f"step 120 is still being written (save a1k120) after {s} s" for s in seconds]
    assert told(caplog, waits, [], 2000, 1001) == []
    assert told(caplog, waits, [SAVE], 2009, 2000) == [], "what ends before ten seconds says nothing"


def test_a_long_save_says_how_far_it_is_and_how_long_it_still_takes(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    waits.look([SAVE], Tick(), 0.0)
    waits.look([SAVE], progress("a1k120", "h", 1024, 4096), 9.0)
    waits.look([SAVE], progress("a1k120", "g", 1024, 4096), 9.0)
    waits.look([SAVE], progress("a1k999", "g", 7, 7), 9.0)  # of another one, long gone
    begin = "step 120 is still being written (save a1k120) after"
    assert told(caplog, waits, [SAVE], 10) == [f"{begin} 10 s: 2.0 of 8.0 GiB (25%), 204.8 MiB/s, about 30 s left"]
    waits.look([SAVE], progress("a1k120", "g", 3072, 4096), 19.0)
    waits.look([SAVE], Written(host=HostId("h"), save=SaveId("a1k120")), 19.5)  # it says nothing more
    assert told(caplog, waits, [SAVE], 20, 11) == [f"{begin} 20 s: 7.0 of 8.0 GiB (88%), 358.4 MiB/s, about 3 s left"]
    waits.look([SAVE], Written(host=HostId("g"), save=SaveId("a1k120")), 21.0)
    assert told(caplog, waits, [SAVE], 40, 21) == [f"{begin} 40 s: 8.0 of 8.0 GiB (100%), all of it; it is not durable yet"]


def test_a_long_restore_says_so_beside_a_save(caplog: pytest.LogCaptureFixture):
    waits = LongWaits()
    assert told(caplog, waits, [RESTORE], 12) == ["the ranks are still restoring step 120 from storage after 10 s"]
    waits.look([RESTORE], progress("1.2.x", "rank 1", 512, 1024), 15.0)
    waits.look([RESTORE], progress("1.1.x", "rank 1", 1, 1), 15.0)  # of the one before
    [line] = told(caplog, waits, [RESTORE, SAVE], 20, 15)
    assert line.endswith("restoring step 120 from storage after 20 s: 0.5 of 1.0 GiB (50%), 25.6 MiB/s, about 20 s left")


def test_what_goes_on_is_there_for_a_bar():
    waits = LongWaits()
    waits.look([SAVE], Tick(), 5.0)
    waits.look([SAVE], progress("a1k120", "h", 1, 4), 6.0)
    assert waits.going(7.0) == (Going(what="saving", step=120, of="a1k120", since_s=2.0, done_bytes=MIB, total_bytes=4 * MIB),)
    waits.look([], Tick(), 8.0)
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
